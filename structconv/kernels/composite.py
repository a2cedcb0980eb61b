"""Bases made of others: each part by its own plan."""

from __future__ import annotations

from typing import cast

from torch import Tensor

from structconv.bases.base import Basis
from structconv.bases.linear import Concat
from structconv.planning.cost import Cost
from structconv.planning.plan import Plan, decide, plan_for
from structconv.planning.rules import Problem, Rule, rule
from structconv.theta import Theta, sum_tensors


@rule(Concat, "per_part", kernel="parts, summed")
class PerPart(Rule):
    """y = sum over the parts of `a | b | ...`, each with its slice of Theta and by the path that suits it."""

    def cost(self, problem: Problem) -> Cost:
        total = Cost()
        for basis, theta in _parts(problem.basis, problem.theta):
            part = decide(problem.part(basis, theta)).cost
            result = problem.bytes(problem.outputs * theta.out_channels)
            total = total + part + Cost(bytes=3 * result, peak_bytes=result)
        return total

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        return self.biased(x, basis, theta, None)

    def biased(self, x: Tensor, basis: Basis, theta: Theta, bias: Tensor | None) -> Tensor:
        """b goes to the last part, which may add it in passing."""
        *others, (last, weight) = _parts(basis, theta)
        terms = [plan_for(x, part, own).run(x, part, own) for part, own in others]
        return sum_tensors([*terms, plan_for(x, last, weight).biased(x, last, weight, bias)])

    def parts(self, problem: Problem) -> tuple[Plan, ...]:
        return tuple(decide(problem.part(basis, theta)) for basis, theta in _parts(problem.basis, problem.theta))


def _parts(basis: Basis, theta: Theta) -> list[tuple[Basis, Theta]]:
    pairs, at = [], 0
    for part in cast(Concat, basis).parts:
        pairs.append((part, theta.slice(at, at + part.size)))
        at += part.size
    return pairs
