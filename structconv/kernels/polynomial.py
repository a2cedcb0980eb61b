"""Polynomials of a sparse matrix behind a product with channels, differentiated within the memory of x's gradient."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv.bases.base import Basis
from structconv.bases.polynomial import Polynomial
from structconv.planning.rules import ChannelsFirst, Run, rule
from structconv.primitives.functions import apply, transformed
from structconv.primitives.layout import Csr
from structconv.primitives.memory import new_empty
from structconv.primitives.native.operator import composed_gradients
from structconv.primitives.native.recurrence import polynomial_synthesis, write_analysis
from structconv.primitives.products import product
from structconv.theta import FullTheta, Theta

#: Numbers of x from which the memory of a pass is worth more than the operators that save it.
LEAST_NUMBERS = 1 << 22
#: Numbers of a row of all heads from which products with it run at their full rate.
LEAST_WIDTH = 16
#: Rows that are multiplied at a time; a block of them stays in the cache.
ROWS = 4096


@rule(Polynomial, "channels_first", kernel="expand, synthesis")
class Clenshaw(ChannelsFirst):
    """x Theta_k for every k, then Clenshaw's recurrence over the outputs.

    The backward needs T_k(A) g for every k, then two products with all of them, g being the gradient of y. For large
    x of K Q <= P channels they lie in the rows of x's gradient until these are computed from them, so that beside
    the gradients only two rows of the recurrence are held, 2 N Q.
    """

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        polynomial, edges = cast(Polynomial, basis), None
        if _large(x, theta):
            edges = polynomial.constant_edges(x)
        if edges is None:
            return super().run(x, basis, theta)
        recurrence = Recurrence(*edges, polynomial.order, polynomial.first, polynomial.kind == "chebyshev")
        y = apply(_Product, recurrence, x.reshape(x.shape[-2:]), cast(FullTheta, theta).theta)
        return y.reshape(*x.shape[:-1], theta.out_channels)

    def prepared(self, x: Tensor, basis: Basis, theta: Theta) -> Run:
        return super().prepared(x, basis, theta) if _large(x, theta) else self.ready(basis, theta)


def _large(x: Tensor, theta: Theta) -> bool:
    """Whether x's gradient is wanted, large, and has room for those of all heads."""
    if not (x.requires_grad and torch.is_grad_enabled()) or is_compiling() or type(theta) is not FullTheta:
        return False
    if x.numel() < LEAST_NUMBERS or math.prod(x.shape[:-2]) != 1 or not x.is_cpu:
        return False
    plain = x.dtype in (torch.float32, torch.float64) and not transformed(x, theta.theta)
    return plain and LEAST_WIDTH <= theta.size * theta.out_channels <= theta.in_channels


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


class _Product(torch.autograd.Function):
    """`Recurrence.apply`, its backward in place."""

    @staticmethod
    def forward(recurrence: Recurrence, x_MP: Tensor, theta_KPQ: Tensor) -> Tensor:
        return recurrence.apply(x_MP, theta_KPQ)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.recurrence, *tensors = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x_MP, theta_KPQ = ctx.saved_tensors
        _, *needed = ctx.needs_input_grad
        if torch.is_grad_enabled() or transformed(grad):
            return None, *composed_gradients(ctx.recurrence.apply, ctx.saved_tensors, needed, grad)
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
