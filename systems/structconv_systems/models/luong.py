"""The attention of Luong et al. (2015): four scores, global or in windows, with input feeding or without."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv import ConfigError, Padding, Window, mechanisms
from structconv.nn import Conv, Linear
from structconv.nn.cache import Cache
from structconv.shapes import check_choice, check_positive
from structconv_systems.models.recurrent import Recurrent, lstm_step
from structconv_systems.models.tokens import PAD

__all__ = ["Luong", "LuongDecoding", "alignment"]

SCORES = ("location", "dot", "general", "additive")
WINDOWS = ("global", "local-m", "local-p")


class Luong(nn.Module):
    """p(y_t | y_<t, x) = softmax(W_s a_t), a_t = tanh(W_c [c_t; h_t]), h_t of a stack of LSTMs.

    The context c_t is the sum of the encoder's states s_m by the weights of `alignment(...)`: one layer whose Theta is
    the half of W_c for the context. With input feeding the decoder reads [e_t; a_(t-1)], else e_t alone. Both stacks
    read in one direction, the encoder the source from its end; the decoder starts with its last states.

    Args:
        source_words, target_words: sizes of the vocabularies.
        embed: channels of words. hidden: H of all layers. layers: number of LSTMs in each stack.
        score, window, radius, length: see `alignment`; score=None has no attention and no c_t. Words of a source after
            the first `length` get no weight (section 3.1).
        input_feeding: if True, the decoder reads the a_t of the word before (section 3.3).
        dropout: probability of dropout on the input of each layer and on a_t.

    Calling it: source (B, M) and target (B, N) integers, padded with 0 at the end, the target beginning with 1 ->
    logits (B, N, V) of the next words. Without input feeding one call of the attention serves all N words, else it
    takes N steps over the source, which is prepared once.

    Luong et al. (2015), eq. 5 to 10 and sections 3.1 to 3.3 (4 layers of 1000, D = 10). Unlike them: dropout of the
    encoder's layers is the same for all words of a sentence.

    Raises:
        ConfigError: options contradict each other.

    Example:

        >>> from structconv_systems.models.luong import Luong
        >>> model = Luong(20, 20, embed=8, hidden=8).eval()
        >>> source, target = torch.tensor([[5, 6, 2], [7, 2, 0]]), torch.tensor([[1, 8, 9, 5], [1, 9, 0, 0]])
        >>> model(source, target).shape                    # logits of the word that follows each
        torch.Size([2, 4, 20])
    """

    def __init__(self, source_words: int, target_words: int, *, embed: int = 256, hidden: int = 256, layers: int = 2,
                 score: str | None = "general", window: str = "global", radius: int | None = None,
                 length: int | None = None, input_feeding: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        if score is None and (window, radius, length) != ("global", None, None):
            raise ConfigError("Luong", "window, radius and length must be left out with score=None",
                              f"{window!r}, {radius} and {length}")
        self.by_place, self.input_feeding, self.length = window == "local-m", input_feeding, length
        self.source = nn.Embedding(source_words, embed, padding_idx=PAD)
        self.target = nn.Embedding(target_words, embed, padding_idx=PAD)
        self.encoder = Recurrent(nn.LSTM, embed, hidden, layers=layers, dropout=dropout)
        self.decoder = nn.LSTM(embed + hidden * input_feeding, hidden, layers, batch_first=True,
                               dropout=dropout if layers > 1 else 0.0)
        self.context = None if score is None else Conv(
            alignment(score, window, radius=radius, length=length, dim=hidden), hidden, hidden)
        self.own, self.words = Linear(hidden, hidden, bias=False), Linear(hidden, target_words)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.logits(self.begin(source).advanced(target)[1])

    def begin(self, source: Tensor) -> LuongDecoding:
        """Return the decoder before the first word, for sources (B, M)."""
        backward = source.flip(1)
        states, last = self.encoder(self.dropout(self.source(backward)), backward != PAD)
        near, exist = states.flip(1)[:, :self.length], (source != PAD)[:, :self.length]
        context = None if self.context is None else self.context.prepare(near, Padding(exist))
        return LuongDecoding(self, context, *last)

    def attentional(self, cache: Cache | None, state: Tensor, first: int) -> Tensor:
        """Return a_t (B, N, H) for h_t, the first of which has position `first` in the target."""
        own = self.own(state)
        if self.context is None:
            return torch.tanh(own)
        return torch.tanh(self.context(cache, z=state, positions=first if self.by_place else None) + own)

    def logits(self, attentional: Tensor) -> Tensor:
        """Return the logits of the next words from a_t (..., H)."""
        return self.words(self.dropout(attentional))

    def alignment(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the attention weights of each target word over the source words: (N, M) for a pair (M) and (N), (B, N,
        M) for a batch. The target begins with 1: row i belongs to the word after target[i].

        Raises:
            ConfigError: the model has no attention.
        """
        if self.context is None:
            raise ConfigError("alignment", "the model must have attention", "Luong(score=None)")
        if source.dim() == 1:
            return self.alignment(source.unsqueeze(0), target.unsqueeze(0)).squeeze(0)
        decoding = self.begin(source)
        assert decoding.context is not None
        states, _ = decoding.advanced(target)
        weights = self.context.basis(decoding.context, z=states).dense().squeeze(1).mT
        return F.pad(weights, (0, source.shape[1] - weights.shape[-1]))


