"""Parts that read inputs of their own, joined before the one product with Theta."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from structconv.bases.mixture import Mixture
from structconv.kernels.composite import cheapest, part_of
from structconv.kernels.orders import Application
from structconv.planning.cost import Cost
from structconv.planning.kernel import Kernel, register
from structconv.planning.problem import Call, PartInputs, Problem, Run
from structconv.primitives.products import product
from structconv.shapes import broadcast
from structconv.weights import Full, MixtureWeights

__all__ = ["JoinedInputs"]


class Joined(NamedTuple):
    """The application of each part of a mixture, and its cost."""

    applications: tuple[Application, ...]
    cost: Cost

    def rows(self) -> Run:
        """(call) -> [A_1^T x_1, A_2^T x_2, ...], (..., N, P_1 + P_2 + ...)."""
        ways = [applied.rows() for applied in self.applications]

        def joined(call: Call) -> Tensor:
            own = [part_of(call, number) for number in range(len(ways))]
            parts = [way(one.x, one) for way, one in zip(ways, own, strict=True)]
            lead = broadcast(*(rows.shape[:-2] for rows in parts))
            return torch.cat([rows.expand(*lead, *rows.shape[-2:]) for rows in parts], -1)

        return joined


class JoinedInputs(Kernel):
    """[A_1^T x_1, A_2^T x_2, ...] [Theta_1; Theta_2; ...] for parts of K = 1: right where the P_i are small."""

    name, types, orders, separate = "rows of all parts, joined", (Mixture,), ("structure_first",), True

    def match(self, problem: Problem) -> Joined | None:
        thetas, xs = cast(MixtureWeights, problem.theta).parts, cast(PartInputs, problem.x).parts
        if not all(isinstance(theta, Full) and theta.size == 1 for theta in thetas):
            return None
        own = [problem.part(*part) for part in zip(cast(Mixture, problem.basis).parts, thetas, xs, strict=True)]
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
        return lambda call: tuple(of(part_of(call, number)) for number, of in enumerate(functions))  # type: ignore[return-value]


register(JoinedInputs())
