"""The planner's choice against every path that it could have taken, over random configurations.

A line a configuration: the peer is the fastest path, the ratio its time over that of the path taken under
`planning.autotune` (at most 1), and `regret` the inverse; `predicted_regret` is that of the path which predicted costs
alone choose. The last line of a case sums up: the share of configurations within 10% of the best, and the mean regret,
both ways. What is measured is remembered in a folder of its own, and forgotten.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from unittest import mock

import torch
from torch import Tensor

from benchmarks.case import BOTH, FORWARD
from benchmarks.graphs import power_law
from benchmarks.records import Line
from benchmarks.runner import Probe, Settings, huge_pages, milliseconds, timed
from structconv.bases import Dense, Polynomial, Sparse
from structconv.bases.base import Basis
from structconv.planning.counts import Sizes
from structconv.planning.kernel import matching
from structconv.planning.machine import rates
from structconv.planning.plan import Plan, plan_for
from structconv.planning.problem import Call, Problem, Run
from structconv.planning.tuning import autotune
from structconv.primitives.native.loader import core
from structconv.weights import Full, LowRank, Separable, Weight
from structconv_systems.timing import alternate, clock

__all__ = ["CASES", "configuration_line", "summary"]

#: Of the configurations: the figures are for others than those that the constants of costs were fitted to.
SEED = "held out"
#: A path predicted to take this many times the chosen one's time is not run, and one that took this many times the
#: fastest when it ran once, warm, is not timed.
_HOPELESS, _LOST = 30.0, 3.0
_CONFIGURATIONS = {True: 6, False: 100}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """x, a basis and Theta, drawn at random."""

    words: str
    phase: str
    x: Tensor
    basis: Basis
    theta: Weight

    def call(self) -> Call:
        """The call of a plan."""
        return Call(self.x, self.basis, self.theta)

    def leaves(self) -> list[Tensor]:
        """The tensors that get a gradient."""
        return [tensor for tensor in (self.x, *self.theta.tensors) if tensor.requires_grad]


def _measure(kind: str, settings: Settings) -> Iterator[Line]:
    result = []
    for number in range(_CONFIGURATIONS[settings.quick]):
        result.append(configuration_line(kind, number, settings))
        yield result[-1]
    yield summary(kind, result)


def configuration_line(kind: str, number: int, settings: Settings) -> Line:
    """One configuration; each has a seed of its own, so that any of them can be measured alone."""
    draw = random.Random(f"{SEED} {kind} {number}")
    torch.manual_seed(number)
    return _line(f"{kind}-{number:03}", _DRAWS[kind](draw, settings.quick, BOTH if number % 2 else FORWARD), settings)


def summary(kind: str, lines: Sequence[Line]) -> Line:
    """The line that sums up."""
    def shares(name: str, prefix: str) -> dict[str, float]:
        regrets = [line.extra[name] for line in lines]
        return {name: sum(regrets) / len(regrets),
                f"{prefix}within_10_percent": sum(regret <= 1.1 for regret in regrets) / len(regrets)}

    extra = shares("regret", "") | shares("predicted_regret", "predicted_")
    words = (f"{len(lines)} configurations; within 10%: {extra['within_10_percent']:.0%} measured, "
             f"{extra['predicted_within_10_percent']:.0%} predicted; mean regret {extra['regret']:.3f}, "
             f"{extra['predicted_regret']:.3f}")
    return Line(suite="planner", case=kind, phase=BOTH, peer="best path", ratio=1 / extra["regret"], size=words,
                huge_pages=huge_pages(), extra=extra)


def _line(name: str, config: Configuration, settings: Settings) -> Line:
    """The chosen paths and the others, timed in turns."""
    with torch.set_grad_enabled(config.phase == BOTH):
        with autotune(False):
            predicted = _label(plan_for(config.call()))
        with _own_memory(), autotune():
            chosen = _label(plan_for(config.call()))
        works = {label: _work(config, run) for label, run in _worthwhile(config, predicted, chosen).items()}
        results = {label: work() for label, work in works.items()}
        error = _error(results, chosen)
        once = {label: clock(work, 1) for label, work in works.items()}
        close = {label: work for label, work in works.items()
                 if once[label] <= _LOST * min(once.values()) or label in (predicted, chosen)}
        times = alternate(close, repeats=min(settings.rounds, 7), seconds=0.4 if settings.quick else 2.0, known=once)
    best = min(times, key=lambda label: times[label].median)
    own, least = times[chosen], times[best].median
    return Line(suite="planner", case=name, phase=config.phase, peer=best, size=config.words, max_error=error,
                ratio=least / own.median, peer_ms=milliseconds(times[best]), huge_pages=huge_pages(), **timed(own),
                failed=not error < 1e-3, note="" if error < 1e-3 else "paths disagree",
                extra={"regret": own.median / least, "chosen": chosen,
                       "predicted_regret": times[predicted].median / least, "predicted": predicted,
                       "worst": max(once.values()) / least})


@contextlib.contextmanager
def _own_memory() -> Iterator[None]:
    """Store measured plans in another folder, so that none is reused and the user's stay as they are."""
    rates("cpu")
    core()  # rates and kernels are those of the user's folder
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"STRUCTCONV_CACHE": folder}):
        yield