class LuongDecoding:
    """The `Decoding` of a batch by `Luong`.

    Args:
        context: the prepared states of the sources, or None. h, c: the states of all layers, (layers, B, H).
    """

    def __init__(self, model: Luong, context: Cache | None, h: Tensor, c: Tensor) -> None:
        self.model, self.context, self.h, self.c = model, context, h, c
        self.attentional, self.length = h.new_zeros(h.shape[1:]), 0

    def advance(self, word: Tensor) -> Tensor:
        """Go on by an embedded word (B, embed); returns h_t (B, H) of the last layer."""
        model = self.model
        inputs = torch.cat([word, self.attentional], -1) if model.input_feeding else word
        self.h, self.c = lstm_step(model.decoder, inputs, self.h, self.c)
        state = self.h[-1]
        self.attentional = model.attentional(self.context, state.unsqueeze(1), self.length).squeeze(1)
        self.length += 1
        return state

    def advanced(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """All h_t and a_t (B, N, H) over words (B, N)."""
        model, words = self.model, self.model.dropout(self.model.target(target))
        if model.input_feeding:
            states, outputs = zip(*((self.advance(word), self.attentional) for word in words.unbind(1)), strict=True)
            return torch.stack(states, 1), torch.stack(outputs, 1)
        states, (self.h, self.c) = model.decoder(words, (self.h, self.c))
        return states, model.attentional(self.context, states, 0)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) of the words that follow tokens (B)."""
        self.advance(self.model.target(tokens))
        return self.model.logits(self.attentional)

    def reorder(self, samples: Tensor) -> None:
        """Sample b goes on as sample samples[b]."""
        self.h, self.c, self.attentional = self.h[:, samples], self.c[:, samples], self.attentional[samples]
        if self.context is not None:
            self.context.reorder(samples)


def alignment(score: str, window: str = "global", *, radius: int | None = None, length: int | None = None,
              dim: int | None = None) -> mechanisms.Mechanism:
    """Return the weights of Luong's attention as an expression: a softmax of scores over all inputs ("global"), over
    those within `radius` of the output's position ("local-m"), or of a predicted one, times a Gaussian of deviation
    radius / 2 around it ("local-p", eq. 9 and 10).

    Args:
        score: "location" (W h)_m, "dot" h s, "general" h W s, or "additive" v tanh(W h + U s) ("concat").
        radius: D, in windows. length: of the longest source, by location. dim: of additive scores.

    Raises:
        ConfigError: a score or window is unknown; a radius, length or dim is missing or not allowed.

    Example:

        >>> from structconv_systems.models.luong import alignment
        >>> alignment("general", "local-m", radius=2)
        General().masked(keep=STRUCTURE).masked(keep=Window(radius=2)).softmax(over='inputs')
    """
    check_choice("Luong", "score", score, SCORES)
    check_choice("Luong", "window", window, WINDOWS)
    if length is not None and score != "location":
        raise ConfigError("Luong", "length must be left out but with score='location'", f"{length} with {score!r}")
    scores = _scores(score, length, dim).masked(keep=mechanisms.STRUCTURE)
    if window == "global":
        if radius is not None:
            raise ConfigError("Luong", "radius must be left out with window='global'", radius)
        return scores.softmax()
    near = _required("radius", radius, f"window={window!r}")
    if window == "local-m":
        return scores.masked(keep=Window(near)).softmax()
    center: Any = mechanisms.PredictedPosition()
    weights = scores.masked(keep=Window(near, center=center)).softmax()
    return weights * mechanisms.GaussianWindow(near / 2, center=center)


def _scores(score: str, length: int | None, dim: int | None) -> mechanisms.Mechanism:
    if score == "location":
        return mechanisms.Location(_required("length", length, "score='location'"))
    if score == "additive":
        return mechanisms.Additive(_required("dim", dim, "score='additive'"))
    return mechanisms.DotProduct() if score == "dot" else mechanisms.General()


def _required(name: str, value: int | None, option: str) -> int:
    if value is None:
        raise ConfigError("Luong", f"{name} must be given with {option}", "none")
    return check_positive("Luong", name, value)
