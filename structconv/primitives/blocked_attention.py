"""`blocked_attention`: dense attention with relative terms, maps and any normalization, in the memory of one block."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.errors import ShapeError, text_of
from structconv.primitives.dense_blocks import MAPS, WEIGHTS, Blocks, Maps, Options, Span, clear, flipped
from structconv.primitives.functions import sum_dtype
from structconv.primitives.hashing import hash_uniform
from structconv.primitives.native.checks import check_dropout
from structconv.primitives.native.operator import differentiable_operator
from structconv.primitives.segments import masked_softmax
from structconv.shapes import check_choice

__all__ = ["attend_in_blocks", "blocked_attention"]

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
    with a causal mask. Memory: O(G (M + N) (D + C)) and blocks of `dense_blocks.BUFFER` numbers. Derivatives of higher
    order go through (G, N, M) tensors.

    Raises:
        ShapeError: if sizes do not fit.
        ConfigError: for unknown weights or maps, a p outside [0, 1), or dropout without a seed.
    """
    return attend_in_blocks(q, k, v, terms, options, buckets)


def attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, terms: Maps, options: Options, buckets: int
                     ) -> tuple[Tensor, Tensor]:
    """`blocked_attention` of arguments that fit."""
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
        y, shares, total = _weighed(problem, problem.blocks())
    return y.to(problem.v.dtype), shares.to(problem.v.dtype), total


def _weighed(problem: _Problem, blocks: Blocks) -> tuple[Tensor, Tensor, Tensor]:
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
    y, shares, total, grad, grad_shares = arguments[5:10]
    *options, wants_diagonal, wants_rows = arguments[10:]
    problem = _Problem.of((*arguments[:5], *options))
    grad_shares = grad_shares if problem.buckets else None
    with private.without_autocast(problem.q.device.type):
        blocks = problem.blocks()
        dtype = blocks.q.dtype
        g, gs = grad.to(dtype), None if grad_shares is None else grad_shares.to(dtype)
        mean = _mean(problem, y, shares, g, gs)
        if total.numel():
            divisor = _divisor(total)
            g, gs = g / divisor, None if gs is None else gs / divisor
            mean = None if mean is None else torch.where(total.unsqueeze(-1) == 0, 0, mean) / divisor
        grads = _differentiated(problem, blocks, g, gs, mean, wants_diagonal, wants_rows)
    like = (problem.q, problem.k, problem.v, problem.terms.diagonal, problem.terms.rows)
    return tuple(None if g is None or t is None else g.to(t.dtype) for g, t in zip(grads, like, strict=True))


def _mean(problem: _Problem, y: Tensor, shares: Tensor, g: Tensor, gs: Tensor | None) -> Tensor | None:
    """(G, N, 1): the weighted mean of the weights' gradients, which a normalization takes off them."""
    if problem.options.weights not in ("softmax", "sum"):
        return None
    mean = (g * y).sum(-1, keepdim=True)
    return mean if gs is None else mean + (gs * shares).sum(-1, keepdim=True)


def _differentiated(problem: _Problem, blocks: Blocks, g: Tensor, gs: Tensor | None, mean: Tensor | None,
                    wants_diagonal: bool, wants_rows: bool) -> _Gradients:
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
        if mean is not None:
            d.sub_(flipped(mean, span))
        ds, rows = _scores(blocks, span, d, t, slope, wants_diagonal or wants_rows)
        grads.k[heads, inputs].baddbmm_(ds.mT, blocks.query(span))
        grads.q[heads, span.rows] = torch.bmm(ds, k[heads, inputs]).flip(1)
        if rows is not None and grads.diagonal is not None:
            at, width = blocks.outputs - span.stop, rows.shape[1] + span.inputs - 1
            grads.diagonal[heads, at:at + width] += rows[..., :width].sum(1)
        if rows is not None and grads.rows is not None:
            grads.rows[heads, span.rows] = blocks.collect(rows, span, grads.rows.shape[-1])
    grads.q.mul_(problem.options.scale)
    return grads


def _scores(blocks: Blocks, span: Span, d: Tensor, t: Tensor, slope: Tensor | None,
            skewed: bool) -> tuple[Tensor, Tensor | None]:
    """The gradient of a block's scores from that of its weights d, with its skewed rows where these are wanted."""
    softmax = blocks.options.weights == "softmax"
    factors = [f for f in (t if softmax else None, slope) if f is not None]
    ds, rows = blocks.skewed("offsets", span) if skewed else (d, None)
    for factor in factors[:-1]:
        d.mul_(factor)
    if factors:
        torch.mul(d, factors[-1], out=ds)
    elif skewed or blocks.options.gain != 1.0:
        torch.mul(d, blocks.options.gain, out=ds)
    return ds if softmax else clear(ds, blocks.absent(span)), rows


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
    composed=_composed, check=_check, edges=False, grads=2, needs="diagonal, rows")