def _worthwhile(config: Configuration, predicted: str, chosen: str) -> dict[str, Run]:
    """The paths that the planner may take, without those predicted to lie far beyond the one that costs choose."""
    batch, grad, call = math.prod(config.x.shape[:-2]), config.phase == BOTH, config.call()
    sizes = Sizes(batch, config.x.dtype.itemsize)
    problem = Problem(call.spec(), config.theta, config.x, sizes, grad, grad)
    seconds, runs = dict[str, float](), dict[str, Run]()
    for kernel, match, path in matching(problem):
        if kernel.automatic(match, problem, path):
            label = f"{path} ({kernel.label(path)})"
            seconds[label] = kernel.cost(match, problem, path).seconds(rates("cpu"), sizes.itemsize)
            runs[label] = kernel.compile(match, problem, path)
    limit = _HOPELESS * seconds[predicted]
    return {label: run for label, run in runs.items() if label == chosen or seconds[label] <= limit}


def _work(config: Configuration, run: Run) -> Callable[[], Tensor]:
    call, leaves = config.call(), config.leaves()
    if config.phase == FORWARD:
        return lambda: run(call)

    def both() -> Tensor:
        y = run(call)
        return torch.autograd.grad(y, leaves, torch.ones_like(y))[0]

    return both


def _error(results: dict[str, Tensor], reference: str) -> float:
    """The largest difference from the chosen path's result, over its largest entry."""
    expected = results[reference].detach()
    top = expected.abs().max().clamp(min=1e-30)
    return max(float((result.detach() - expected).abs().max() / top) for result in results.values())


def _label(plan: Plan) -> str:
    return f"{plan.path} ({plan.kernel})"


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
    theta: Weight = Full.of(numbers(size, p, q))
    if kind == "separable":
        rank = min(rank, 4)
        theta = Separable.of(numbers(size, rank), numbers(rank, p, q))
    elif kind == "low rank":
        theta = LowRank.of(numbers(size, p, rank), numbers(size, rank, q))
    shape = (batch, basis.num_inputs, p) if batch > 1 else (basis.num_inputs, p)
    rank_words = "" if kind == "full" else f" {rank}"
    return Configuration(x=torch.randn(shape).requires_grad_(grad), basis=basis, theta=theta, phase=phase,
                         words=f"{words}, B={batch}, {kind}{rank_words}, {p} to {q}")


def _between(draw: random.Random, low: int, high: int) -> int:
    """An integer whose logarithm is uniform."""
    return round(math.exp(draw.uniform(math.log(low), math.log(high))))


_DRAWS = {"dense": _dense, "sparse": _sparse}
CASES = tuple(Probe(suite="planner", name=kind, measure=partial(_measure, kind)) for kind in _DRAWS)
