"""Pervasive attention (Elbayad et al. 2018): convolution over the grid of all pairs of a source and a target word."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv import ConfigError, Grid, Padding
from structconv.mechanisms import STRUCTURE, Context, Cuboid
from structconv.nn import Conv, Linear
from structconv.shapes import check_choice, check_positive
from structconv_systems.models.blocks import Tokens
from structconv_systems.models.tokens import PAD

__all__ = ["Pervasive", "PervasiveDecoding"]

POOLINGS = ("max", "attention", "both")


class Pervasive(nn.Module):
    """P(y_n | y_<n, x) = softmax(E W pool_m h_nm), h of a network of causal convolutions over the grid of pairs (n, m).

    f_0 of a pair is W_0 [y_(n-1); x_m]: each side is multiplied by its half of W_0 first. A layer of the network adds G
    channels to those before it (Huang et al. 2017): with h = relu norm W_l [f_0 ... f_(l-1)]

        f_l = relu norm Conv(Cuboid((R + 1, k), padding=((R, 0), (R, R))), H, G)(h), R = (k - 1) / 2,

    which reads the row of word n and the R rows before it, and k source words around m: the known part of a k x k
    window. After the last layer the source is pooled: by the maximum of each channel, by attention with one learned
    query, or by the sum of both. There is no encoder, and no state.

    Args:
        source_words, target_words: sizes of the vocabularies.
        embed: channels of words; the output's weights are the embeddings of the target. channels: channels of f_0.
        layers: number of layers. growth: G. hidden: H. kernel: k, odd.
        pooling: "max", "attention" or "both".
        positions: of words, see `Tokens`. The paper has "none"; a network of few layers, which reads L R rows back,
            needs some.
        dropout: probability of dropout on words, on each f_l, and on the pooled channels.

    Calling it: source (B, M) and target (B, N) integers, padded with 0 at the end, the target beginning with 1 ->
    logits (B, N, V) of the next words. O(B N M) pairs, all at once; a step of decoding is one row of the grid.

    Elbayad et al. (2018), section 3 (24 layers, G = 32, H = 128, words of 128). Unlike them: norms are over the
    channels of a pair, so that a sentence has equal logits in every batch; norm and relu follow the layer that makes
    the channels instead of preceding each layer that reads them.

    Raises:
        ConfigError: a size is out of range, or the kernel is even.

    Example:

        >>> from structconv_systems.models.pervasive import Pervasive
        >>> model = Pervasive(20, 20, embed=8, channels=8, layers=1, growth=4, hidden=8, kernel=3).eval()
        >>> source, target = torch.tensor([[5, 6, 2], [7, 2, 0]]), torch.tensor([[1, 8, 9, 5], [1, 9, 0, 0]])
        >>> model(source, target).shape                    # logits of the word that follows each
        torch.Size([2, 4, 20])
    """

    def __init__(self, source_words: int, target_words: int, *, embed: int = 128, channels: int = 64, layers: int = 6,
                 growth: int = 32, hidden: int = 128, kernel: int = 5, pooling: str = "both", positions: str = "none",
                 dropout: float = 0.0) -> None:
        super().__init__()
        check_positive("Pervasive", "layers", layers)
        check_choice("Pervasive", "pooling", pooling, POOLINGS)
        self.source = Tokens(source_words, embed, positions=positions, dropout=dropout)
        self.target = Tokens(target_words, embed, positions=positions, dropout=dropout)
        self.columns, self.rows = Linear(embed, channels, bias=False), Linear(embed, channels)
        last = channels + layers * growth
        self.layers = nn.ModuleList(PairLayer(size, growth, hidden, kernel, dropout)
                                    for size in range(channels, last, growth))
        self.norm, self.hidden = nn.LayerNorm(last), hidden
        self.greatest = Linear(last, embed) if pooling != "attention" else None
        looking = Context(1).masked(keep=STRUCTURE).softmax()
        self.attention = Conv(looking, last, embed) if pooling != "max" else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        keep, columns = self._columns(source)
        return self.logits(self._network(keep, columns, target), keep)

    @torch.no_grad()
    def begin(self, source: Tensor) -> PervasiveDecoding:
        """Return the decoding of sources (B, M); the model must be in evaluation mode."""
        return PervasiveDecoding(self, *self._columns(source))

    @torch.no_grad()
    def alignment(self, source: Tensor, target: Tensor) -> Tensor:
        """Return for each target word the share of channels with their maximum at each source word: (N, M), for a pair
        (M) and (N). The target begins with 1: row i belongs to the word after target[i].

        Raises:
            ConfigError: the model pools by attention alone.
        """
        if self.greatest is None:
            raise ConfigError("alignment", "the model must pool by the greatest value", "pooling='attention'")
        x = self.norm(self._network(*self._columns(source.unsqueeze(0)), target.unsqueeze(0))).squeeze(0)
        return F.one_hot(x.argmax(1), len(source)).to(x.dtype).mean(1)

    def _columns(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Return which pairs are words, (B, 1, M, 1), and the source's part of each pair, (B, 1, M, C)."""
        words = self.source(source, self.source.table(source.shape[1]))
        return (source != PAD)[:, None, :, None], self.columns(words).unsqueeze(1)

    def pairs(self, columns: Tensor, target: Tensor, positions: Tensor | None) -> Tensor:
        """f_0 (B, N, M, C) of these words of the target."""
        return columns + self.rows(self.target(target, positions)).unsqueeze(2)

    def _network(self, keep: Tensor, columns: Tensor, target: Tensor) -> Tensor:
        """All f, (B, N, M, C'), of words of the target (B, N)."""
        x = self.pairs(columns, target, self.target.table(target.shape[1]))
        for layer in self.layers:
            x = layer(x, keep)
        return x

    def logits(self, x: Tensor, keep: Tensor) -> Tensor:
        """All f, (B, N, M, C') -> (B, N, V)."""
        x, pooled = self.norm(x), []
        if self.greatest is not None:
            greatest = x.masked_fill(~keep, -torch.inf).amax(2)
            pooled.append(self.greatest(greatest.masked_fill(~keep.any(2), 0.0)))  # of a source without words
        if self.attention is not None:
            pooled.append(self.attention(x, structure=Padding(keep.squeeze(-1))).squeeze(2))
        return self.target.logits(self.dropout(torch.stack(pooled).sum(0)))


