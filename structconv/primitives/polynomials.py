"""A polynomial of a sparse matrix after a product with channels, with a backward in the memory of x's gradient."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.primitives.functions import apply, pulled_back, transformed
from structconv.primitives.memory import new_empty
from structconv.primitives.native.indices import Csr
from structconv.primitives.native.recurrence import polynomial_synthesis, write_analysis
from structconv.primitives.products import product

__all__ = ["Recurrence", "polynomial_product"]

#: Rows that are multiplied at a time; a block of them stays in the cache.
ROWS = 4096


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
    write_analysis(heads.unflatten(1, (size, outputs)), recurrence.by_source, recurrence.by_target,
                   recurrence.values, grad, recurrence.order, recurrence.first, recurrence.chebyshev)
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
