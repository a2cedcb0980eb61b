"""The register of rules: what each path costs for a type of basis, and how it is run.

A rule is keyed by the type of basis that it is for and by its path; those for `Basis` hold for every basis: the
three orders of Andreoli 2019, Figure 1, and the one that a low-rank Theta adds. A kernel is a class with three
methods and one decorator::

    @rule(Shift, "operator_first", kernel="torch.conv")
    class GridConvolution(Rule):
        def applies(self, basis, theta, x): ...
        def cost(self, problem): ...
        def run(self, x, basis, theta): ...
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.dense import Dense, Identity
from structconv.planning.cost import Cost, lost_flops
from structconv.planning.counts import Sizes, application
from structconv.primitives.products import product
from structconv.theta import EyeTheta, FullTheta, HeadBlocksTheta, LowRankTheta, SharedTheta, Theta
from structconv.theta.base import contract_heads

if TYPE_CHECKING:
    from structconv.planning.plan import Plan

#: Operators that a product with Theta, one with another factor at once, and one with the dense operator, take the time
#: of calling.
CHANNEL_CALLS, FACTOR_CALLS, OPERATOR_CALLS = 4, 3, 10
#: Bytes above which the operator (M, P) -> (N, Q) is never built unasked.
OPERATOR_BYTES = 1 << 28


#: (x, b or none) -> y.
Run = Callable[[Tensor, "Tensor | None"], Tensor]


@dataclass(frozen=True)
class Problem:
    """What a cost may see: types, sizes and which gradients are wanted. Never values.

    Args:
        basis, theta: read for their types, sizes and nonzero counts.
        sizes: how entries and edges are counted.
        x_grad: whether x needs a gradient.
        theta_grad: whether Theta needs one.
        max_bytes: bytes that a path may hold beside its arguments and its result, or `None`.
    """

    basis: Basis
    theta: Theta
    sizes: Sizes
    x: Tensor
    x_grad: bool = False
    theta_grad: bool = False
    max_bytes: int | None = None

    @property
    def inputs(self) -> int:
        """M."""
        return self.sizes.entries(self.basis)[0]

    @property
    def outputs(self) -> int:
        """N."""
        return self.sizes.entries(self.basis)[1]

    def bytes(self, numbers: float) -> float:
        """Bytes of so many numbers for each element of the batch."""
        return self.sizes.batch * numbers * self.sizes.itemsize

    def part(self, basis: Basis, theta: Theta) -> Problem:
        """The same x with another basis and Theta."""
        return dataclasses.replace(self, basis=basis, theta=theta)

    def channel_product(self, flops: int, entries: int, heads: int, before: int, after: int,
                        columns: int = 0, products: int = 1) -> Cost:
        """A product with Theta at so many entries: its forward, and its share of the backward.

        `columns` is the width of its result, where that may be too narrow for the machine's full rate, and `products`
        how many it is taken in, one factor after the other.
        """
        numel = sum(t.numel() for t in self.theta.tensors) * self.sizes.itemsize
        work = self.sizes.batch * entries * flops
        wasted = lost_flops(work, columns, filled=True)
        copied = 2 * heads * max(before, after) if self.theta.rearranges_heads and heads > 1 else 0
        once = Cost(work, self.bytes(entries * (before + heads * after + copied)) + numel, wasted=wasted,
                    calls=CHANNEL_CALLS + (products - 1) * FACTOR_CALLS)
        return once.repeated(1 + self.x_grad + self.theta_grad)

    def structure_product(self, channels: int, mode: str, adjoint: bool) -> Cost:
        """One of the basis's primitives, and its transpose where a gradient must come back through it."""
        return application(self.basis, self.sizes, channels, mode).repeated(1 + adjoint)


class Rule(abc.ABC):
    """One way to compute (1); `path` is its order, `kernel` what runs it."""

    path: ClassVar[str]
    kernel: ClassVar[str]
    #: Whether it makes what a `ProjectedBilinear` leaves to its kernel together with x's product with Theta.
    projects: ClassVar[bool] = False

    def applies(self, basis: Basis, theta: Theta, x: Tensor) -> bool:
        """Whether the rule can run these at all; reads types, sizes and options, never values."""
        return True

    def unasked(self, problem: Problem) -> bool:
        """Whether the planner may choose the rule where no path is asked for by name."""
        return True

    @abc.abstractmethod
    def cost(self, problem: Problem) -> Cost:
        """What the path costs, forward and, as far as gradients are wanted, backward."""

    @abc.abstractmethod
    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        """(..., M, P) -> (..., N, Q)."""

    def biased(self, x: Tensor, basis: Basis, theta: Theta, bias: Tensor | None) -> Tensor:
        """`run`, and b (Q) added where there is one; a kernel that adds it in passing overrides this."""
        y = self.run(x, basis, theta)
        return y if bias is None else y + bias

    def prepared(self, x: Tensor, basis: Basis, theta: Theta) -> Run:
        """(x, b) -> `biased` for any x of this shape; a kernel that can derive more from the basis overrides this.

        What is returned may hold the basis and Theta, and whatever tensors these have now: whoever keeps it calls it
        only while none of those has changed.
        """
        return lambda x, bias: self.biased(x, basis, theta, bias)

    def prepared_image(self, image: Tensor, basis: Basis, theta: Theta) -> Run | None:
        """As `prepared`, for inputs and outputs as images (..., C, *S); `None` where the kernel takes none."""
        return None

    def parts(self, problem: Problem) -> tuple[Plan, ...]:
        """Plans of the parts, where the rule runs a basis in parts."""
        return ()


