"""Polynomials of one sparse matrix by recurrence: all degrees of x, their sum, and products with channels.

`polynomial_analysis` and `polynomial_synthesis` are each other's gradient with the ends of the edges exchanged, so that
derivatives of any order work, and a layer trains with one recurrence forward and one backward. Every step is one
`spmm_add`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual

from structconv.errors import ShapeError
from structconv.primitives.csr import spmm_add, write_spmm
from structconv.primitives.functions import apply, pulled_back, transformed
from structconv.primitives.memory import new_empty
from structconv.primitives.native.checks import check_edges, check_numbers
from structconv.primitives.native.indices import Csr
from structconv.primitives.operator import COMPOSED, EDGES, by_layouts, define
from structconv.primitives.products import product

__all__ = ["Recurrence", "polynomial_analysis", "polynomial_product", "polynomial_synthesis"]

#: Channels up to which the samples of a batch lie side by side, V C numbers a row: a sparse product of so few channels
#: takes longer for its indices than for its numbers.
_NARROW = 4
#: The highest degree; each is a product, and a raw call with any integer would run for hours.
HIGHEST = 1 << 16
#: Rows of a product with channels that are multiplied at a time; a block of them stays in the cache.
ROWS = 4096


def polynomial_analysis(by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, *, order: int,
                        first: int = 0, chebyshev: bool = True) -> Tensor:
    """T_j(A)^T x for each first <= j <= order, by T_(j+1)^T x = 2 A^T T_j^T x - T_(j-1)^T x or by powers.

    Args:
        by_target, by_source: the two layouts of the edges m -> n of a square matrix A.
        values: (E,) in the order of the edges, or None for ones. Their derivatives take the memory of all steps.
        x: (..., M, C).
        order, first: the highest and the lowest degree.
        chebyshev: T_j of the first kind (Defferrard et al. 2016, equation 4); else the monomials A^j.

    Returns:
        (..., K, M, C), K = order - first + 1; in memory each entry's K rows are neighbors, as a product with
        channels reads them. Differentiable any number of times.

    Cost: 2 order E C flops; beyond the result two rows of the recurrence, 2 M C.

    Raises:
        ShapeError: if sizes do not fit.
    """
    _check("polynomial_analysis", by_target, by_source, values, x, order, first)
    x_VMC = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:]) if x.dim() != 3 else x
    y_VMKC = _analysis(*by_target, *by_source, values, x_VMC, order, first, chebyshev)
    return y_VMKC.reshape(*x.shape[:-1], order - first + 1, x.shape[-1]).movedim(-2, -3)


def polynomial_synthesis(by_target: Csr, by_source: Csr, values: Tensor | None, r: Tensor, *, first: int = 0,
                         chebyshev: bool = True) -> Tensor:
    """sum_k T_(first + k)(A)^T r_k by Clenshaw's recurrence (Clenshaw 1955), or by Horner's for monomials.

    Args:
        by_target, by_source, values, first, chebyshev: as in `polynomial_analysis`.
        r: (..., K, M, C), strided as it may be.

    Returns:
        (..., M, C). Differentiable any number of times.

    Cost: 2 order E C flops; two rows of M C, of which one is the result.

    Raises:
        ShapeError: if sizes do not fit.
    """
    order = first + r.shape[-3] - 1
    _check("polynomial_synthesis", by_target, by_source, values, r, order, first)
    r_VMKC = r.movedim(-3, -2)
    lead = r_VMKC.shape[:-3]
    r_VMKC = r_VMKC.unsqueeze(0) if not lead else r_VMKC.flatten(0, len(lead) - 1)
    y = _synthesis(*by_target, *by_source, values, r_VMKC, order, first, chebyshev)
    return y.reshape(*lead, *y.shape[1:])


def _check(owner: str, by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, order: int,
           first: int) -> None:
    entries, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    if entries != outputs:
        raise ShapeError(owner, "the edges must join as many inputs as outputs", f"M={entries}, N={outputs}")
    if x.dim() < 2 or x.shape[-2] != entries:
        raise ShapeError(owner, f"x must have shape (..., M={entries}, C)", tuple(x.shape))
    if values is not None and values.shape != by_target.indices.shape:
        raise ShapeError(owner, f"values must have shape (E={by_target.indices.shape[0]},)", tuple(values.shape))
    if not 0 <= first <= order:
        raise ShapeError(owner, "degrees must not be negative, nor the first above the last", (first, order))
    if order > HIGHEST:
        raise ShapeError(owner, f"degrees must be at most {HIGHEST}", order)


# -- kernels of x (V, M, C) and r (V, M, K, C) --------------------------------------------------------------------

def _write_analysis(y: Tensor, by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, order: int,
                   first: int, chebyshev: bool) -> None:
    """`polynomial_analysis` of x (..., M, C) into y (..., M, K, C), strided as it may be; no gradient is recorded."""
    before, now = None, x.contiguous()
    for degree in range(order + 1):
        if degree >= first:
            y[..., degree - first, :].copy_(now)
        if degree == order:
            return
        fold = chebyshev and degree > 0
        alpha, beta = (2.0, -1.0) if fold else (1.0, 0.0)
        if degree < 2:  # where x would be written to
            following = spmm_add(by_target, by_source, values, now, before, alpha=alpha, beta=beta)
        else:
            assert before is not None
            write_spmm(before, by_target, by_source, values, now, alpha=alpha, beta=beta)
            following = before
        before, now = now, following


def _analysis_kernel(by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, order: int, first: int,
                     chebyshev: bool) -> Tensor:
    y = _analysis_fake(by_target, by_source, values, x, order, first)
    _write_analysis(y, by_target, by_source, values, x, order, first, chebyshev)
    return y


def _synthesis_kernel(by_target: Csr, by_source: Csr, values: Tensor | None, r: Tensor, order: int, first: int,
                      chebyshev: bool) -> Tensor:
    """b_j = r_j + 2 A^T b_(j+1) - b_(j+2), and y = r_0 + A^T b_1 - b_2, with r_j = 0 below `first`."""
    layouts = by_target, by_source
    before, now = None, r[:, :, -1].clone(memory_format=torch.contiguous_format)
    for degree in range(order - 1, -1, -1):
        alpha = 2.0 if chebyshev and degree else 1.0
        if before is None:
            following = spmm_add(*layouts, values, now, alpha=alpha)
        else:
            write_spmm(before, *layouts, values, now, alpha=alpha, beta=-1.0 if chebyshev else 0.0)
            following = before
        if degree >= first:
            following.add_(r[:, :, degree - first])
        before, now = now, following
    return now


def _side_by_side(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The kernel of the operator's arguments; several samples of few channels are one, with V C channels."""
    def compute(*arguments: Any) -> Tensor:
        ends, (values, x, *options) = (Csr(*arguments[:3]), Csr(*arguments[3:6])), arguments[6:]
        if not (x.is_cpu and x.shape[0] > 1 and 0 < x.shape[-1] <= _NARROW):
            return kernel(*ends, values, x, *options)
        y = kernel(*ends, values, x.movedim(0, -2).flatten(-2).unsqueeze(0), *options)
        return y.squeeze(0).unflatten(-1, (x.shape[0], -1)).movedim(-2, 0).contiguous()

    return compute


