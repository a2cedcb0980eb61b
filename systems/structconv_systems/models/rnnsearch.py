"""RNNsearch (Bahdanau et al. 2015), and the encoder-decoder without attention (Cho et al. 2014) beside it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from structconv import STRUCTURE, Additive, ConfigError, Padding
from structconv.nn import Conv, Linear
from structconv_systems.models.recurrent import Recurrent, gated
from structconv_systems.models.tokens import PAD

__all__ = ["RNNsearch", "RNNsearchDecoding"]


class RNNsearch(nn.Module):
    """p(y_i | y_<i, x) = softmax(W_o maxout(U_o s_i + V_o e_i + C_o c_i)), s_i = GRU(s_(i-1), W e_i + C c_i).

    e_i embeds y_(i-1), h_m joins the states of both directions of the encoder, and s_0 = tanh(W_s h_1), of its backward
    half. The context is c_i = sum_m a_mi h_m, a = softmax_m(v^T tanh(W_a s_(i-1) + U_a h_m)): one layer with additive
    scores whose Theta is [C, C_o], so that each state of the source is multiplied by it once.

    Without attention c_i is the last states of both directions at all steps, a fixed summary; all else is equal.

    Args:
        source_words, target_words: sizes of the vocabularies.
        embed: channels of words. hidden: channels of each direction of the encoder, and of the decoder.
        align: D of the scores; default: `hidden`. readout: channels of the maxout; default: half of `hidden`.
        attention: if True, the decoder attends to the states of all source words.
        dropout: probability of dropout on embedded words and on the maxout.

    Calling it: source (B, M) and target (B, N) integers, padded with 0 at the end, the target beginning with 1 ->
    logits (B, N, V) of the next words. O(M + N) sequential steps; a step of the decoder costs O(B M D) besides its
    products.

    Bahdanau et al. (2015), sections 3.1, 3.2, A.1.2 and A.2 (1000 states, words of 620, a maxout of 500); Cho et al.
    (2014), section 2.2. Unlike them: the reset gate is after the product, as in torch; the encoder is bidirectional
    without attention too; the maxout reads s_i (eq. 4), not s_(i-1) (A.2.2); no orthogonal initialization.

    Example:

        >>> from structconv_systems.models.rnnsearch import RNNsearch
        >>> model = RNNsearch(20, 20, embed=8, hidden=8).eval()
        >>> source, target = torch.tensor([[5, 6, 2], [7, 2, 0]]), torch.tensor([[1, 8, 9, 5], [1, 9, 0, 0]])
        >>> model(source, target).shape                    # logits of the word that follows each
        torch.Size([2, 4, 20])
    """

    def __init__(self, source_words: int, target_words: int, *, embed: int = 256, hidden: int = 256,
                 align: int | None = None, readout: int | None = None, attention: bool = True,
                 dropout: float = 0.0) -> None:
        super().__init__()
        readout = hidden // 2 if readout is None else readout
        #: Channels of the gates, and of the pairs of the maxout; words and contexts are inputs of both.
        self.sizes, self.attention = (3 * hidden, 2 * readout), attention
        states, inputs = 2 * hidden, sum(self.sizes)
        self.source = nn.Embedding(source_words, embed, padding_idx=PAD)
        self.target = nn.Embedding(target_words, embed, padding_idx=PAD)
        self.encoder = Recurrent(nn.GRU, embed, hidden, bidirectional=True)
        self.first = Linear(hidden, hidden)
        scores = Additive(hidden if align is None else align).masked(keep=STRUCTURE)
        self.context: Conv | nn.Linear = (Conv(scores.softmax(), states, inputs, other_channels=hidden) if attention
                                          else Linear(states, inputs))
        self.word, self.state = Linear(embed, inputs, bias=False), Linear(hidden, 3 * hidden)
        self.pairs, self.words = Linear(hidden, 2 * readout), Linear(readout, target_words)
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        states, inputs = self.begin(source).advanced(target)
        return self.logits(states, inputs)

    def begin(self, source: Tensor) -> RNNsearchDecoding:
        """Return the decoder before the first word, for sources (B, M)."""
        keep = source != PAD
        states, last = self.encoder(self.dropout(self.source(source)), keep)
        first = self.first(last[1]).tanh()
        if isinstance(self.context, Conv):
            return RNNsearchDecoding(self, self.context.prepare(states, Padding(keep)), first)
        forward = states[torch.arange(source.shape[0], device=source.device), keep.sum(1) - 1].chunk(2, -1)[0]
        return RNNsearchDecoding(self, self.context(torch.cat([forward, last[1]], -1)), first)

    def logits(self, states: Tensor, inputs: Tensor) -> Tensor:
        """Return the logits of the next words from s_i (..., hidden) and the products of words and contexts."""
        most = (self.pairs(states) + inputs).unflatten(-1, (-1, 2)).amax(-1)
        return self.words(self.dropout(most))

    def alignment(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the attention weights of each target word over the source words: (N, M) for a pair (M) and (N), (B, N,
        M) for a batch. The target begins with 1: row i belongs to the word after target[i].

        Raises:
            ConfigError: the model has no attention.
        """
        if not isinstance(self.context, Conv):
            raise ConfigError("alignment", "the model must have attention", "RNNsearch(attention=False)")
        if source.dim() == 1:
            return self.alignment(source.unsqueeze(0), target.unsqueeze(0)).squeeze(0)
        decoding = self.begin(source)
        first = decoding.state.unsqueeze(1)
        states, _ = decoding.advanced(target)
        before = torch.cat([first, states[:, :-1]], 1)
        return self.context.basis(decoding.context, z=before).dense().squeeze(1).mT


class RNNsearchDecoding:
    """The `Decoding` of a batch by `RNNsearch`.

    Args:
        context: the prepared states of the sources, or without attention the products of their summary (B, .).
        state: s of each sample, (B, hidden).
    """

    def __init__(self, model: RNNsearch, context: Any, state: Tensor) -> None:
        self.model, self.context, self.state = model, context, state

    def advance(self, word: Tensor) -> Tensor:
        """Go on to s_i, by what a word brings (B, .); returns what it and the context bring to the maxout."""
        model, context = self.model, self.context
        if model.attention:
            context = model.context(context, z=self.state.unsqueeze(1)).squeeze(1)
        gates, pairs = (word + context).split(model.sizes, -1)
        self.state = gated(gates, model.state(self.state), self.state)
        return pairs

    def advanced(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """All s_i and what comes to the maxout, (B, N, .), over words (B, N)."""
        words = self.model.word(self.model.dropout(self.model.target(target)))
        pairs, states = zip(*((self.advance(word), self.state) for word in words.unbind(1)), strict=True)
        return torch.stack(states, 1), torch.stack(pairs, 1)

    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) of the words that follow tokens (B)."""
        pairs = self.advance(self.model.word(self.model.target(tokens)))
        return self.model.logits(self.state, pairs)

    def reorder(self, samples: Tensor) -> None:
        """Sample b goes on as sample samples[b]."""
        self.state = self.state[samples]
        self.context = self.context.reorder(samples) if self.model.attention else self.context[samples]
