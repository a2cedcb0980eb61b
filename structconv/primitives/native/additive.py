"""`additive_attention`: attention along edges with scores <v, act(q_n + k_m)>, without (E, K, D) tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.errors import ShapeError
from structconv.primitives import triton
from structconv.primitives.blocks import recompute_blocks
from structconv.primitives.functions import sum_dtype
from structconv.primitives.hashing import Drop
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_dropout
from structconv.primitives.native.dispatch import edges_of
from structconv.primitives.native.edges import Ends
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.operator import differentiable_operator
from structconv.primitives.segments import segment_softmax
from structconv.shapes import check_choice

__all__ = ["ACTIVATIONS", "LOGISTIC", "PRODUCT", "additive_attention"]

PIECEWISE, LOGISTIC, PRODUCT = 0, 1, 2  # see Activation in src/api.h
ACTIVATIONS = ("leaky_relu", "tanh", "sigmoid")
#: Numbers of a temporary where torch's operators stand in: 16 MB in float32.
BLOCK = 1 << 22


def additive_attention(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, *,
                       activation: str = "leaky_relu", slope: float = 0.2, dropout: float = 0.0,
                       seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """y_nh = sum over the edges m -> n of p_he x_mh, p = softmax over the edges into n of <v_h, act(q_nh + k_mh)>.

    With tanh Bahdanau et al. (2015, appendix A.1.2) restricted to the edges, with a leaky ReLU GATv2 (Brody et al.
    2022, equation 7); there k is x, and each row is gathered once. Duplicate edges count twice; an output without
    edges, or whose scores are all -inf, is exactly zero.

    Args:
        by_target, by_source: the two layouts of the edges.
        q: (N, K, D), with k (M, K, D) and x (M, K, C), any strides, of one dtype; float32 and bfloat16 (sums in
            float32) run natively on a CPU, anything else by torch's operators with (K, E) tensors.
        vector: v, (K, D), of any floating dtype.
        activation: "leaky_relu" (with slope 0 ReLU, with slope 1 none), "tanh" or "sigmoid".
        slope: of the leaky ReLU below zero.
        dropout, seed, batch_heads: as for `affine_attention`.

    Returns:
        (N, K, C) of the dtype of x.

    Cost: E K (3 D + 2 C) flops, and an exponential for each of E K D activations but the leaky ReLU's. Memory
    O((M + N) K (D + C)): the backward computes the scores again by target and by source and holds nothing of the
    size of the edges. Derivatives of higher order go through (K, E) tensors and one block of (K, E, D).

    Raises:
        ShapeError: if sizes or dtypes do not fit the edges or each other.
        ConfigError: for an unknown activation, a p outside [0, 1), or dropout without a seed.
    """
    _check(by_target, by_source, q, k, x, vector, activation, slope, dropout, seed, batch_heads)
    return _additive_attention(*by_target, *by_source, q, k, x, vector, activation, slope, dropout, seed,
                               q.shape[1] if batch_heads is None else batch_heads)[0]


def _check(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, activation: str,
           slope: float, dropout: float, seed: Tensor | None, batch_heads: int | None) -> None:
    inputs, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    check_operands("additive_attention", inputs, outputs, q, k, x, vector)
    check_choice("additive_attention", "activation", activation, ACTIVATIONS)
    check_dropout("additive_attention", dropout, seed, batch_heads)


def check_operands(owner: str, inputs: int, outputs: int, q: Tensor, k: Tensor, x: Tensor, vector: Tensor) -> None:
    """Raise `ShapeError` unless q (N, K, D), k (M, K, D), x (M, K, C) and vector (K, D) fit each other."""
    if q.dim() != 3 or q.shape[0] != outputs:
        raise ShapeError(owner, f"q must have shape (N={outputs}, K, D)", tuple(q.shape))
    if k.shape != (inputs, *q.shape[1:]):
        raise ShapeError(owner, f"k must have shape {(inputs, *q.shape[1:])}", tuple(k.shape))
    if x.dim() != 3 or x.shape[:2] != k.shape[:2]:
        raise ShapeError(owner, f"x must have shape (M={inputs}, K={q.shape[1]}, C)", tuple(x.shape))
    if vector.shape != q.shape[1:]:
        raise ShapeError(owner, f"vector must have shape {tuple(q.shape[1:])}", tuple(vector.shape))
    if not q.dtype == k.dtype == x.dtype:
        raise ShapeError(owner, "q, k and x must share one dtype", f"{q.dtype}, {k.dtype} and {x.dtype}")


def as_logistic(activation: str, slope: float) -> tuple[int, float, float]:
    """(kind, parameter, amplitude): act(x) is amplitude r(x) and a constant, which no softmax depends on.

    r is the leaky ReLU of slope `parameter`, or 1 / (1 + exp(-parameter x)): tanh(x) = 2 / (1 + exp(-2 x)) - 1.
    """
    if activation == "leaky_relu":
        return PIECEWISE, slope, 1.0
    return (LOGISTIC, 2.0, 2.0) if activation == "tanh" else (LOGISTIC, 1.0, 1.0)


def activate(t: Tensor, activation: str, slope: float) -> Tensor:
    """The activation itself."""
    if activation == "leaky_relu":
        return torch.nn.functional.leaky_relu(t, slope)
    return t.tanh() if activation == "tanh" else t.sigmoid()


def derivative(t: Tensor, activation: str, slope: float) -> tuple[Tensor, Tensor]:
    """The activation at t, and its derivative there."""
    a = activate(t, activation, slope)
    if activation == "leaky_relu":
        return a, torch.full_like(t, slope).masked_fill(t > 0, 1.0)
    return a, 1 - a * a if activation == "tanh" else a * (1 - a)


# -- the operator -------------------------------------------------------------------------------------------------

def _usable(q: Tensor, x: Tensor, edges: int) -> Any:
    return dispatch.usable(x, edges) and dispatch.usable(q, edges)


def _usable_gpu(q: Tensor, x: Tensor, edges: int) -> Any:
    return triton.usable(x, edges) and triton.usable(q, edges)


def _forward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
             q: Tensor, k: Tensor, x: Tensor, vector: Tensor, activation: str, slope: float, p: float,
             seed: Tensor | None, batch_heads: int) -> tuple[Tensor, Tensor]:
    drop, by_target = Drop(p, seed, batch_heads), Csr(indptr, indices, order)
    kernels = _usable(q, x, indices.shape[0])
    if kernels is not None:
        kind, parameter, amplitude = as_logistic(activation, slope)
        results: tuple[Tensor, Tensor] = kernels.additive_forward(
            edges_of(by_target, k.shape[0]), q, k, x, vector * amplitude, kind, parameter, False,
            *dispatch.drop_of(p, seed, batch_heads))
        return results
    if (gpu := _usable_gpu(q, x, indices.shape[0])) is not None:
        kind, parameter, amplitude = as_logistic(activation, slope)
        return gpu.additive_forward(by_target, q, k, x, vector * amplitude, kind == LOGISTIC, parameter, drop)
    dtype = sum_dtype(q.dtype)
    ends = Ends(by_target, Csr(indptr_T, indices_T, order_T))
    scores = edge_scores(ends, q.to(dtype), k.to(dtype), vector, activation, slope)
    p_KE, lse = ends.softmax_parts(scores)
    kept = ends.kept(drop, q.shape[1])
    w_KE = p_KE if kept is None else p_KE * kept.to(dtype)
    return ends.collect(w_KE, x.to(dtype)).to(x.dtype).contiguous(), lse


def _backward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
              q: Tensor, k: Tensor, x: Tensor, vector: Tensor, y: Tensor, lse: Tensor, grad: Tensor, activation: str,
              slope: float, p: float, seed: Tensor | None, batch_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    by_target, by_source = Csr(indptr, indices, order), Csr(indptr_T, indices_T, order_T)
    drop = Drop(p, seed, batch_heads)
    kernels = _usable(q, x, indices.shape[0])
    if kernels is not None:
        kind, parameter, amplitude = as_logistic(activation, slope)
        *found, grad_vector = kernels.additive_backward(
            edges_of(by_target, k.shape[0]), edges_of(by_source, q.shape[0]), q, k, x, vector * amplitude, y, lse, grad,
            kind, parameter, False, *dispatch.drop_of(p, seed, batch_heads))
        return found[0], found[1], found[2], (grad_vector * amplitude).to(vector.dtype)
    if (gpu := _usable_gpu(q, x, indices.shape[0])) is not None:
        kind, parameter, amplitude = as_logistic(activation, slope)
        *found, grad_vector = gpu.additive_backward(by_target, by_source, q, k, x, vector * amplitude, (y, lse), grad,
                                                    kind == LOGISTIC, parameter, drop)
        return found[0], found[1], found[2], (grad_vector * amplitude).to(vector.dtype)
    dtype = sum_dtype(q.dtype)
    ends, g = Ends(by_target, by_source), grad.to(dtype)
    q_wide, k_wide, v_wide = (t.to(dtype) for t in (q, k, vector))
    p_KE = ends.weights(edge_scores(ends, q_wide, k_wide, v_wide, activation, slope), lse)
    kept = ends.kept(drop, q.shape[1])
    w_KE = p_KE if kept is None else p_KE * kept.to(dtype)
    filled = by_target.indptr.diff().unsqueeze(-1) > 0
    d_NK = torch.where(filled, (g * y).sum(-1), 0)
    ds_KE = w_KE * ends.dots(g, x.to(dtype)) - p_KE * d_NK.t()[:, ends.target]
    grad_q, grad_k, grad_vector = _through(ends, q_wide, k_wide, v_wide, ds_KE, activation, slope)
    return (grad_q.to(q.dtype), grad_k.to(k.dtype), ends.spread(w_KE, g).to(x.dtype).contiguous(),
            grad_vector.to(vector.dtype))


def _blocks(ends: Ends, q: Tensor) -> list[slice]:
    edges, width = ends.source.shape[0], max(1, q.shape[1] * q.shape[2])
    if isinstance(edges, torch.SymInt):  # a program for any number of edges has no loop over them
        return [slice(0, edges)]
    step = max(1, BLOCK // width)
    return [slice(start, min(start + step, edges)) for start in range(0, edges, step)] or [slice(0, 0)]


def edge_scores(ends: Ends, q: Tensor, k: Tensor, vector: Tensor, activation: str, slope: float) -> Tensor:
    """(K, E), block by block of edges."""
    def of(block: slice, q: Tensor, k: Tensor, vector: Tensor) -> Tensor:
        raw = q.index_select(0, ends.target[block]) + k.index_select(0, ends.source[block])
        return torch.einsum("ehd,hd->he", activate(raw, activation, slope), vector.to(raw.dtype))

    return recompute_blocks(of, [q, k, vector], _blocks(ends, q), reduce="cat", dim=-1)


def _through(ends: Ends, q: Tensor, k: Tensor, vector: Tensor, ds: Tensor, activation: str,
             slope: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and vector from those of the scores, (K, E)."""
    grad_q, grad_k, grad_vector = (torch.zeros_like(t, memory_format=torch.contiguous_format) for t in (q, k, vector))
    for block in _blocks(ends, q):
        source, target, ds_eh1 = ends.source[block], ends.target[block], ds[:, block].t().unsqueeze(-1)
        value, rate = derivative(q.index_select(0, target) + k.index_select(0, source), activation, slope)
        grad_vector += (ds_eh1 * value).sum(0)
        part = ds_eh1 * vector * rate
        grad_q.index_add_(0, target, part)
        grad_k.index_add_(0, source, part)
    return grad_q, grad_k, grad_vector


def _composed(by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, activation: str,
              slope: float, p: float, seed: Tensor | None, batch_heads: int) -> Tensor:
    """Compute the result by differentiable operators, for second derivatives."""
    ends = Ends(by_target, by_source)
    scores = edge_scores(ends, q, k, vector, activation, slope)
    weights = segment_softmax(scores, ends.target, ends.num_outputs)
    kept = ends.kept(Drop(p, seed, batch_heads), q.shape[1])
    return ends.collect(weights if kept is None else weights * kept.to(weights.dtype), x)


# -- registration -------------------------------------------------------------------------------------------------

def _fake(*args: Any) -> tuple[Tensor, Tensor]:
    q, _, x = args[6:9]
    return x.new_empty((*q.shape[:2], x.shape[2])), q.new_empty(q.shape[:2], dtype=sum_dtype(q.dtype))


OPTIONS = "str activation, float slope, float p, Tensor? seed, SymInt batch_heads"

_additive_attention = differentiable_operator(
    "additive_attention", "Tensor q, Tensor k, Tensor x, Tensor vector", OPTIONS, "y, lse",
    forward=_forward, fake=_fake, backward=_backward, composed=_composed, check=_check)
