"""The three orders of Andreoli 2019, Figure 1, and the one between two factors of Theta, over any way to apply a basis.

`Applied` is the base of kernels that apply a basis: they compute A_k^T r, and the orders decide when to multiply with
Theta.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.dense import Dense, Identity
from structconv.bases.pairwise import nodes
from structconv.bases.placed import placed
from structconv.bases.positions import ClippedShifts
from structconv.planning.cost import Cost
from structconv.planning.counts import application, rows_gathered
from structconv.planning.fitted import CHANNEL_CALLS, FACTOR_CALLS, NODE_CALLS, OPERATOR_CALLS
from structconv.planning.kernel import Kernel, register
from structconv.planning.problem import Call, Problem, Run
from structconv.primitives.products import product, product_for
from structconv.structures.values import class_volume
from structconv.weights import Eye, EyeBlocks, Full, HeadBlocks, LowRank, Shared, Weight
from structconv.weights.base import plus
from structconv.weights.factored import Projections

__all__ = ["OPERATOR_BYTES", "Application", "Applied", "Apply", "shares_of"]

#: Bytes above which the operator (M, P) -> (N, Q) is built only on request.
OPERATOR_BYTES = 1 << 28

#: (tensor, call) -> tensor.
Apply = Callable[[Tensor, Call], Tensor]


class Application(NamedTuple):
    """The functions that apply a basis.

    Args:
        apply: A_k^T r_k, (..., K or 1, M, C) -> (..., K, N, C).
        analysis: A_k^T x, (..., M, C) -> (..., K, N, C); default: by `apply`.
        synthesis: sum_k A_k^T r_k, (..., K, M, C) -> (..., N, C); default: by `apply`.
        biased: (r, b (K, C), call) -> A_k^T r_k + b_k, with b added in the kernel.
        shares: (r, clip, call) -> A_k^T r_k and the sums of the weights over each relative position, (..., K, N, L).
        single: A^T x for K = 1, (..., M, C) -> (..., N, C); default: by `analysis`.
        weights: (call) -> the entries of the basis, in the layout of `weights_at`.

    Example: A_k = I, for any r.

        >>> from structconv.kernels.orders import Application
        >>> copy = Application(lambda r, call: r)
        >>> copy.analyze()(torch.ones(4, 2), None).shape           # x (M, C) -> (K, N, C)
        torch.Size([1, 4, 2])
        >>> copy.synthesize()(torch.ones(3, 4, 2), None)[0]        # the sum over K = 3
        tensor([3., 3.])
    """

    apply: Apply
    analysis: Apply | None = None
    synthesis: Apply | None = None
    biased: Callable[[Tensor, Tensor, Call], Tensor] | None = None
    shares: Callable[[Tensor, int, Call], tuple[Tensor, Tensor]] | None = None
    single: Apply | None = None
    weights: Run | None = None

    def analyze(self) -> Apply:
        """`analysis`, or the same by `apply`."""
        apply, analysis = self.apply, self.analysis  # compared with None: torch 2.12 traces no `or` of functions
        return (lambda x, call: apply(x.unsqueeze(-3), call)) if analysis is None else analysis

    def rows(self) -> Apply:
        """`single`, or the same by `analysis`."""
        analysis, single = self.analyze(), self.single
        return (lambda x, call: analysis(x, call).squeeze(-3)) if single is None else single

    def synthesize(self) -> Apply:
        """`synthesis`, or the same by `apply`."""
        apply, synthesis = self.apply, self.synthesis
        return (lambda r, call: apply(r, call).sum(-3)) if synthesis is None else synthesis


class Applied(Kernel):
    """A kernel that applies a basis, A_k^T r_k, in all orders of the products.

    Example: a basis that turns the entries around, without a matrix. `register(Flip())` adds it.

        >>> from structconv.bases import Dense
        >>> from structconv.kernels.orders import Application, Applied
        >>> class Flip(Applied):
        ...     name, types = "flip", (Dense,)
        ...     def match(self, problem):
        ...         return None                                    # the planner takes it where this is not None
        ...     def application(self, match, problem):
        ...         return Application(lambda r, call: r.flip(-2))
        >>> Flip().application(True, None).single is None
        True
    """

    orders: ClassVar[tuple[str, ...]] = ("structure_first", "channels_first", "between")
    by_heads: ClassVar[bool] = True

    @abc.abstractmethod
    def application(self, match: Any, problem: Problem) -> Application:
        """Return the functions that apply a basis of this spec."""

    def application_cost(self, match: Any, problem: Problem, channels: int, mode: str) -> Cost:
        """Return the forward cost of "analysis", "synthesis" or "apply" with this number of channels."""
        return application(problem.basis, problem.sizes, channels, mode)

    def paths(self, match: Any, problem: Problem) -> tuple[str, ...]:
        if problem.relative is not None:
            return ("between",)
        if problem.projected:
            return ("channels_first",) if problem.theta.sums_heads else ("between",)
        return ("structure_first", "channels_first", *(() if problem.theta.sums_heads else ("between",)))

    def cost(self, match: Any, problem: Problem, path: str) -> Cost:
        return _COSTS[path](problem, lambda channels, mode: self.application_cost(match, problem, channels, mode))

    def compile(self, match: Any, problem: Problem, path: str) -> Run:
        return _ORDERS[path](self.application(match, problem), problem)

    def weights(self, match: Any, problem: Problem) -> Run:
        weights = self.application(match, problem).weights
        return super().weights(match, problem) if weights is None else weights


# -- the orders ---------------------------------------------------------------------------------------------------

def _structure_first(applied: Application, problem: Problem) -> Run:
    """A_k^T x for every k, then sum_k . Theta_k: best if P is small, or x needs no gradient."""
    analysis, single = applied.analyze(), applied.single
    if single is not None and _whole(problem):
        return lambda call: product(single(call.x, call), call.theta.theta.squeeze(0),  # type: ignore[attr-defined]
                                    call.bias)
    return lambda call: call.theta.contract(analysis(call.x, call), call.bias)


def _channels_first(applied: Application, problem: Problem) -> Run:
    """x Theta_k for every k, then sum_k A_k^T: best if Q is small."""
    synthesis, projected, single = applied.synthesize(), problem.projected, applied.single
    if single is not None and not projected and _whole(problem):
        return lambda call: plus(single(product(call.x, call.theta.theta.squeeze(0)), call),  # type: ignore[attr-defined]
                                 call.bias)

    def run(call: Call) -> Tensor:
        y = synthesis(call.projected if projected else call.theta.expand(call.x), call)
        return plus(y, call.bias)

    return run


def _whole(problem: Problem) -> bool:
    """Return True if Theta is one matrix."""
    return isinstance(problem.theta, Full) and problem.theta.size == 1


def _between(applied: Application, problem: Problem) -> Run:
    """x V_k, then A_k^T, then O_k, for Theta_k = V_k O_k of rank D: the structure is applied to D channels a head."""
    if problem.relative is not None:
        return _with_relative_values(applied, problem)
    apply, biased, projected = applied.apply, applied.biased, problem.projected
    if biased is None or not isinstance(problem.theta, HeadBlocks):
        if projected:
            return lambda call: call.theta.join(apply(call.projected, call), call.bias)
        return lambda call: call.theta.join(apply(call.theta.heads(call.x), call), call.bias)
    shape = (problem.theta.size, problem.theta.head_channels)

    def run(call: Call) -> Tensor:
        theta = call.theta
        r = call.projected if projected else theta.heads(call.x)
        assert r is not None
        return theta.join(apply(r, call) if call.bias is None else biased(r, call.bias.view(shape), call))

    return run


def _with_relative_values(applied: Application, problem: Problem) -> Run:
    """A_k^T (x V_k) and the sums of the weights over each relative position, times its vector."""
    clip, shares, apply = problem.relative, None if problem.moved else applied.shares, applied.apply
    assert clip is not None

    def run(call: Call) -> Tensor:
        r = call.theta.heads(call.x) if call.projected is None else call.projected
        y, sums = (apply(r, call), shares_of(call, clip)) if shares is None else shares(r, clip, call)
        return call.theta.join(y + sums @ call.relative, call.bias)  # type: ignore[operator]

    return run


def shares_of(call: Call, clip: int) -> Tensor:
    """The sums of the weights over each relative position, (..., K, N, L): `ClippedShifts` applied to ones."""
    basis, table = call.materialized(), call.relative
    assert table is not None
    shifts: Basis = ClippedShifts(table, clip, basis.num_inputs, basis.num_outputs)
    shifts = shifts if call.output_positions is None else placed(shifts, call.output_positions, basis.num_outputs)
    shares = basis.outer(shifts).analysis(table.new_ones(basis.num_inputs, 1)).squeeze(-1)
    return shares.unflatten(-2, (basis.size, 2 * clip + 1)).mT


_ORDERS: dict[str, Callable[[Application, Problem], Run]] = {
    "structure_first": _structure_first, "channels_first": _channels_first, "between": _between}


# -- their costs --------------------------------------------------------------------------------------------------

#: (channels, mode) -> the forward cost of the structure.
Structure = Callable[[int, str], Cost]


def _structure_first_cost(problem: Problem, structure: Structure) -> Cost:
    theta = problem.theta
    channels = problem.channel_product(theta.contract_flops(), problem.outputs, theta.size, theta.out_channels,
                                       theta.in_channels, theta.out_channels, products=theta.factors)
    peak = problem.bytes(theta.size * problem.outputs * theta.in_channels)
    around = structure(theta.in_channels, "analysis").repeated(1 + problem.x_grad)
    return around + channels + Cost(peak_bytes=peak)


def _channels_first_cost(problem: Problem, structure: Structure) -> Cost:
    theta = problem.theta
    heads = 1 if isinstance(theta, Eye | Shared) else theta.size  # different products x Theta_k
    channels = problem.channel_product(theta.expand_flops(), problem.inputs, heads, theta.in_channels,
                                       theta.out_channels, heads * theta.out_channels, products=theta.factors)
    around = structure(theta.out_channels, "synthesis").repeated(1 + (problem.x_grad or problem.theta_grad))
    peak = 0 if isinstance(theta, Eye) else problem.bytes(heads * problem.inputs * theta.out_channels)
    return around if problem.projected else channels + around + Cost(peak_bytes=peak)


def _between_cost(problem: Problem, structure: Structure) -> Cost:
    theta = problem.theta
    if isinstance(theta, EyeBlocks):
        return structure(theta.head_channels, "apply").repeated(1 + problem.x_grad)
    if not isinstance(theta, LowRank | HeadBlocks | Projections):
        return _channels_first_cost(problem, structure)
    groups, dim = theta.groups, theta.head_channels
    inner = problem.channel_product(theta.inner_flops(), problem.inputs, groups, theta.in_channels, dim, groups * dim)
    outer = problem.channel_product(theta.outer_flops(), problem.outputs, theta.size, theta.out_channels, dim,
                                    theta.out_channels, calls=FACTOR_CALLS)
    around = structure(dim, "apply").repeated(1 + (problem.x_grad or problem.theta_grad))
    if problem.projected:
        return around + outer + Cost(peak_bytes=problem.bytes(theta.size * dim * problem.outputs))
    peak = problem.bytes(theta.size * dim * (problem.inputs + problem.outputs))
    return inner + around + outer + Cost(peak_bytes=peak)


_COSTS: dict[str, Callable[[Problem, Structure], Cost]] = {
    "structure_first": _structure_first_cost, "channels_first": _channels_first_cost, "between": _between_cost}


# -- kernels of any basis -----------------------------------------------------------------------------------------

class Primitives(Applied):
    """The basis of the call, with all products computed, by its own primitives."""

    name = "primitives"

    def match(self, problem: Problem) -> bool:
        return True

    def application_cost(self, match: Any, problem: Problem, channels: int, mode: str) -> Cost:
        cost = application(problem.basis, problem.sizes, channels, mode) + rows_gathered(problem.basis, problem.sizes)
        return cost + Cost(calls=NODE_CALLS * (len(list(nodes(problem.basis))) - 1))

    def application(self, match: Any, problem: Problem) -> Application:
        return Application(lambda r, call: call.materialized().apply(r),
                           lambda x, call: call.materialized().analysis(x),
                           lambda r, call: call.materialized().synthesis(r))

    def label(self, path: str) -> str:
        return {"between": "value, apply, output", "structure_first": "analysis, contract",
                "channels_first": "expand, synthesis"}[path]


class OneProduct(Applied):
    """x Theta, for one identity."""

    name, types, before, by_heads = "one product", (Identity,), ("primitives",), False

    def match(self, problem: Problem) -> Weight | None:
        return problem.theta if problem.theta.size == problem.basis.size == 1 else None

    def paths(self, match: Weight, problem: Problem) -> tuple[str, ...]:
        return ("channels_first",)

    def application(self, match: Weight, problem: Problem) -> Application:
        return Application(lambda r, call: r, synthesis=lambda r, call: r.squeeze(-3), single=lambda x, call: x)

    def application_cost(self, match: Weight, problem: Problem, channels: int, mode: str) -> Cost:
        return Cost()

    def cost(self, match: Weight, problem: Problem, path: str) -> Cost:
        return problem.channel_product(match.contract_flops(), problem.inputs, 1, match.in_channels,
                                       match.out_channels, match.out_channels)

    def compile(self, match: Weight, problem: Problem, path: str) -> Run:
        if isinstance(match, Full):
            multiply = product if problem.sizes.nominal else product_for(_numbers(problem), match.out_channels)
            return lambda call: multiply(call.x, call.theta.theta.squeeze(0), call.bias)  # type: ignore[attr-defined]
        return lambda call: call.theta.contract(call.x.unsqueeze(-3), call.bias)


def _numbers(problem: Problem) -> int:
    """Return the count of numbers in x, for the largest call of its class."""
    *entries, channels = problem.x.shape
    return class_volume(entries) * channels


class DenseOperator(Kernel):
    """Phi = sum_k A_k (x) Theta_k as one (M P, N Q) matrix, then x Phi: O(M N P Q) memory. It multiplies the zeros of a
    sparse basis as well, so that a NaN of x reaches every output. Without a request it is used only for `Dense`, where
    no entry is absent, and while the operator is small."""

    name, orders = "dense operator", ("operator_first",)

    def match(self, problem: Problem) -> bool:
        return True

    def automatic(self, match: Any, problem: Problem, path: str) -> bool:
        stored = type(problem.basis) is Dense and not problem.sizes.nominal
        return stored and self.cost(match, problem, path).peak_bytes <= OPERATOR_BYTES

    def cost(self, match: Any, problem: Problem, path: str) -> Cost:
        theta, (inputs, outputs) = problem.theta, (problem.inputs, problem.outputs)
        batch = math.prod(problem.basis.batch_shape)
        operator = inputs * outputs * theta.in_channels * theta.out_channels
        peak = batch * (operator + theta.size * inputs * outputs) * problem.sizes.itemsize
        moved = problem.bytes(inputs * theta.in_channels + outputs * theta.out_channels)
        build = Cost(2 * batch * theta.size * operator, 2 * peak, calls=OPERATOR_CALLS).repeated(1 + problem.theta_grad)
        use = Cost(2 * problem.sizes.batch * operator, peak + moved, calls=CHANNEL_CALLS)
        use = use.repeated(1 + problem.x_grad + problem.theta_grad)
        return build + use + Cost(peak_bytes=peak)

    def compile(self, match: Any, problem: Problem, path: str) -> Run:
        return _by_operator


def _by_operator(call: Call) -> Tensor:
    x, theta, basis = call.x, call.theta, call.materialized()
    a, weight = basis.dense(x.dtype).to(x.device), theta.dense().to(dtype=x.dtype, device=x.device)
    phi = torch.einsum("...kmn,kpq->...mpnq", a, weight)
    outputs, channels = phi.shape[-2:]
    matrix = phi.flatten(-2).flatten(-3, -2)
    return plus((x.flatten(-2).unsqueeze(-2) @ matrix).squeeze(-2).unflatten(-1, (outputs, channels)), call.bias)


for _kernel in (Primitives(), OneProduct(), DenseOperator()):
    register(_kernel)
