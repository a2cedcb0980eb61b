"""`blocked_attention`: dense attention with relative terms, maps and any normalization, in the memory of one block.

A block of scores is computed in reused buffers, normalized, and differentiated. It holds r outputs of g heads and the
inputs 0 .. m. Its rows are outputs in descending order, n = stop - 1 - i for row i, so that terms of m - n are constant
along i + j. A vector of offsets read with strides (1, 1) is then the block's bias, without a gather. A block written
with row stride W + 1 into rows of W has its offsets in columns, where one sum gives the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.errors import ShapeError, text_of
from structconv.primitives.functions import sum_dtype
from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_dropout
from structconv.primitives.operator import differentiable_operator
from structconv.primitives.segments import masked_softmax
from structconv.shapes import check_choice

__all__ = ["MAPS", "WEIGHTS", "Blocks", "Maps", "Options", "Span", "blocked_attention"]

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
        """Yield each block: for each group of heads in turn, the blocks in the order of their outputs."""
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
_MAPPED = {"relu": torch.relu, "tanh": torch.tanh, "sigmoid": torch.sigmoid, "exp": torch.exp}


def blocked_attention(q: Tensor, k: Tensor, v: Tensor, terms: Maps, options: Options, *,
                      buckets: int = 0) -> tuple[Tensor, Tensor]:
    """y_n = sum_m w_nm v_m with w = normalized(gain map(scale <q_n, k_m> + b_nm)), and the weight in each bucket.

    b_nm = diagonal[m - n] + rows[n, bucket[m - n]]: learned biases of relative positions (Raffel et al. 2020; ALiBi,
    Press et al. 2022) and keys of relative positions (Shaw et al. 2018, eq. 4). The second result
    s_nl = sum of w_nm over m with bucket[m - n] = l is what Shaw's values are multiplied by (eq. 3).

    Args:
        q: (G, N, D), with k (G, M, D) and v (G, M, C), of one dtype; G = B K heads of a batch.
        terms: the bias, what exists and the seed, see `Maps`; `diagonal` and `rows` get gradients.
        options: the weights, see `Options`: "softmax" over the existing m, divided by "sum" or "count", or "none".
        buckets: L, of the second result; 0 for none of it.

    Returns:
        (G, N, C) and (G, N, L), of the dtype of v; 16-bit types are summed in float32. Without inputs it is zero.

    Absent pairs weigh zero whatever their score; a row of v that is not finite reaches all outputs, also through pairs
    that do not exist.

    Cost: 2 G M N (D + C) flops forward and 2.5 times that backward, where scores are computed again; about half of it
    with a causal mask. Memory: O(G (M + N) (D + C)) and blocks of `BUFFER` numbers. Derivatives of higher
    order go through (G, N, M) tensors.

    Raises:
        ShapeError: if sizes do not fit.
        ConfigError: for unknown weights or maps, a p outside [0, 1), or dropout without a seed.
    """
    y, shares, _ = _blocked_attention(q, k, v, *terms, *options, buckets)
    return y, shares


def _check(*arguments: Any) -> None:
    owner, (q, k, v, terms, options, buckets) = "blocked_attention", _Problem.of(arguments)
    if q.dim() != 3 or k.dim() != 3 or (q.shape[0], q.shape[2]) != (k.shape[0], k.shape[2]):
        raise ShapeError(owner, "q and k must have shapes (G, N, D) and (G, M, D)",
                         f"{text_of(q.shape)} and {text_of(k.shape)}")
    if v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        raise ShapeError(owner, f"v must have shape (G={k.shape[0]}, M={k.shape[1]}, C)", tuple(v.shape))
    check_choice(owner, "weights", options.weights, WEIGHTS)
    check_choice(owner, "map", options.map, MAPS)
    check_dropout(owner, options.p, terms.seed, options.batch_heads)
    if q.shape[0] % options.batch_heads:
        raise ShapeError(owner, f"G={q.shape[0]} must be a multiple of batch_heads", options.batch_heads)
    _check_terms(q, k, terms, options, buckets)


def _check_terms(q: Tensor, k: Tensor, terms: Maps, options: Options, buckets: int) -> None:
    owner, offsets = "blocked_attention", max(q.shape[1] + k.shape[1] - 1, 0)
    if terms.diagonal is not None and terms.diagonal.shape != (q.shape[0], offsets):
        raise ShapeError(owner, f"diagonal must have shape (G={q.shape[0]}, N+M-1={offsets})",
                         tuple(terms.diagonal.shape))
    if terms.rows is not None and terms.rows.shape[:-1] != q.shape[:-1]:
        raise ShapeError(owner, f"rows must have shape (G={q.shape[0]}, N={q.shape[1]}, L)", tuple(terms.rows.shape))
    if (terms.bucket is None and (buckets or terms.rows is not None)) or buckets < 0:
        raise ShapeError(owner, "bucket must say in which of L buckets each offset is", buckets)
    if terms.bucket is not None and (terms.bucket.shape != (offsets,) or terms.bucket.is_floating_point()):
        raise ShapeError(owner, f"bucket must have shape (N+M-1={offsets},), of integers",
                         f"{text_of(terms.bucket.shape)} of {terms.bucket.dtype}")
    sizes = (q.shape[0] // options.batch_heads, options.batch_heads, k.shape[1], q.shape[1])
    keep = terms.keep
    if keep is not None and (keep.dtype is not torch.bool or keep.dim() != 4 or any(
            have not in (1, want) for have, want in zip(keep.shape, sizes, strict=True))):
        raise ShapeError(owner, f"keep must be booleans that broadcast to (B, K, M, N) = {text_of(sizes)}",
                         f"{text_of(keep.shape)} of {keep.dtype}")


class _Problem(NamedTuple):
    """The operator's arguments, in order."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Maps
    options: Options
    buckets: int

    @classmethod
    def of(cls, arguments: Any) -> _Problem:
        q, k, v = arguments[:3]
        return cls(q, k, v, Maps(*arguments[3:8]), Options(*arguments[8:15]), arguments[15])

    def blocks(self) -> Blocks:
        """In the dtype that is summed in."""
        dtype = sum_dtype(self.v.dtype)
        diagonal, rows = (None if t is None else t.to(dtype).contiguous() for t in self.terms[:2])
        terms = self.terms._replace(diagonal=diagonal, rows=rows)
        return Blocks(self.q.to(dtype).contiguous(), self.k.to(dtype).contiguous(), terms, self.options)


