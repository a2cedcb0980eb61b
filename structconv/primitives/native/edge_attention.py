"""Attention along edges that a kernel sorts, as one node: `attend_dots` and `attend_bilinear` of scaled products with
and without their projections, `attend_additive`.

`adjacency.attend` is that of affine scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.primitives.functions import pulled_back
from structconv.primitives.native import dispatch
from structconv.primitives.native.additive import as_logistic
from structconv.primitives.native.adjacency import Adjacency
from structconv.primitives.native.loader import Core

__all__ = ["attend_additive", "attend_bilinear", "attend_dots"]


def attend_dots(x: Tensor, query: Tensor, query_bias: Tensor | None, key: Tensor, key_bias: Tensor | None,
                value: Tensor, bias: Tensor | None, adjacency: Adjacency, scale: float, drop: dispatch.Drop,
                composed: Callable[..., Tensor]) -> Tensor:
    """Scaled dot-product attention among the entries of x (M, P), projections included -> (M, K C).

    y_n = ||_k sum_m p_kmn x_m value_k + bias, p = softmax over the edges into n of scale <q_kn, k_km>, with
    q = x query^T + query_bias and k = x key^T + key_bias.

    Args:
        x: see `adjacency.is_direct`, as of the others.
        query, key: (K D, P), each with a bias (K D) or none.
        value: (K, P, C).
        bias: (K C) or none.
        drop: see `dispatch.drop_of`.
        composed: the first seven arguments -> the same by differentiable operators.
    """
    core = dispatch.kernels()
    assert core is not None  # which sorted the edges
    tensors = x, query, query_bias, key, key_bias, value, bias
    if torch.is_grad_enabled() and private.any_requires_grad(*tensors):
        found: Tensor = _attend_dots(*tensors, adjacency, scale, drop, core, composed)
        return found
    y: Tensor = core.attend_dots_forward(adjacency.by_target.tensor, *tensors, scale, *drop, False)[0]
    return y


class _AttendDots(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        *tensors, adjacency, scale, drop, core, composed = arguments
        y: Tensor
        y, table, lse = core.attend_dots_forward(adjacency.by_target.tensor, *tensors, scale, *drop, True)
        ctx.save_for_backward(*tensors, y, table, lse)
        ctx.adjacency, ctx.scale, ctx.drop, ctx.core, ctx.composed = adjacency, scale, drop, core, composed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, y, table, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            return *pulled_back(ctx.composed, tensors, needed[:7], [grad]), None, None, None, None, None
        x, query, key, value, biases = ctx.core.attend_dots_backward(
            ctx.adjacency.by_target.tensor, ctx.adjacency.by_source().tensor, *tensors, y, table, lse, grad, ctx.scale,
            *ctx.drop)
        of_query, of_key = (None, None) if biases is None else biases.chunk(2)
        bias = grad.sum(0) if needed[6] else None
        found = x, query, of_query, key, of_key, value, bias
        return *(t if need else None for t, need in zip(found, needed, strict=False)), None, None, None, None, None


_attend_dots = private.bound_apply(_AttendDots)


def attend_bilinear(q: Tensor, k: Tensor, v: Tensor, adjacency: Adjacency, scale: float, drop: dispatch.Drop,
                    composed: Callable[..., Tensor]) -> Tensor:
    """`bilinear_attention` along edges that a kernel sorts: (N, K, D), (M, K, D) and (M, K, C) -> (N, K, C).

    Args:
        q, k, v: see `adjacency.is_direct`.
        drop: see `dispatch.drop_of`.
        composed: (q, k, v) -> the same by differentiable operators.
    """
    core = dispatch.kernels()
    assert core is not None  # which sorted the edges
    if torch.is_grad_enabled() and private.any_requires_grad(q, k, v):
        found: Tensor = _attend_bilinear(q, k, v, adjacency, scale, drop, core, composed)
        return found
    y: Tensor = core.bilinear_forward(adjacency.by_target.tensor, q, k, v, None, scale, *drop)[0]
    return y


class _AttendBilinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, adjacency: Adjacency, scale: float, drop: dispatch.Drop,
                core: Core, composed: Callable[..., Tensor]) -> Tensor:
        y: Tensor
        y, lse = core.bilinear_forward(adjacency.by_target.tensor, q, k, v, None, scale, *drop)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.adjacency, ctx.scale, ctx.drop, ctx.core, ctx.composed = adjacency, scale, drop, core, composed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            return *pulled_back(ctx.composed, (q, k, v), needed[:3], [grad]), None, None, None, None, None
        grads = [dispatch.empty(t, t.shape) for t in (q, k, v)]
        ctx.core.bilinear_backward(ctx.adjacency.by_target.tensor, ctx.adjacency.by_source().tensor, q, k, v, None, y,
                                   lse, grad, ctx.scale, *ctx.drop, *grads)
        return *(t if need else None for t, need in zip(grads, needed, strict=False)), None, None, None, None, None


_attend_bilinear = private.bound_apply(_AttendBilinear)


def attend_additive(q: Tensor, k: Tensor, x: Tensor, vector: Tensor, adjacency: Adjacency, activation: str,
                    slope: float, drop: dispatch.Drop, composed: Callable[..., Tensor]) -> Tensor:
    """`additive_attention` along edges that a kernel sorts: (N, K, D), (M, K, D), (M, K, C) and (K, D) -> (N, K, C).

    Args:
        q, k, x, vector: see `adjacency.is_direct`.
        activation, slope: as of `additive_attention`.
        drop: see `dispatch.drop_of`.
        composed: (q, k, x, vector) -> the same by differentiable operators.
    """
    core = dispatch.kernels()
    assert core is not None  # which sorted the edges
    options = as_logistic(activation, slope)
    if torch.is_grad_enabled() and private.any_requires_grad(q, k, x, vector):
        found: Tensor = _attend_additive(q, k, x, vector, adjacency, options, drop, core, composed)
        return found
    return _additive(core, q, k, x, vector, adjacency, options, drop)[0]


def _additive(core: Core, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, adjacency: Adjacency,
              options: tuple[int, float, float], drop: dispatch.Drop) -> tuple[Tensor, Tensor]:
    kind, parameter, amplitude = options
    scaled = vector if amplitude == 1.0 else vector * amplitude
    found: tuple[Tensor, Tensor] = core.additive_forward(adjacency.by_target.tensor, q, k, x, scaled, kind, parameter,
                                                         False, *drop)
    return found


class _AttendAdditive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, x: Tensor, vector: Tensor, adjacency: Adjacency,
                options: tuple[int, float, float], drop: dispatch.Drop, core: Core, composed: Callable[..., Tensor]
                ) -> Tensor:
        y, lse = _additive(core, q, k, x, vector, adjacency, options, drop)
        ctx.save_for_backward(q, k, x, vector, y, lse)
        ctx.adjacency, ctx.options, ctx.drop, ctx.core, ctx.composed = adjacency, options, drop, core, composed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, x, vector, y, lse = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            found = pulled_back(ctx.composed, (q, k, x, vector), needed[:4], [grad])
            return *found, None, None, None, None, None
        kind, parameter, amplitude = ctx.options
        scaled = vector if amplitude == 1.0 else vector * amplitude
        *grads, of_vector = ctx.core.additive_backward(
            ctx.adjacency.by_target.tensor, ctx.adjacency.by_source().tensor, q, k, x, scaled, y, lse, grad, kind,
            parameter, False, *ctx.drop)
        of_vector = of_vector if amplitude == 1.0 else of_vector * amplitude
        return (*(t if need else None for t, need in zip((*grads, of_vector), needed, strict=False)), None, None, None,
                None, None)


_attend_additive = private.bound_apply(_AttendAdditive)
