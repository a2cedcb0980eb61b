"""Bases composed of others: `a | b` with a plan for each part, or with the rows of all parts joined before one product
with Theta; multiples, sums and products by their operands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.linear import Composed, Concat, LinearSum, Mixed, Mixture, Repeated, Scaled
from structconv.bases.tree import itself, materializer
from structconv.kernels.orders import Application, Applied
from structconv.planning import machine
from structconv.planning.cost import Cost
from structconv.planning.fitted import NODE_CALLS
from structconv.planning.kernel import Kernel, matching, register
from structconv.planning.plan import Plan, decide
from structconv.planning.problem import Call, PartInputs, Problem, Run
from structconv.primitives.products import product
from structconv.shapes import broadcast, sum_tensors
from structconv.structures.values import altered
from structconv.weights import Full, MixtureWeights

__all__ = ["JoinedInputs", "Nested", "PerInput", "PerPart", "cheapest"]


class Part(NamedTuple):
    """A part of `a | b`: its plan, and (call, b or none) -> the call of this part."""

    plan: Plan
    of: Callable[[Call, Tensor | None], Call]

    def run(self, call: Call, bias: Tensor | None) -> Tensor:
        """Return its term of y, plus b."""
        return self.plan.run(self.of(call, bias))


def _with_heads(number: int, start: int, stop: int, call: Call, bias: Tensor | None) -> Call:
    """The call of a part that has the heads start <= k < stop."""
    projected = None if call.projected is None else call.projected[..., start:stop, :, :]
    return Call(call.x, call.basis, call.theta.slice(start, stop), bias, projected, part=_part(call, number))


def _with_input(number: int, call: Call, bias: Tensor | None = None) -> Call:
    """The call of a part with an x of its own."""
    x, theta = cast(PartInputs, call.x).parts[number], cast(MixtureWeights, call.theta).parts[number]
    return Call(x, call.basis, theta, bias, part=_part(call, number))


def _part(call: Call, number: int) -> Callable[[Any], Any]:
    """Return a function that finds a part in the basis of a call."""
    find = itself if call.part is None else call.part
    return lambda basis: find(basis).parts[number]


def _problems(problem: Problem) -> list[Problem]:
    """The problem of each part of a mixture, with its x and Theta."""
    each = zip(cast(Mixture, problem.basis).parts, cast(MixtureWeights, problem.theta).parts,
               cast(PartInputs, problem.x).parts, strict=True)
    return [problem.part(*part) for part in each]


class PerPart(Kernel):
    """y = sum over the parts of `a | b | ...`, each with its slice of Theta and by the path that suits it."""

    types: ClassVar[tuple[type, ...]] = (Concat,)
    name, orders, by_heads = "parts, summed", ("per_part",), True

    def match(self, problem: Problem) -> tuple[Part, ...] | None:
        if problem.relative is not None or (problem.projected and not problem.theta.sums_heads):
            return None
        parts: list[Part] = []
        at = 0
        for number, part in enumerate(cast(Concat, problem.basis).parts):
            theta = problem.theta.slice(at, at + part.size)
            if problem.projected and not theta.sums_heads:
                return None  # the projected channels are those of y, not those between two factors
            plan = decide(problem.part(part, theta))
            parts.append(Part(plan, partial(_with_heads, number, at, at + part.size)))
            at += part.size
        return tuple(parts)

    def cost(self, match: tuple[Part, ...], problem: Problem, path: str) -> Cost:
        total = Cost()
        for part in match:
            result = problem.bytes(problem.outputs * problem.theta.out_channels)
            total = total + part.plan.cost + Cost(bytes=3 * result, peak_bytes=result)
        return total

    def compile(self, match: tuple[Part, ...], problem: Problem, path: str) -> Run:
        *others, last = match

        def run(call: Call) -> Tensor:
            return sum_tensors([*[part.run(call, None) for part in others], last.run(call, call.bias)])

        return run

    def parts(self, match: tuple[Part, ...], problem: Problem) -> tuple[Plan, ...]:
        return tuple(part.plan for part in match)


class PerInput(PerPart):
    """The kernel for a mixture, whose parts each have an x; the weights are those of each part."""

    name, types, by_heads, separate = "parts of their own x, summed", (Mixture,), False, True

    def match(self, problem: Problem) -> tuple[Part, ...] | None:
        return tuple(Part(decide(part), partial(_with_input, number))
                     for number, part in enumerate(_problems(problem)))

    def weights(self, match: tuple[Part, ...], problem: Problem) -> Run:
        return lambda call: tuple(part.plan.weights(part.of(call, None)) for part in match)  # type: ignore[return-value]


class Operand(NamedTuple):
    """The application of an operand of a basis by its cheapest kernel, and its K."""

    application: Application
    size: int


class _OperandOfCall(Basis):
    """A basis that is applied by a kernel, in one call."""

    def __init__(self, application: Application, call: Call, size: int) -> None:
        self.application, self.call, self.heads = application, call, size

    @property
    def size(self) -> int:
        return self.heads

    @property
    def num_inputs(self) -> int:
        return self.call.materialized().num_inputs

    @property
    def num_outputs(self) -> int:
        return self.call.materialized().num_outputs

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self.call.materialized().dense(dtype)

    def apply(self, r: Tensor) -> Tensor:
        return self.application.apply(r, self.call)

    def analysis(self, x: Tensor) -> Tensor:
        return self.application.analyze()(x, self.call)

    def synthesis(self, r: Tensor) -> Tensor:
        return self.application.synthesize()(r, self.call)


class Nested(Applied):
    """A multiple, a sum, a product or a repetition of bases, each operand by its cheapest kernel."""

    name, types, before = "operands' kernels", (Scaled, Mixed, LinearSum, Composed, Repeated, Concat), ("primitives",)

    def match(self, problem: Problem) -> dict[str, Any] | None:
        """Return the application of each operand."""
        attrs = problem.basis.__dict__
        return {name: _applied(attrs[name], problem) for name in ("child", "first", "second", "parts") if name in attrs}

    def application_cost(self, match: dict[str, Any], problem: Problem, channels: int, mode: str) -> Cost:
        # the node, and for an operand of its own the operand's node and its call; several share those of the node
        count = 1 + sum(2 if type(operand) is Operand else len(operand) for operand in match.values())
        return super().application_cost(match, problem, channels, mode) + Cost(calls=NODE_CALLS * count)

    def application(self, match: dict[str, Any], problem: Problem) -> Application:
        node, fills = problem.basis, {name: materializer(field) for name, field in problem.basis.__dict__.items()
                                      if name in ("factor", "matrix")}

        def bound(call: Call) -> Basis:
            fields = {name: _bound(operand, call, attrgetter(name)) for name, operand in match.items()}
            return cast(Basis, altered(node, **fields, **{name: fill(call.basis) for name, fill in fills.items()}))

        weights = None
        if isinstance(node, Scaled) and isinstance(node.factor, float):
            weights = _times(match["child"].application.weights, node.factor)
        return Application(lambda r, call: bound(call).apply(r), lambda x, call: bound(call).analysis(x),
                           lambda r, call: bound(call).synthesis(r), weights=weights)


def _times(weights: Run | None, factor: float) -> Run | None:
    return None if weights is None else lambda call: weights(call) * factor


def _applied(basis: Any, problem: Problem) -> Any:
    """The `Operand` of a basis, by its cheapest kernel, or those of several bases."""
    if isinstance(basis, tuple):
        return tuple(_applied(part, problem) for part in basis)
    best, _ = cheapest(problem.part(basis, problem.theta), problem.theta.head_channels, "apply")
    return Operand(best, basis.size)


def cheapest(problem: Problem, channels: int, mode: str) -> tuple[Application, Cost]:
    """The cheapest way to apply a basis to this number of channels, and its cost."""
    rates, least = machine.rates(problem.x.device), float("inf")
    best: Any = None
    for kernel, match, _ in matching(problem):
        if isinstance(kernel, Applied):
            cost = kernel.application_cost(match, problem, channels, mode)
            seconds = cost.seconds(rates, problem.sizes.itemsize)
            if seconds < least:
                least, best = seconds, (kernel.application(match, problem), cost)
    return cast("tuple[Application, Cost]", best)


def _bound(operand: Any, call: Call, find: Callable[[Any], Any]) -> Any:
    """The operand as the basis of a call of its own; `find` finds it in the basis of the whole call."""
    if type(operand) is not Operand:
        return tuple(_bound(part, call, _item_of(find, i)) for i, part in enumerate(operand))
    whole = itself if call.part is None else call.part
    own = Call(call.x, call.basis, call.theta, None, call.projected, part=lambda basis: find(whole(basis)))
    return _OperandOfCall(operand.application, own, operand.size)


def _item_of(find: Callable[[Any], Any], number: int) -> Callable[[Any], Any]:
    return lambda basis: find(basis)[number]


class Joined(NamedTuple):
    """The application of each part of a mixture, and its cost."""

    applications: tuple[Application, ...]
    cost: Cost

    def rows(self) -> Run:
        """(call) -> [A_1^T x_1, A_2^T x_2, ...], (..., N, P_1 + P_2 + ...)."""
        ways = [applied.rows() for applied in self.applications]

        def joined(call: Call) -> Tensor:
            own = [_with_input(number, call) for number in range(len(ways))]
            parts = [way(one.x, one) for way, one in zip(ways, own, strict=True)]
            lead = broadcast(*(rows.shape[:-2] for rows in parts))
            return torch.cat([rows.expand(*lead, *rows.shape[-2:]) for rows in parts], -1)

        return joined


class JoinedInputs(Kernel):
    """[A_1^T x_1, A_2^T x_2, ...] [Theta_1; Theta_2; ...] for parts of K = 1: best if the P_i are small."""

    name, types, orders, separate = "rows of all parts, joined", (Mixture,), ("structure_first",), True

    def match(self, problem: Problem) -> Joined | None:
        own = _problems(problem)
        if not all(isinstance(part.theta, Full) and part.theta.size == 1 for part in own):
            return None
        chosen, total = [cheapest(part, part.theta.in_channels, "analysis") for part in own], Cost()
        for (_, cost), part in zip(chosen, own, strict=True):
            total = total + cost.repeated(1 + part.x_grad)
        return Joined(tuple([applied for applied, _ in chosen]), total)

    def cost(self, match: Joined, problem: Problem, path: str) -> Cost:
        theta, rows = problem.theta, problem.bytes(problem.outputs * problem.theta.in_channels)
        whole = problem.channel_product(2 * theta.in_channels * theta.out_channels, problem.outputs, 1,
                                        theta.in_channels, theta.out_channels, theta.out_channels)
        return match.cost + Cost(bytes=2 * rows, calls=1).repeated(1 + problem.x_grad) + whole + Cost(peak_bytes=rows)

    def compile(self, match: Joined, problem: Problem, path: str) -> Run:
        rows = match.rows()

        def run(call: Call) -> Tensor:
            thetas = [cast(Full, part).theta.squeeze(0) for part in cast(MixtureWeights, call.theta).parts]
            return product(rows(call), torch.cat(thetas), call.bias)

        return run

    def weights(self, match: Joined, problem: Problem) -> Run:
        entries = super().weights(match, problem)
        functions = [entries if applied.weights is None else applied.weights for applied in match.applications]
        return lambda call: tuple(of(_with_input(number, call)) for number, of in enumerate(functions))  # type: ignore[return-value]


for _kernel in (PerPart(), PerInput(), Nested(), JoinedInputs()):
    register(_kernel)