# -- kernels ------------------------------------------------------------------------------------------------------

def _forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    problem = _Problem.of(arguments)
    with private.without_autocast(problem.q.device.type):
        y, shares, total = _weighted_sums(problem, problem.blocks())
    return y.to(problem.v.dtype), shares.to(problem.v.dtype), total


def _weighted_sums(problem: _Problem, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """(y, shares, total), the last what weights were divided by, or zero; empty where they were not."""
    q, v, divided = blocks.q, problem.v.to(blocks.q.dtype), problem.options.weights in ("sum", "count")
    y = q.new_empty((*q.shape[:2], v.shape[2]))
    shares, total = q.new_empty((*q.shape[:2], problem.buckets)), q.new_empty(q.shape[:2] if divided else (0,))
    for span in blocks.spans():
        t, _ = blocks.weights(span)
        if divided:
            counted = problem.options.weights == "count"
            total[span.heads, span.rows] = (blocks.count(span) if counted else t.sum(-1)).flip(1)
        t = blocks.dropped(span, t)
        y[span.heads, span.rows] = torch.bmm(t, v[span.heads, :span.inputs]).flip(1)
        if problem.buckets:
            block, rows = blocks.skewed("offsets", span)
            block.copy_(t)
            shares[span.heads, span.rows] = blocks.collect(rows, span, problem.buckets)
    if divided:
        divisor = _divisor(total)
        y, shares = y.div_(divisor), shares.div_(divisor)
    return y, shares, total


def _divisor(total: Tensor) -> Tensor:
    return torch.where(total == 0, 1, total).unsqueeze(-1)


class _Gradients(NamedTuple):
    """The gradients of the operator's arguments; None if an argument is absent or needs no gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    diagonal: Tensor | None
    rows: Tensor | None


def _backward(*arguments: Any) -> tuple[Tensor | None, ...]:
    total, grad, grad_shares = arguments[5:8]
    *options, wants_diagonal, wants_rows = arguments[8:]
    problem = _Problem.of((*arguments[:5], *options))
    grad_shares = grad_shares if problem.buckets else None
    with private.without_autocast(problem.q.device.type):
        blocks = problem.blocks()
        dtype = blocks.q.dtype
        g, gs = grad.to(dtype), None if grad_shares is None else grad_shares.to(dtype)
        if total.numel():
            divisor = _divisor(total)
            g, gs = g / divisor, None if gs is None else gs / divisor
        grads = _gradients(problem, blocks, g, gs, total, wants_diagonal, wants_rows)
    like = (problem.q, problem.k, problem.v, problem.terms.diagonal, problem.terms.rows)
    return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, like, strict=True))


def _gradients(problem: _Problem, blocks: Blocks, g: Tensor, gs: Tensor | None, total: Tensor, wants_diagonal: bool,
               wants_rows: bool) -> _Gradients:
    v, terms, (q, k) = problem.v.to(g.dtype), blocks.terms, (blocks.q, blocks.k)
    grads = _Gradients(torch.empty_like(q), torch.zeros_like(k), v.new_zeros(v.shape),
                      *(t.new_zeros(t.shape) if t is not None and needed else None
                        for t, needed in ((terms.diagonal, wants_diagonal), (terms.rows, wants_rows))))
    for span in blocks.spans():
        t, slope = blocks.weights(span, slope=True)
        heads, inputs, block_g = span.heads, slice(0, span.inputs), flipped(g, span)
        d = torch.bmm(block_g, v[heads, inputs].mT, out=blocks.buffer("gradient", span))
        if gs is not None:
            d.add_(blocks.spread(gs, span))
        dropped = blocks.dropped(span, t, d)
        grads.v[heads, inputs].baddbmm_(dropped.mT, block_g)
        if problem.options.weights == "softmax":
            d = _softmax_gradient(t, d)
        elif problem.options.weights == "sum":
            divisor = flipped(total, span).unsqueeze(-1)
            d.sub_(torch.where(divisor == 0, 0, (t * d).sum(-1, keepdim=True) / divisor))
        ds, rows = _scores(blocks, span, d, slope, wants_diagonal or wants_rows)
        grads.k[heads, inputs].baddbmm_(ds.mT, blocks.query(span))
        grads.q[heads, span.rows] = torch.bmm(ds, k[heads, inputs]).flip(1)
        if rows is not None and grads.diagonal is not None:
            at, width = blocks.outputs - span.stop, rows.shape[1] + span.inputs - 1
            grads.diagonal[heads, at:at + width] += rows[..., :width].sum(1)
        if rows is not None and grads.rows is not None:
            grads.rows[heads, span.rows] = blocks.collect(rows, span, grads.rows.shape[-1])
    grads.q.mul_(problem.options.scale)
    return grads


def _softmax_gradient(t: Tensor, d: Tensor) -> Tensor:
    """t (d - mean), the mean of d by the weights t, in place of d. The mean is not taken from y, which rounds
    differently: so a weight of 1 gives its score no gradient."""
    if d.is_cpu and private.softmax_backward is not None:
        return cast(Tensor, private.softmax_backward(d, t, -1, d.dtype, grad_input=d))
    return d.sub_((t * d).sum(-1, keepdim=True)).mul_(t)


def _scores(blocks: Blocks, span: Span, d: Tensor, slope: Tensor | None, skewed: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of a block's scores from that of what the map gives, with its skewed rows where these are wanted."""
    ds, rows = blocks.skewed("offsets", span) if skewed else (d, None)
    if slope is not None:
        torch.mul(d, slope, out=ds)
    elif skewed or blocks.options.gain != 1.0:
        torch.mul(d, blocks.options.gain, out=ds)
    return ds if blocks.options.weights == "softmax" else clear(ds, blocks.absent(span)), rows


# -- the same numbers by differentiable operators: what a second derivative is taken of ----------------------------

def _composed(*arguments: Any) -> tuple[Tensor, Tensor]:
    q, k, v, terms, options, buckets = _Problem.of(arguments)
    outputs, inputs = q.shape[1], k.shape[1]
    m, n = torch.arange(inputs, device=q.device), torch.arange(outputs, device=q.device).unsqueeze(-1)
    offset = m - n + outputs - 1
    scores = options.scale * q @ k.mT
    if terms.diagonal is not None:
        scores = scores + terms.diagonal[:, offset]
    bucket = None if terms.bucket is None else terms.bucket[offset].expand(q.shape[0], -1, -1)
    if terms.rows is not None and bucket is not None:
        scores = scores + terms.rows.gather(-1, bucket)
    t = options.gain * (scores if options.map == "identity" else _MAPPED[options.map](scores))
    t = t.unflatten(0, (-1, options.batch_heads))
    keep = torch.ones_like(t, dtype=torch.bool)
    if options.causal:
        keep = keep & (m <= n)
    if terms.keep is not None:
        keep = keep & terms.keep.mT
    w = masked_softmax(t, keep, -1) if options.weights == "softmax" else torch.where(keep, t, 0)
    if options.weights == "sum":
        w = w / _divisor(w.sum(-1))
    elif options.weights == "count":
        w = w / keep.sum(-1, keepdim=True).clamp(min=1)
    if options.p > 0 and terms.seed is not None:
        entry, head = (torch.arange(size, device=q.device) for size in t.shape[:2])
        uniform = hash_uniform(terms.seed, entry.view(-1, 1, 1, 1), head.view(-1, 1, 1), m * outputs + n)
        w = torch.where(uniform >= options.p, w / (1 - options.p), 0)
    w = w.flatten(0, 1)
    shares = w.new_zeros((*w.shape[:2], buckets))
    return w @ v, shares if bucket is None or not buckets else shares.scatter_add(-1, bucket, w)


# -- registration -------------------------------------------------------------------------------------------------

def _fake(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, _, v, _, options, buckets = _Problem.of(arguments)
    total = q.shape[:2] if options.weights in ("sum", "count") else (0,)
    return (v.new_empty((*q.shape[:2], v.shape[2])), v.new_empty((*q.shape[:2], buckets)),
            v.new_empty(total, dtype=sum_dtype(v.dtype)))


_blocked_attention = differentiable_operator(
    "blocked_attention", "q, k, v, any diagonal?, any rows?",
    "Tensor? bucket, Tensor? keep, Tensor? seed, str weights, str map, float gain, bool causal, float scale, float p, "
    "SymInt batch_heads, SymInt buckets", "y, shares, total", forward=_forward, fake=_fake, backward=_backward,
    composed=_composed, check=_check, edges=False, grads=2, reads_results=False, needs="diagonal, rows")