def _analysis_fake(by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, order: int, first: int,
                   *_: Any) -> Tensor:
    return x.new_empty((x.shape[0], x.shape[1], order - first + 1, x.shape[2]))


def _synthesis_fake(by_target: Csr, by_source: Csr, values: Tensor | None, r: Tensor, *_: Any) -> Tensor:
    return r.new_empty((r.shape[0], r.shape[1], r.shape[3]))


# -- steps whose derivatives are those in the values --------------------------------------------------------------

def _analysis_steps(by_target: Csr, by_source: Csr, values: Tensor | None, x: Tensor, order: int, first: int,
                    chebyshev: bool) -> Tensor:
    rows = [x]
    for degree in range(order):
        if chebyshev and degree:
            rows.append(spmm_add(by_target, by_source, values, rows[-1], rows[-2], alpha=2.0, beta=-1.0))
        else:
            rows.append(spmm_add(by_target, by_source, values, rows[-1]))
    return torch.stack(rows[first:], 2)


def _synthesis_steps(by_target: Csr, by_source: Csr, values: Tensor | None, r: Tensor, order: int, first: int,
                     chebyshev: bool) -> Tensor:
    before, now = None, r[:, :, -1]
    for degree in range(order - 1, -1, -1):
        alpha = 2.0 if chebyshev and degree else 1.0
        following = spmm_add(by_target, by_source, values, now, before if chebyshev else None, alpha=alpha, beta=-1.0)
        if degree >= first:
            following = following + r[:, :, degree - first]
        before, now = now, following
    return now


# -- the operators ------------------------------------------------------------------------------------------------

