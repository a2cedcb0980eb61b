"""The planner's choice against every path that it could have taken, over random configurations.

A line a configuration: the peer is the fastest path, the ratio its time over that of the chosen one (at most 1), and
`regret` the inverse. The last line of a case sums up: the share of configurations within 10% of the best, and the
mean regret.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from structconv.bases import Dense, Polynomial, Sparse
from structconv.bases.base import Basis
from structconv.bench.contest import BOTH, FORWARD
from structconv.bench.graphs import power_law
from structconv.bench.records import Line
from structconv.bench.runner import Probe, Settings, huge_pages
from structconv.bench.timing import Times, alternate
from structconv.planning.counts import Sizes
from structconv.planning.machine import rates
from structconv.planning.plan import plan_for
from structconv.planning.rules import Problem, Rule, rules_for
from structconv.theta import FullTheta, LowRankTheta, SeparableTheta, Theta

__all__ = ["CASES"]

#: A path predicted to take this many times the chosen one's time is not timed.
_HOPELESS = 30.0
_CONFIGURATIONS = {True: 6, False: 100}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """x, a basis and Theta, drawn at random."""

    words: str
    phase: str
    x: Tensor
    basis: Basis
    theta: Theta

    def leaves(self) -> list[Tensor]:
        """What gets a gradient."""
        return [tensor for tensor in (self.x, *self.theta.tensors) if tensor.requires_grad]


def _measure(kind: str, settings: Settings) -> Iterator[Line]:
    draw, regrets = random.Random(kind), []
    for number in range(_CONFIGURATIONS[settings.quick]):
        configuration = _DRAWS[kind](draw, settings.quick, BOTH if number % 2 else FORWARD)
        line = _line(f"{kind}-{number:03}", configuration, settings)
        regrets.append(line.extra["regret"])
        yield line
    yield Line(suite="planner", case=kind, phase=BOTH, peer="best path", ratio=len(regrets) / sum(regrets),
               size=f"{len(regrets)} configurations", huge_pages=huge_pages(),
               extra={"regret": sum(regrets) / len(regrets),
                      "within_10_percent": sum(regret <= 1.1 for regret in regrets) / len(regrets)})


def _line(name: str, given: Configuration, settings: Settings) -> Line:
    """The chosen path and the others, timed in turns."""
    with torch.set_grad_enabled(given.phase == BOTH):
        chosen = plan_for(given.x, given.basis, given.theta).rule
        rules = _worthwhile(given, chosen)
        works = {_label(rule): _work(given, rule) for rule in rules}
        results = {label: work() for label, work in works.items()}
        error = _error(results, _label(chosen))
        times = alternate(works, repeats=min(settings.rounds, 5), seconds=0.4 if settings.quick else 3.0)
    best = min(times, key=lambda label: times[label].median)
    own = times[_label(chosen)]
    return Line(suite="planner", case=name, phase=given.phase, peer=best, size=given.words, max_error=error,
                ratio=times[best].median / own.median, ours_ms=_triple(own), peer_ms=_triple(times[best]),
                rounds=len(own.samples), repeated=own.repeated, other_load=own.other_load, huge_pages=huge_pages(),
                failed=not error < 1e-3, note="" if error < 1e-3 else "paths disagree",
                extra={"regret": own.median / times[best].median, "chosen": _label(chosen),
                       "worst": max(t.median for t in times.values()) / times[best].median})


def _worthwhile(given: Configuration, chosen: Rule) -> list[Rule]:
    """The rules that the planner may take, without those far beyond the chosen one."""
    batch = math.prod(given.x.shape[:-2])
    grad = given.phase == BOTH
    problem = Problem(given.basis, given.theta, Sizes(batch, given.x.dtype.itemsize, False), given.x, grad, grad, None)
    machine = rates("cpu")
    seconds = {rule: rule.cost(problem).seconds(machine, 4) for rule in rules_for(type(given.basis))
               if rule.applies(given.basis, given.theta, given.x) and rule.unasked(problem)}
    return [rule for rule, time in seconds.items() if rule is chosen or time <= _HOPELESS * seconds[chosen]]


def _work(given: Configuration, rule: Rule) -> Callable[[], Tensor]:
    if given.phase == FORWARD:
        return lambda: rule.run(given.x, given.basis, given.theta)
    leaves = given.leaves()

    def both() -> Tensor:
        y = rule.run(given.x, given.basis, given.theta)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))[0]

    return both


def _error(results: dict[str, Tensor], reference: str) -> float:
    """The largest difference from the chosen path's result, over its largest entry."""
    wanted = results[reference].detach()
    top = wanted.abs().max().clamp(min=1e-30)
    return max(float((result.detach() - wanted).abs().max() / top) for result in results.values())


def _label(rule: Rule) -> str:
    return f"{rule.path} ({rule.kernel})"


def _triple(times: Times) -> tuple[float, float, float]:
    low, high = times.quartiles
    return 1e3 * low, 1e3 * times.median, 1e3 * high


def _dense(draw: random.Random, quick: bool, phase: str) -> Configuration:
    """A dense (K, M, N) basis."""
    top = 128 if quick else 512
    size, inputs, outputs = _between(draw, 1, 16), _between(draw, 8, top), _between(draw, 8, top)
    basis = Dense(torch.randn(size, inputs, outputs) * inputs**-0.5)
    return _completed(draw, basis, _between(draw, 1, 8), phase, f"dense, K={size}, M={inputs}, N={outputs}",
                      top)


def _sparse(draw: random.Random, quick: bool, phase: str) -> Configuration:
    """An adjacency with random values, or polynomials of one."""
    edges = _between(draw, 1_000, 20_000 if quick else 300_000)
    graph = power_law(edges, max(edges // _between(draw, 2, 40), 16))
    size, matrix = _between(draw, 1, 6), Sparse(graph, torch.rand(edges) / 20)
    basis: Basis = matrix if size == 1 else Polynomial(matrix, size - 1)
    return _completed(draw, basis, 1, phase, f"sparse, K={size}, N={graph.num_nodes}, E={edges}", 256)


def _completed(draw: random.Random, basis: Basis, batch: int, phase: str, words: str, top: int) -> Configuration:
    p, q, size, grad = _between(draw, 4, min(top, 256)), _between(draw, 4, min(top, 256)), basis.size, phase == BOTH

    def numbers(*shape: int) -> Tensor:
        return (torch.randn(shape) * p**-0.5).requires_grad_(grad)

    kind = draw.choice(("full", "separable", "low rank"))
    rank = _between(draw, 1, max(min(p, q) // 2, 1))
    theta: Theta = FullTheta(numbers(size, p, q))
    if kind == "separable":
        rank = min(rank, 4)
        theta = SeparableTheta(numbers(size, rank), numbers(rank, p, q))
    elif kind == "low rank":
        theta = LowRankTheta(numbers(size, p, rank), numbers(size, rank, q))
    shape = (batch, basis.num_inputs, p) if batch > 1 else (basis.num_inputs, p)
    rank_words = "" if kind == "full" else f" {rank}"
    return Configuration(x=torch.randn(shape).requires_grad_(grad), basis=basis, theta=theta, phase=phase,
                         words=f"{words}, B={batch}, {kind}{rank_words}, {p} to {q}")


def _between(draw: random.Random, low: int, high: int) -> int:
    """An integer whose logarithm is uniform."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


_DRAWS = {"dense": _dense, "sparse": _sparse}
CASES = tuple(Probe(suite="planner", name=kind, measure=partial(_measure, kind)) for kind in _DRAWS)
