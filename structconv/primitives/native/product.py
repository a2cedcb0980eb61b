"""`spmm_add`: a sparse product with its addend, in one pass over the edges; `write_spmm`: one into given memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from structconv.errors import ShapeError, text_of
from structconv.primitives import triton
from structconv.primitives.csr import sddmm, spmm
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_edges, check_numbers
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.operator import EDGES, by_layouts, define, register_gradient

__all__ = ["spmm_add", "write_spmm"]


def spmm_add(by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, z: Tensor | None = None, *,
             alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """y = alpha A^T x + beta z in one pass: the step of a three-term recurrence, at the cost of the product alone.

    Args:
        by_target, by_source: the two layouts of the edges m -> n.
        values: (E,) or (V, E) in the order of the edges, or None for ones.
        x: (M, C) or (V, M, C).
        z: of the shape of the result, or None.
        alpha, beta: numbers; beta 0 ignores z.

    Returns:
        (N, C), or (V, N, C) where x has three dimensions. Differentiable any number of times.

    Cost: 2 V E C flops; no memory beyond the result.

    Raises:
        ShapeError: if sizes do not fit.
    """
    x_VMC = x.unsqueeze(0) if x.dim() == 2 else x
    z_VNC = z.unsqueeze(0) if z is not None and z.dim() == 2 else z
    _check(by_target, by_source, values, x_VMC, z_VNC)
    y = _spmm_add(*by_target, *by_source, values, x_VMC, None if beta == 0 else z_VNC, alpha, beta)
    return y.squeeze(0) if x.dim() == 2 else y


def _check(by_target: Csr, by_source: Csr, values: Tensor | None, x_VMC: Tensor, z_VNC: Tensor | None) -> None:
    inputs, outputs, edges = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1, by_target.indices.shape[0]
    if x_VMC.dim() != 3 or x_VMC.shape[1] != inputs:
        raise ShapeError("spmm_add", f"x must have shape (M={inputs}, C) or (V, M={inputs}, C)", tuple(x_VMC.shape))
    rows = x_VMC.shape[0]
    if values is not None and tuple(values.shape) not in ((edges,), (1, edges), (rows, edges)):
        raise ShapeError("spmm_add", f"values must have shape (E={edges},) or (V={rows}, E)", tuple(values.shape))
    shape = (rows, outputs, x_VMC.shape[2])
    if z_VNC is not None and z_VNC.shape != shape:
        raise ShapeError("spmm_add", f"z must have shape {text_of(shape)}", tuple(z_VNC.shape))


def write_spmm(y: Tensor, by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, *, alpha: float = 1.0,
               beta: float = 0.0) -> None:
    """y = alpha A^T x + beta y in memory that is there already, which saves the page faults of a fresh result.

    For kernels that go through a structure in parts; no gradient is recorded.

    Args:
        y: (N, C) or (V, N, C), contiguous, and apart from x.
        by_target, by_source: the two layouts of the edges m -> n.
        values: (E,) in the order of the edges, or None for ones.
        x: (M, C) or (V, M, C).
        alpha, beta: numbers; with beta 0 what y held has no influence.

    Raises:
        ShapeError: if sizes do not fit.
    """
    x_VMC, outputs = x.unsqueeze(0) if x.dim() == 2 else x, by_target.indptr.shape[0] - 1
    if y.shape != (*x.shape[:-2], outputs, x.shape[-1]) or y.dtype != x.dtype or not y.is_contiguous():
        raise ShapeError("write_spmm", f"y must be contiguous of shape (..., N={outputs}, C={x.shape[-1]}), as x is",
                         f"{text_of(y.shape)} of {y.dtype}")
    kernels = dispatch.usable(x_VMC, by_target.indices.shape[0])
    if kernels is not None and x.numel():
        rows, z = x_VMC.shape[0], y if beta else None
        dispatch.spmm(kernels, by_target, values, x_VMC, z, rows, rows, alpha, beta, out=y.view(rows, *y.shape[-2:]))
        return
    with torch.no_grad():
        y.copy_(spmm_add(by_target, by_source, values, x, y, alpha=alpha, beta=beta))


def _kernel(by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, z: Tensor | None, alpha: float,
            beta: float) -> Tensor:
    edges = by_target.indices.shape[0]
    kernels = dispatch.usable(x, edges)
    if kernels is not None and x.shape[0]:
        z = None if z is None else z.to(x.dtype)
        return dispatch.spmm(kernels, by_target, values, x, z, x.shape[0], x.shape[0], alpha, beta)
    if x.shape[0] and (gpu := triton.usable_product(x, edges, x.shape[0] * len(by_target.indptr))) is not None:
        z = None if z is None else z.to(x.dtype)
        return gpu.spmm(by_target, values, x, z, x.shape[0], x.shape[0], alpha, beta)
    y = alpha * spmm(by_target, by_source, values, x).contiguous()
    return y if z is None else y + beta * z


def _check_raw(*arguments: Any) -> None:
    layouts, (values, x, z, *_) = arguments[:6], arguments[6:]
    check_numbers("spmm_add", x, values, z)
    _check(*check_edges("spmm_add", layouts, x), values, x, z)


def _fake(*args: Any) -> Tensor:
    indptr, x = args[0], args[7]
    return x.new_empty((x.shape[0], indptr.shape[0] - 1, x.shape[2]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.alpha, ctx.beta = inputs[9:]
    ctx.save_for_backward(*inputs[:8])


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    *layouts, values, x = ctx.saved_tensors
    by_target, by_source = Csr(*layouts[:3]), Csr(*layouts[3:])
    grad_values = grad_x = grad_z = None
    if ctx.needs_input_grad[6]:
        grad_values = ctx.alpha * sddmm(by_target, by_source, grad, x)
        if values.numel() != grad_values.numel():
            grad_values = grad_values.sum(0, keepdim=True)
        grad_values = grad_values.view(values.shape)
    if ctx.needs_input_grad[7]:
        grad_x = spmm_add(by_source, by_target, values, grad, alpha=ctx.alpha)
    if ctx.needs_input_grad[8]:
        grad_z = ctx.beta * grad
    return *(None,) * 6, grad_values, grad_x, grad_z, None, None


def _tangent(arguments: Sequence[Any], tangents: Sequence[Any]) -> Tensor:
    *layouts, values, x, _, alpha, beta = arguments
    values_t, x_t, z_t = tangents[6:9]
    tangent = None if z_t is None else beta * z_t
    for a, b, moves in ((values_t, x, values_t is not None), (values, x_t, x_t is not None)):
        if moves:
            tangent = torch.ops.structconv.spmm_add(*layouts, a, b, tangent, alpha, 1.0)
    assert tangent is not None
    return tangent


define("spmm_add", f"{EDGES}, Tensor? values, Tensor x, Tensor? z, float alpha, float beta", by_layouts(_kernel), _fake,
       _check_raw)
_spmm_add = register_gradient("spmm_add", _differentiate, _save, tangent=_tangent)
