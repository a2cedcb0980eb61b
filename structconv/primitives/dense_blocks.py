"""Blocks of the rectangle of scores: computed in reused buffers, normalized, and differentiated.

A block holds r outputs of g heads and the inputs 0 .. m. Its rows are outputs in descending order, n = stop - 1 - i for
row i, so that terms of m - n are constant along i + j. A vector of offsets read with strides (1, 1) is then the block's
bias, without a gather. A block written with row stride W + 1 into rows of W has its offsets in columns, where one sum
gives the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native import dispatch

__all__ = ["MAPS", "WEIGHTS", "Blocks", "Maps", "Options", "Span"]

#: Numbers in one buffer of scores: 4 MB in float32, which the larger caches hold.
BUFFER = 1 << 20
#: Outputs of one block, at most.
ROWS = 256
#: Pairs of a block that do not exist: booleans, from which column on.
Absent = list[tuple[int, Tensor]]
WEIGHTS = ("softmax", "sum", "count", "none")
MAPS = ("identity", "relu", "tanh", "sigmoid", "exp")


class Options(NamedTuple):
    """The map from scores to weights: w = normalized(gain map(scale <q, k> + bias)), dropped with probability p."""

    weights: str
    map: str
    gain: float
    causal: bool
    scale: float
    p: float
    batch_heads: int


class Maps(NamedTuple):
    """Terms that depend on the offset m - n. All are flat in the heads.

    Args:
        diagonal: (G, N + M - 1), the term of the offset d at d + N - 1.
        rows: (G, N, L), the term of output n at each bucket.
        bucket: (N + M - 1,), the bucket of each offset.
        keep: booleans that broadcast to (B, K, M, N).
        seed: the seed of dropout.
    """

    diagonal: Tensor | None
    rows: Tensor | None
    bucket: Tensor | None
    keep: Tensor | None
    seed: Tensor | None


class Span(NamedTuple):
    """Heads first .. last, outputs start .. stop, and how many inputs they see."""

    first: int
    last: int
    start: int
    stop: int
    inputs: int

    @property
    def heads(self) -> slice:
        return slice(self.first, self.last)

    @property
    def rows(self) -> slice:
        return slice(self.start, self.stop)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.last - self.first, self.stop - self.start, self.inputs


class Blocks:
    """The blocks of q (G, N, D) against k (G, M, D), with G = B K heads, in a dtype wide enough to sum in."""

    def __init__(self, q: Tensor, k: Tensor, terms: Maps, options: Options) -> None:
        self.q, self.k, self.terms, self.options = q, k, terms, options
        self.outputs, self.num_inputs = q.shape[-2], k.shape[-2]
        most = ROWS if not options.causal else max(16, min(ROWS, self.outputs // 8))
        self.step = max(1, min(self.outputs, most, BUFFER // max(1, self.num_inputs)))
        self.group = self._group(q.shape[0])
        self.width = self.num_inputs + self.step - 1
        self._buffers: dict[str, Tensor] = {}
        self._band = _band(terms.bucket)

    def _group(self, heads: int) -> int:
        """Heads of one block: a divisor of K, or a multiple, so that a block is a rectangle of entries and heads."""
        most = max(1, BUFFER // max(1, self.step * self.num_inputs))
        size = self.options.batch_heads
        if most >= size:
            return max(size, min(heads, most // size * size))
        return next(count for count in range(most, 0, -1) if size % count == 0)

    def spans(self) -> Iterator[Span]:
        """All blocks, those of equal heads one after the other and in the order of their outputs."""
        for first in range(0, self.q.shape[0], self.group):
            last = min(first + self.group, self.q.shape[0])
            for start in range(0, self.outputs, self.step):
                stop = min(start + self.step, self.outputs)
                inputs = min(stop, self.num_inputs) if self.options.causal else self.num_inputs
                yield Span(first, last, start, stop, inputs)

    def buffer(self, name: str, span: Span) -> Tensor:
        """(g, r, m) numbers of whatever was there."""
        if name not in self._buffers:
            self._buffers[name] = self.q.new_empty(self.group * self.step * self.num_inputs)
        g, r, m = span.shape
        return self._buffers[name][:g * r * m].view(g, r, m)

    def skewed(self, name: str, span: Span) -> tuple[Tensor, Tensor]:
        """A block (g, r, m) whose entry (i, j) is in column i + j of the rows (g, r, W), and these rows.

        What no block of these heads has written is zero.
        """
        if name not in self._buffers:
            self._buffers[name] = self.q.new_empty((self.group, self.step, self.width))
        rows = self._buffers[name][:span.last - span.first]
        if span.start == 0:
            rows.zero_()
        return (rows.as_strided(span.shape, (self.step * self.width, self.width + 1, 1)),
                rows[:, :span.stop - span.start])

    def query(self, span: Span) -> Tensor:
        """The block's queries, scaled."""
        return flipped(self.q, span) * self.options.scale

    def weights(self, span: Span, slope: bool = False) -> tuple[Tensor, Tensor | None]:
        """The block's weights before they are divided by a sum or a count, and with `slope` the map's derivative."""
        t = self._mapped(span)
        derivative = self._slope(t, span) if slope else None
        absent = self.absent(span)
        filler = -torch.inf if self.options.weights == "softmax" else 0.0
        _fill(t, absent, filler)
        if self.options.weights == "softmax":
            self._softmax(t, span, absent)
        return t, derivative

    def _mapped(self, span: Span) -> Tensor:
        scores = self.buffer("scores", span)
        query, key = self.query(span), self.k[span.heads, :span.inputs].mT
        bias = self._bias(span)
        if bias is None:
            torch.bmm(query, key, out=scores)
        else:
            torch.baddbmm(bias, query, key, out=scores)
        if self.options.map != "identity":
            _IN_PLACE[self.options.map](scores)
        return scores if self.options.gain == 1.0 else scores.mul_(self.options.gain)

    def _slope(self, t: Tensor, span: Span) -> Tensor | None:
        """gain map'(score) from t = gain map(score)."""
        kind, gain = self.options.map, self.options.gain
        if kind == "identity":
            return None
        slope = self.buffer("slope", span)
        if kind == "relu":
            torch.gt(t, 0, out=slope) if gain > 0 else torch.lt(t, 0, out=slope)
            return slope.mul_(gain)
        if kind == "exp":
            return slope.copy_(t)
        torch.mul(t, t, out=slope)
        return slope.mul_(-1.0 / gain).add_(gain if kind == "tanh" else t)

    def _softmax(self, t: Tensor, span: Span, absent: Absent) -> None:
        """In place over the inputs. A row that has only -inf, which becomes NaN, is found and set to zero.

        On a CPU it is looked for afterwards, and seldom there; elsewhere nobody waits for an answer.
        """
        if not t.is_cpu:
            empty = (t == -torch.inf).all(-1, keepdim=True)
            torch.softmax(t, -1, out=t).masked_fill_(empty, 0)
            return
        torch.softmax(t, -1, out=t)
        if span.inputs and bool(t[..., 0].isnan().any()):
            _fill(self._mapped(span), absent, -torch.inf)
            empty = (t == -torch.inf).all(-1, keepdim=True)
            torch.softmax(t, -1, out=t).masked_fill_(empty, 0)

    def _bias(self, span: Span) -> Tensor | None:
        terms, at = self.terms, self.outputs - span.stop
        if terms.rows is not None:
            return self.spread(terms.rows, span, terms.diagonal)
        if terms.diagonal is None:
            return None
        diagonal, length = terms.diagonal, terms.diagonal.stride(0)
        return diagonal.as_strided(span.shape, (length, 1, 1), diagonal.storage_offset() + span.first * length + at)

    def spread(self, table: Tensor, span: Span, diagonal: Tensor | None = None) -> Tensor:
        """table[n, bucket(m, n)] (+ diagonal[m - n]) of a block, from (G, N, L)."""
        block, rows = self.skewed("spread", span)
        values, (below, above), bucket = flipped(table, span), self._columns(span), self._bucket(span)
        rows[..., :below] = values[..., bucket[:1]]
        rows[..., above:] = values[..., bucket[-1:]]
        if below < above:
            rows[..., below:above] = values.index_select(-1, bucket[below:above])
        if diagonal is not None:
            at = self.outputs - span.stop
            width = rows.shape[1] + span.inputs - 1
            rows[..., :width] += diagonal[span.heads, None, at:at + width]
        return block

    def collect(self, rows: Tensor, span: Span, buckets: int) -> Tensor:
        """Sums over each bucket of rows (g, r, W) of `skewed`: the adjoint of `spread`, (g, r, L) in rising order."""
        (below, above), bucket = self._columns(span), self._bucket(span)
        sums = rows.new_zeros((*rows.shape[:2], buckets))
        if below < above:
            sums.index_add_(-1, bucket[below:above], rows[..., below:above])
        sums[..., bucket[:1]] += rows[..., :below].sum(-1, keepdim=True)
        sums[..., bucket[-1:]] += rows[..., above:].sum(-1, keepdim=True)
        return sums.flip(1)

    def _bucket(self, span: Span) -> Tensor:
        """Return the bucket of each column of the block's skewed rows; columns without entries repeat the last one."""
        assert self.terms.bucket is not None
        result = self.terms.bucket[self.outputs - span.stop:][:self.width]
        missing = self.width - result.shape[0]
        return result if missing == 0 else torch.cat([result, result[-1:].expand(missing)])

    def _columns(self, span: Span) -> tuple[int, int]:
        """Columns of the block before which, and from which on, the bucket is that of the first and of the last."""
        at = self.outputs - span.stop
        below, above = (min(max(end - at, 0), self.width) for end in self._band)
        return below, max(above, below)

    def absent(self, span: Span) -> Absent:
        """Return the pairs of the block that do not exist, one item for each mask."""
        absent: Absent = []
        device = self.q.device
        if self.options.causal and span.start + 1 < span.inputs:
            m = torch.arange(span.start, span.inputs, device=device)
            n = torch.arange(span.stop - 1, span.start - 1, -1, device=device).unsqueeze(-1)
            absent.append((span.start, m > n))
        keep = self.terms.keep
        if keep is not None:
            absent.append((0, self._dropped(keep, span)))
        return absent

    def _dropped(self, keep: Tensor, span: Span) -> Tensor:
        batch, heads = self._entries(span)
        if keep.shape[0] > 1:
            keep = keep[batch]
        if keep.shape[1] > 1:
            keep = keep[:, heads]
        block = ~keep[..., :span.inputs, span.rows].mT.flip(-2)
        return block.expand(batch.stop - batch.start, heads.stop - heads.start, *block.shape[-2:]).flatten(0, 1)

    def _entries(self, span: Span) -> tuple[slice, slice]:
        """Return the block's heads as slices of the batch and of its heads."""
        size = self.options.batch_heads
        entry = span.first // size
        if self.group < size:
            return slice(entry, entry + 1), slice(span.first - entry * size, span.last - entry * size)
        return slice(entry, span.last // size), slice(0, size)

    def count(self, span: Span) -> Tensor:
        """Return the number of existing pairs of each output, at least 1: (g, r)."""
        absent = self.absent(span)
        if not absent:
            return self.q.new_full(span.shape[:2], max(span.inputs, 1))
        return clear(self.buffer("slope", span).fill_(1), absent).sum(-1).clamp_(min=1)

    def dropped(self, span: Span, t: Tensor, gradient: Tensor | None = None) -> Tensor:
        """The block t times 0 or 1 / (1 - p): in place, or beside t where a gradient is so multiplied in place.

        Which pairs fall is a function of the seed and of (b, k, m, n). Without dropout it is t.
        """
        seed = self.terms.seed
        if self.options.p == 0 or seed is None:
            return t
        out = t if gradient is None else self.buffer("dropped", span)
        kernels = dispatch.kernels() if t.is_cpu and t.dtype == torch.float32 else None
        if kernels is not None:
            drop = dispatch.drop_of(self.options.p, seed, self.options.batch_heads)
            kernels.drop_block(t, out, gradient, span.first, span.stop - 1, self.outputs, *drop)
            return out
        factors = self._dropout_factors(span, seed)
        if gradient is not None:
            gradient.mul_(factors)
        return torch.mul(t, factors, out=out)

    def _dropout_factors(self, span: Span, seed: Tensor) -> Tensor:
        device, (batch, heads) = self.q.device, self._entries(span)
        entry = torch.arange(batch.start, batch.stop, device=device).view(-1, 1, 1, 1)
        head = torch.arange(heads.start, heads.stop, device=device).view(-1, 1, 1)
        n = torch.arange(span.stop - 1, span.start - 1, -1, device=device).unsqueeze(-1)
        pair = torch.arange(span.inputs, device=device) * self.outputs + n
        factors = hash_uniform(seed, entry, head, pair).flatten(0, 1).ge_(self.options.p)
        return factors.to(self.q.dtype).div_(1 - self.options.p)


def flipped(t: Tensor, span: Span) -> Tensor:
    """The block's outputs of (G, N, C) in falling order."""
    return t[span.heads, span.rows].flip(1)


def clear(t: Tensor, absent: Absent) -> Tensor:
    """Zero where a pair does not exist, in place."""
    return _fill(t, absent, 0.0)


def _fill(t: Tensor, absent: Absent, value: float) -> Tensor:
    for at, mask in absent:
        t[..., at:].masked_fill_(mask, value)
    return t


def _band(bucket: Tensor | None) -> tuple[int, int]:
    """Return where the bucket first differs from the first offset's, and from where it equals the last offset's."""
    if bucket is None or bucket.shape[0] == 0:
        return 0, 0
    if bucket.is_meta:
        return 0, bucket.shape[0]
    changes = (bucket.diff() != 0).nonzero().flatten()
    if changes.shape[0] == 0:
        return bucket.shape[0], bucket.shape[0]
    return int(changes[0]) + 1, int(changes[-1]) + 1


_IN_PLACE = {"relu": torch.relu_, "tanh": torch.tanh_, "sigmoid": torch.sigmoid_, "exp": torch.exp_}