def _declare(name: str, adjoint: str, x: str, dims: int, kernel: Callable[..., Tensor], fake: Callable[..., Tensor],
             steps: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Define the operator of x with `dims` dimensions. Its gradient in x is the adjoint over the reversed edges."""
    def check(*arguments: Any) -> None:
        layouts, (values, x, order, first, _) = arguments[:6], arguments[6:]
        check_numbers(name, x, values)
        ends = check_edges(name, layouts, x)
        if x.dim() != dims or (dims == 4 and x.shape[2] != order - first + 1):
            raise ShapeError(name, "x must have shape (V, M, C), and r (V, M, K, C)", tuple(x.shape))
        _check(name, *ends, values, x if dims == 3 else x.transpose(1, 2), order, first)

    def save(ctx: Any, inputs: tuple[Any, ...], _: Tensor) -> None:
        ctx.options = inputs[8:]
        ctx.save_for_backward(*inputs[:7], inputs[7] if ctx.needs_input_grad[6] else None)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *layouts, values, x = ctx.saved_tensors
        needed, grad_x, grad_values = ctx.needs_input_grad[6:8], None, None
        if needed[1]:
            grad_x = _OPERATORS[adjoint](*layouts[3:], *layouts[:3], values, grad, *ctx.options)
        if needed[0]:
            ends = Csr(*layouts[:3]), Csr(*layouts[3:])
            (grad_values,) = pulled_back(lambda v: steps(*ends, v, x, *ctx.options), [values], [True], [grad])
        return *(None,) * 6, grad_values, grad_x, None, None, None

    def tangent(arguments: Sequence[Any], tangents: Sequence[Any]) -> Tensor:
        layouts, (values, x, *options), (values_t, x_t) = arguments[:6], arguments[6:], tangents[6:8]
        if values_t is None:
            return getattr(torch.ops.structconv, name)(*layouts, values, x_t, *options)
        moving = make_dual(values, values_t), x if x_t is None else make_dual(x, x_t)
        return unpack_dual(steps(Csr(*layouts[:3]), Csr(*layouts[3:]), *moving, *options)).tangent

    _OPERATORS[name] = define(
        name, f"{EDGES}, Tensor? values, Tensor {x}, int highest, int lowest, bool chebyshev", _side_by_side(kernel),
        by_layouts(fake), check, backward=backward, save=save, tangent=tangent)
    COMPOSED[name] = by_layouts(steps)
    return _OPERATORS[name]


_OPERATORS: dict[str, Callable[..., Tensor]] = {}
_analysis = _declare("polynomial_analysis", "polynomial_synthesis", "x", 3, _analysis_kernel, _analysis_fake,
                     _analysis_steps)
_synthesis = _declare("polynomial_synthesis", "polynomial_analysis", "r", 4, _synthesis_kernel, _synthesis_fake,
                      _synthesis_steps)


# -- a product with channels --------------------------------------------------------------------------------------

class Recurrence(NamedTuple):
    """The edges of a matrix, and which of its polynomials; see `polynomial_analysis`."""

    by_target: Csr
    by_source: Csr
    values: Tensor | None
    order: int
    first: int
    chebyshev: bool

    def apply(self, x_MP: Tensor, theta_KPQ: Tensor) -> Tensor:
        """sum_k T_k(A)^T x Theta_k, (M, Q), by differentiable operators."""
        size, _, outputs = theta_KPQ.shape
        r_KMQ = product(x_MP, _folded(theta_KPQ)).unflatten(1, (size, outputs)).movedim(1, 0)
        return polynomial_synthesis(self.by_target, self.by_source, self.values, r_KMQ, first=self.first,
                                    chebyshev=self.chebyshev)


def polynomial_product(recurrence: Recurrence, x_MP: Tensor, theta_KPQ: Tensor) -> Tensor:
    """`recurrence.apply(x, theta)`, (M, Q), whose backward holds only two rows of the recurrence beside the gradients.

    It needs T_k(A) g for every k, then two products with all of them, g being the gradient of y: they lie in the rows
    of x's gradient, of K Q <= P channels, until these are computed from them.
    """
    if transformed(x_MP, theta_KPQ):
        return recurrence.apply(x_MP, theta_KPQ)
    return apply(_Product, recurrence, x_MP, theta_KPQ)


class _Product(torch.autograd.Function):
    """`Recurrence.apply`, its backward in place."""

    @staticmethod
    def forward(ctx: Any, recurrence: Recurrence, x_MP: Tensor, theta_KPQ: Tensor) -> Tensor:
        ctx.recurrence = recurrence
        ctx.save_for_backward(x_MP, theta_KPQ)
        return recurrence.apply(x_MP, theta_KPQ)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved, needed = ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled() or transformed(grad, *saved):
            return None, *pulled_back(ctx.recurrence.apply, saved, needed, [grad])
        x_MP, theta_KPQ = saved
        return None, *_backward(ctx.recurrence, x_MP, theta_KPQ, grad, needed[1])


def _backward(recurrence: Recurrence, x_MP: Tensor, theta_KPQ: Tensor, grad: Tensor,
              theta_grad: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and Theta; row by row, that of x replaces what it is computed from."""
    size, _, outputs = theta_KPQ.shape
    grad_x = new_empty(x_MP, x_MP.shape)
    heads = grad_x[:, :size * outputs]
    _write_analysis(heads.unflatten(1, (size, outputs)), recurrence.by_source, recurrence.by_target, recurrence.values,
                    grad, recurrence.order, recurrence.first, recurrence.chebyshev)
    folded = _folded(theta_KPQ)
    grad_folded = torch.zeros_like(folded)
    for rows in (slice(start, start + ROWS) for start in range(0, x_MP.shape[0], ROWS)):
        back = heads[rows].clone()
        if theta_grad:
            grad_folded.addmm_(x_MP[rows].t(), back)
        torch.mm(back, folded.t(), out=grad_x[rows])
    return grad_x, grad_folded.unflatten(1, (size, outputs)).transpose(0, 1) if theta_grad else None


def _folded(theta_KPQ: Tensor) -> Tensor:
    """(P, K Q)."""
    return theta_KPQ.transpose(0, 1).flatten(1)
