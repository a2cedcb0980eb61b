"""`Call`: the arguments of a plan. `Problem`: the facts from which a plan is made.

A call holds tensors, a problem holds their shapes and types. Kernels match a problem once, and run for each call.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.tree import itself, materialized, tensor, tree_spec
from structconv.derived import Reused
from structconv.planning.cost import Cost, lost_flops
from structconv.planning.counts import Sizes
from structconv.planning.fitted import CHANNEL_CALLS, FACTOR_CALLS
from structconv.structures.output_positions import OutputPositions
from structconv.weights import Weight

__all__ = ["BoundRun", "Call", "Image", "PartInputs", "Problem", "Run"]


class PartInputs(NamedTuple):
    """The x of each part of a mixture, (..., M_i, P_i), instead of a call's single x."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of all."""
        return tuple(tuple(x.shape) for x in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first x; a plan checks that all are equal."""
        return self.parts[0].dtype

    @property
    def device(self) -> torch.device:
        """The device of the first x."""
        return self.parts[0].device

    @property
    def requires_grad(self) -> bool:
        """True if any of them requires a gradient."""
        return True in [x.requires_grad for x in self.parts]


class Call(NamedTuple):
    """The arguments of a plan: the tensors from which one call computes eq. 8.

    Args:
        x: (..., M, P), or an image (..., P, *S) where the problem says so, or `PartInputs`.
        basis: the basis of this call. It may hold products that are not computed yet; see `materialized`.
        theta, bias: Theta, and b (Q) or none.
        projected: x Theta_k by heads (..., K, M, D), where scores read it and it is computed already; perhaps `Shared`
            while inputs are pending.
        relative: (2 clip + 1, D), a vector for each relative position, added to the values (Shaw et al. 2018, eq. 3).
        output_positions: where the outputs stand among the inputs, from which relative positions count; none for
            output n at n.
        pending: the last inputs of a prepared x whose results are still to be computed (`nn.cache.PendingEntries`).
        reused: results that the calls of a prepared x share.
        part: (basis) -> the part of it that the call applies; none for all of it.

    Example: a call, which is the argument of a kernel's function.

        >>> from structconv.bases import Dense
        >>> from structconv.planning import Call, plan_for
        >>> from structconv.weights import Full
        >>> call = Call(torch.ones(4, 2), Dense(torch.ones(1, 4, 3)), Full.of(torch.ones(1, 2, 5)))
        >>> plan_for(call).run(call)[0]
        tensor([8., 8., 8., 8., 8.])
    """

    x: Tensor
    basis: Any
    theta: Weight
    bias: Tensor | None = None
    projected: Any = None
    relative: Tensor | None = None
    output_positions: OutputPositions | None = None
    pending: Any = None
    reused: Reused | None = None
    part: Callable[[Any], Any] | None = None

    def materialized(self) -> Basis:
        """Return the basis, or its part that `part` finds, with all products computed."""
        self.compute()
        return cast(Basis, materialized(self.basis if self.part is None else self.part(self.basis)))

    def compute(self) -> None:
        """Compute the results of pending inputs."""
        if self.pending is not None:
            self.pending.compute()

    def settled(self) -> Call:
        """The call without pending inputs, and with the values of each head."""
        self.compute()
        return self if self.projected is None else self._replace(projected=tensor(self.projected))

    def spec(self) -> Basis:
        """The spec of the basis."""
        return cast(Basis, tree_spec(self.basis, itself))


#: The function that a kernel compiles: the call -> y (..., N, Q), b included.
Run = Callable[[Call], Tensor]
#: The function of a bound step: (entry x, its position) -> y; `None` if it must be planned again.
BoundRun = Callable[[Tensor, int], Tensor | None]


class Image(NamedTuple):
    """x and y are images: (..., P, *S) on a grid, with `axes` axes S, and (..., Q, *outputs), where `source` leads."""

    axes: int
    source: Any
    grid: Any

    def outputs(self) -> tuple[int, ...]:
        """The shape of the grid on which the outputs lie."""
        shape: tuple[int, ...] = self.source.output_structure(self.grid).shape
        return shape


@dataclass(frozen=True, eq=False)
class Problem:
    """The facts from which kernels match and compute costs: types, sizes, and which gradients are needed. No numbers.

    Args:
        basis: the spec, or the basis itself while a program is traced.
        theta, x: read for their types and sizes, and not to be kept.
        sizes: how entries and edges are counted.
        x_grad, theta_grad: whether a gradient in x, and in Theta, is needed.
        max_bytes: bytes that a path may hold beside its arguments and its result, or `None`.
        projected: whether x Theta_k is computed already.
        relative: the clip of relative values, or `None`.
        image: the images that x and y are, if they are images.
        moved: whether output n may be at another position than n.
        pending: whether results of the last inputs are still to be computed.
        reused: whether x is prepared, for many calls.

    Example:

        >>> from structconv.bases import Dense
        >>> from structconv.planning import Problem, Sizes
        >>> from structconv.weights import Full
        >>> x, theta = torch.ones(40, 2), Full.of(torch.ones(1, 2, 5))
        >>> problem = Problem(Dense(torch.ones(1, 40, 30)), theta, x, Sizes(batch=1, itemsize=4))
        >>> problem.inputs, problem.outputs, problem.bytes(10)
        (40, 30, 40)
    """

    basis: Basis
    theta: Weight
    x: Tensor
    sizes: Sizes
    x_grad: bool = False
    theta_grad: bool = False
    max_bytes: int | None = None
    projected: bool = False
    relative: int | None = None
    image: Image | None = None
    moved: bool = False
    pending: bool = False
    reused: bool = False

    @property
    def inputs(self) -> int:
        """M."""
        return self.sizes.entries(self.basis)[0]

    @property
    def outputs(self) -> int:
        """N."""
        return self.sizes.entries(self.basis)[1]

    def bytes(self, numbers: float) -> float:
        """Bytes of `numbers` for each element of the batch."""
        return self.sizes.batch * numbers * self.sizes.itemsize

    @property
    def separate(self) -> bool:
        """True if each part has an x of its own."""
        return type(self.x) is PartInputs

    def part(self, basis: Basis, theta: Weight, x: Tensor | None = None) -> Problem:
        """The entries of the same x, or of that of a part, with another basis and Theta."""
        own = self if x is None else dataclasses.replace(self, x=x, x_grad=self.x_grad and x.requires_grad)
        return dataclasses.replace(own, basis=basis, theta=theta, image=None)

    def channel_product(self, flops: int, entries: int, heads: int, before: int, after: int,
                        columns: int = 0, products: int = 1, calls: int = CHANNEL_CALLS) -> Cost:
        """The cost of a product with Theta at this number of entries: its forward, and its share of the backward.

        `columns` is the width of its result, if that may be too narrow for the machine's full rate, and `products` the
        number of factors of Theta that are multiplied one after the other.
        """
        numel = sum(t.numel() for t in self.theta.tensors) * self.sizes.itemsize
        work = self.sizes.batch * entries * flops
        wasted = lost_flops(work, columns, filled=True)
        copied = 2 * heads * max(before, after) if self.theta.rearranges_heads and heads > 1 else 0
        once = Cost(work, self.bytes(entries * (before + heads * after + copied)) + numel, wasted=wasted,
                    calls=calls + (products - 1) * FACTOR_CALLS)
        return once.repeated(1 + self.x_grad + self.theta_grad)