class PairLayer(nn.Module):
    """[x, f(x)] of pairs (B, N, M, C): a product with channels, and the convolution; see `Pervasive`."""

    def __init__(self, channels: int, growth: int, hidden: int, kernel: int, dropout: float) -> None:
        super().__init__()
        if check_positive("Pervasive", "kernel", kernel) % 2 == 0:
            raise ConfigError("Pervasive", "kernel must be odd, to have a middle", kernel)
        self.before = kernel // 2
        self.narrow = nn.Sequential(Linear(channels, hidden), nn.LayerNorm(hidden), nn.ReLU(inplace=True))
        sides = (self.before, self.before)
        self.conv = Conv(Cuboid((self.before + 1, kernel), padding=((self.before, 0), sides)), hidden, growth)
        self.bottleneck = nn.Sequential(nn.LayerNorm(growth), nn.ReLU(inplace=True), nn.Dropout(dropout))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self._with(x, self._inner(x, keep))

    def step(self, x: Tensor, keep: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the newest row (B, 1, M, C) after rows (B, R, M, .), and return the rows to store."""
        rows = torch.cat([rows, self._inner(x, keep)], 1)
        return self._with(x, rows), rows[:, max(rows.shape[1] - self.before, 0):]

    def _inner(self, x: Tensor, keep: Tensor) -> Tensor:
        """Return the convolved channels, zero in padding."""
        return self.narrow(x).masked_fill(~keep, 0.0)

    def _with(self, x: Tensor, inner: Tensor) -> Tensor:
        """Concatenate x with the convolution of the last rows."""
        shape = inner.shape[1:3]
        y = self.conv(inner.flatten(1, 2), structure=Grid(shape)).unflatten(1, shape)
        return torch.cat([x, self.bottleneck(y[:, shape[0] - x.shape[1]:])], -1)


class PervasiveDecoding:
    """The `Decoding` of a batch by `Pervasive`, with the rows of each layer that the next row reads.

    Args:
        keep: booleans (B, 1, M, 1), True for words. columns: the source's part of each pair, (B, 1, M, C).
    """

    def __init__(self, model: Pervasive, keep: Tensor, columns: Tensor) -> None:
        self.model, self.keep, self.columns, self.place = model, keep, columns, 0
        self.rows = [columns.new_zeros(len(columns), 0, columns.shape[2], model.hidden) for _ in model.layers]

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Logits (B, V) of the words that follow tokens (B)."""
        model, place = self.model, self.place
        table = model.target.table(place + 1)
        x = model.pairs(self.columns, tokens.unsqueeze(1), None if table is None else table[place:place + 1])
        for i, layer in enumerate(model.layers):
            x, self.rows[i] = cast(PairLayer, layer).step(x, self.keep, self.rows[i])
        self.place += 1
        return model.logits(x, self.keep).squeeze(1)

    def reorder(self, samples: Tensor) -> None:
        """Sample b goes on as sample samples[b]."""
        self.keep, self.columns = self.keep[samples], self.columns[samples]
        self.rows = [rows[samples] for rows in self.rows]