RULES: dict[type, list[Rule]] = {}
_RuleClass = TypeVar("_RuleClass", bound=type[Rule])


def rule(basis_type: type, path: str, *, kernel: str) -> Callable[[_RuleClass], _RuleClass]:
    """Register a rule for a type of basis and its subtypes; one of equal path and kernel replaces a base type's."""

    def register(cls: _RuleClass) -> _RuleClass:
        cls.path, cls.kernel = path, kernel
        RULES.setdefault(basis_type, []).append(cast(Any, cls)())
        return cls

    return register


def rules_for(basis_type: type) -> tuple[Rule, ...]:
    """The rules of a type of basis, those of the most specific type first."""
    found: dict[tuple[str, str], Rule] = {}
    for base in basis_type.__mro__:
        for candidate in RULES.get(base, ()):
            found.setdefault((candidate.path, candidate.kernel), candidate)
    return tuple(found.values())


def joined(theta: Theta, r: Tensor, bias: Tensor | None) -> Tensor:
    """theta.join(r), and b (Q) added where there is one, in passing if the join is a product."""
    if isinstance(theta, LowRankTheta):
        return contract_heads(r, theta.outputs, bias)
    y = theta.join(r)
    return y if bias is None else y + bias


def _distinct_heads(theta: Theta) -> int:
    """How many of the K products x Theta_k differ."""
    return 1 if isinstance(theta, EyeTheta | SharedTheta) else theta.size


@rule(Basis, "between", kernel="value, apply, output")
class Between(Rule):
    """x V_k, then A_k^T, then O_k, for Theta_k = V_k O_k of rank D: the structure sees D channels a head."""

    def applies(self, basis: Basis, theta: Theta, x: Tensor) -> bool:
        return not theta.sums_heads

    def cost(self, problem: Problem) -> Cost:
        theta = cast("LowRankTheta | HeadBlocksTheta", problem.theta)
        inner = problem.channel_product(theta.inner_flops(), problem.inputs, theta.values.shape[0],
                                        theta.in_channels, theta.head_channels,
                                        theta.values.shape[0] * theta.head_channels)
        outer = problem.channel_product(theta.outer_flops(), problem.outputs, theta.size,
                                        theta.out_channels, theta.head_channels, theta.out_channels)
        structure = problem.structure_product(theta.head_channels, "apply", problem.x_grad or problem.theta_grad)
        held = problem.bytes(theta.size * theta.head_channels * (problem.inputs + problem.outputs))
        return inner + structure + outer + Cost(peak_bytes=held)

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        return theta.join(basis.apply(theta.heads(x)))

    def biased(self, x: Tensor, basis: Basis, theta: Theta, bias: Tensor | None) -> Tensor:
        if type(self).run is not Between.run:
            return super().biased(x, basis, theta, bias)
        return joined(theta, basis.apply(theta.heads(x)), bias)


@rule(Basis, "structure_first", kernel="analysis, contract")
class StructureFirst(Rule):
    """A_k^T x for every k, then sum_k . Theta_k: right where P is small, or x needs no gradient.

    Of two paths that cost the same it is taken, because the last product may add b in passing.
    """

    def cost(self, problem: Problem) -> Cost:
        theta = problem.theta
        channels = problem.channel_product(theta.contract_flops(), problem.outputs, theta.size,
                                           theta.out_channels, theta.in_channels, theta.out_channels,
                                           products=theta.factors)
        structure = problem.structure_product(theta.in_channels, "analysis", problem.x_grad)
        held = problem.bytes(theta.size * problem.outputs * theta.in_channels)
        return structure + channels + Cost(peak_bytes=held)

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        return theta.contract(basis.analysis(x))

    def biased(self, x: Tensor, basis: Basis, theta: Theta, bias: Tensor | None) -> Tensor:
        if type(theta) is FullTheta and type(self).run is StructureFirst.run:
            return contract_heads(basis.analysis(x), theta.theta, bias)
        return super().biased(x, basis, theta, bias)

    def prepared(self, x: Tensor, basis: Basis, theta: Theta) -> Run:
        if type(theta) is not FullTheta or type(self).run is not StructureFirst.run:
            return super().prepared(x, basis, theta)
        analysis, whole = basis.ready("analysis"), theta.theta
        return lambda x, bias: contract_heads(analysis(x), whole, bias)


