"""Polynomials of a sparse matrix after a product with channels, with a backward in the memory of x's gradient."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv.bases.polynomial import Polynomial
from structconv.bases.sparse import Sparse
from structconv.bases.tree import getter
from structconv.kernels.orders import Application, Applied
from structconv.planning.kernel import register
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.functions import transformed
from structconv.primitives.layout import Csr
from structconv.primitives.polynomials import Recurrence, polynomial_analysis, polynomial_product, polynomial_synthesis
from structconv.shapes import check_alike
from structconv.structures.graph import Graph
from structconv.weights import Full, Weight

__all__ = ["LEAST_NUMBERS", "LEAST_WIDTH", "Polynomials", "Recurrences"]

#: Numbers of x from which the memory of a pass is worth more than the operators that save it.
LEAST_NUMBERS = 1 << 22
#: Numbers of a row of all heads from which products with it run at their full rate.
LEAST_WIDTH = 16


class Recurrences(Applied):
    """Forward recurrence over the inputs for all degrees of x, Clenshaw's over the outputs for their sum.

    After a product with channels, the backward of Clenshaw's needs T_k(A) g for every k, g being the gradient of y,
    then two products with all of them. For large x of P >= K Q channels they are stored in x's gradient until its rows
    are computed, so that beside the gradients only two rows of the recurrence are held, 2 N Q."""

    name, types, before = "structconv.recurrence", (Polynomial,), ("primitives",)

    def match(self, problem: Problem) -> Polynomials | None:
        basis = problem.basis
        assert isinstance(basis, Polynomial)
        operator = basis.operator
        if type(operator) is not Sparse or operator.batch_shape:
            return None
        if operator.values is not None:
            check_alike("Sparse", problem.x, operator.values, other_name="values")
        values = None if operator.values is None else getter(operator.values)
        return Polynomials(getter(operator.graph), values, basis.order, basis.first, basis.kind == "chebyshev")

    def application(self, match: Polynomials, problem: Problem) -> Application:
        return Application(match.apply, match.analysis, match.synthesis)

    def compile(self, match: Polynomials, problem: Problem, path: str) -> Run:
        run = super().compile(match, problem, path)
        if path != "channels_first" or is_compiling() or not _large(problem.x, problem.theta):
            return run

        def in_place(call: Call) -> Tensor:
            x, theta = call.x, call.theta
            edges = match.edges(call) if _large(x, theta) else None
            if edges is None:
                return run(call)
            recurrence = Recurrence(*edges, match.order, match.first, match.chebyshev)
            y = polynomial_product(recurrence, x.reshape(x.shape[-2:]), cast(Full, theta).theta)
            y = y.reshape(*x.shape[:-1], theta.out_channels)
            return y if call.bias is None else y + call.bias

        return in_place


class Polynomials(NamedTuple):
    """The polynomials of a sparse matrix, and functions that find its edges and values in a basis."""

    graph: Callable[[Any], Graph]
    values: Callable[[Any], Tensor] | None
    order: int
    first: int
    chebyshev: bool

    def edges(self, call: Call) -> tuple[Csr, Csr, Tensor | None] | None:
        """Both layouts, and the values (E,); `None` if these need a gradient, which the recurrences do not compute."""
        values = None if self.values is None else self.values(call.basis)
        if values is not None and values.requires_grad and torch.is_grad_enabled():
            return None
        return *self.graph(call.basis).layouts(), None if values is None else values.flatten()

    def analysis(self, x: Tensor, call: Call) -> Tensor:
        """(..., M, C) -> (..., K, M, C)."""
        edges = self.edges(call)
        if edges is None:
            return call.materialized().analysis(x)
        return polynomial_analysis(*edges, x, order=self.order, first=self.first, chebyshev=self.chebyshev)

    def synthesis(self, r: Tensor, call: Call) -> Tensor:
        """(..., K, M, C) -> (..., M, C)."""
        edges = self.edges(call)
        if edges is None:
            return call.materialized().synthesis(r)
        r = r.expand(*r.shape[:-3], self.order - self.first + 1, *r.shape[-2:])
        return polynomial_synthesis(*edges, r, first=self.first, chebyshev=self.chebyshev)

    def apply(self, r: Tensor, call: Call) -> Tensor:
        """(..., K, M, C) -> (..., K, M, C)."""
        return call.materialized().apply(r)


def _large(x: Tensor, theta: Weight) -> bool:
    """Return True if x needs a gradient that is large and has room for the gradients of all heads."""
    if not (x.requires_grad and torch.is_grad_enabled()) or is_compiling() or type(theta) is not Full:
        return False
    if x.numel() < LEAST_NUMBERS or math.prod(x.shape[:-2]) != 1 or not x.is_cpu:
        return False
    plain = x.dtype in (torch.float32, torch.float64) and not transformed(x, theta.theta)
    return plain and LEAST_WIDTH <= theta.size * theta.out_channels <= theta.in_channels


register(Recurrences())