@rule(Basis, "channels_first", kernel="expand, synthesis")
class ChannelsFirst(Rule):
    """x Theta_k for every k, then sum_k A_k^T: right where Q is small."""

    def cost(self, problem: Problem) -> Cost:
        theta, heads = problem.theta, _distinct_heads(problem.theta)
        channels = problem.channel_product(theta.expand_flops(), problem.inputs, heads,
                                           theta.in_channels, theta.out_channels, heads * theta.out_channels,
                                           products=theta.factors)
        structure = problem.structure_product(theta.out_channels, "synthesis", problem.x_grad or problem.theta_grad)
        fixed = isinstance(theta, EyeTheta)
        held = 0 if fixed else problem.bytes(heads * problem.inputs * theta.out_channels)
        return channels + structure + Cost(peak_bytes=held)

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        return basis.synthesis(theta.expand(x))

    def prepared(self, x: Tensor, basis: Basis, theta: Theta) -> Run:
        return self.ready(basis, theta) if type(self).run is ChannelsFirst.run else super().prepared(x, basis, theta)

    @staticmethod
    def ready(basis: Basis, theta: Theta) -> Run:
        """(x, b) -> y by the basis's synthesis, with what does not depend on x done before."""
        synthesis = basis.ready("synthesis")

        def run(x: Tensor, bias: Tensor | None) -> Tensor:
            y = synthesis(theta.expand(x))
            return y if bias is None else y + bias

        return run


@rule(Identity, "channels_first", kernel="one product")
class OneProduct(ChannelsFirst):
    """x Theta: one identity has nothing to apply."""

    def applies(self, basis: Basis, theta: Theta, x: Tensor) -> bool:
        return theta.size == 1

    def cost(self, problem: Problem) -> Cost:
        theta = problem.theta
        return problem.channel_product(theta.contract_flops(), problem.inputs, 1, theta.in_channels,
                                       theta.out_channels, theta.out_channels)

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        return product(x, theta.theta[0]) if isinstance(theta, FullTheta) else theta.contract(x.unsqueeze(-3))

    def biased(self, x: Tensor, basis: Basis, theta: Theta, bias: Tensor | None) -> Tensor:
        if isinstance(theta, FullTheta) and type(self).run is OneProduct.run:
            return product(x, theta.theta[0], bias)
        return super().biased(x, basis, theta, bias)


@rule(Basis, "operator_first", kernel="dense operator")
class OperatorFirst(Rule):
    """Phi = sum_k A_k (x) Theta_k as one (M P, N Q) matrix, then x Phi: O(M N P Q) memory.

    A dense operator multiplies the zeros of a sparse basis as well, so that a NaN of x reaches every output; it is
    therefore run for bases other than `Dense` only when asked for.
    """

    def unasked(self, problem: Problem) -> bool:
        return False

    def cost(self, problem: Problem) -> Cost:
        theta, (inputs, outputs) = problem.theta, (problem.inputs, problem.outputs)
        batch = 1
        for size in problem.basis.batch_shape:
            batch *= size
        operator = inputs * outputs * theta.in_channels * theta.out_channels
        held = batch * (operator + theta.size * inputs * outputs) * problem.sizes.itemsize
        moved = problem.bytes(inputs * theta.in_channels + outputs * theta.out_channels)
        build = Cost(2 * batch * theta.size * operator, 2 * held, calls=OPERATOR_CALLS).repeated(1 + problem.theta_grad)
        use = Cost(2 * problem.sizes.batch * operator, held + moved, calls=CHANNEL_CALLS)
        use = use.repeated(1 + problem.x_grad + problem.theta_grad)
        return build + use + Cost(peak_bytes=held)

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        a, weight = basis.dense(x.dtype).to(x.device), theta.dense().to(dtype=x.dtype, device=x.device)
        phi = torch.einsum("...kmn,kpq->...mpnq", a, weight)
        outputs, channels = phi.shape[-2:]
        matrix = phi.flatten(-2).flatten(-3, -2)
        return (x.flatten(-2).unsqueeze(-2) @ matrix).squeeze(-2).unflatten(-1, (outputs, channels))


@rule(Dense, "operator_first", kernel="dense operator")
class DenseOperatorFirst(OperatorFirst):
    """`OperatorFirst` for a stored tensor, where no entry is absent; chosen unasked while the operator is small."""

    def unasked(self, problem: Problem) -> bool:
        return not problem.sizes.nominal and self.cost(problem).peak_bytes <= OPERATOR_BYTES
