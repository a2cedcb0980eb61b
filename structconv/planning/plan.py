"""`Plan`: in which order (1) is computed, by which kernel, and why; and the lookup that finds one.

Plans are made from shapes and remembered by them. While `torch.compile` or `torch.export` trace, nothing is
remembered and every number of entries is taken for a nominal one: the choice then depends on what is static (K, P, Q
and D), and the traced program holds for any number of entries.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv.bases.base import Basis
from structconv.errors import ConfigError
from structconv.planning import tuning
from structconv.planning.cost import Cost
from structconv.planning.counts import Sizes
from structconv.planning.machine import rates
from structconv.planning.rules import Problem, Rule, rules_for
from structconv.planning.signature import coarse, signature, token
from structconv.planning.tuning import Autotuning
from structconv.theta import Theta, wants_grad

__all__ = ["MEMO_SIZE", "Candidate", "Plan", "decide", "plan_for", "signature"]

_grad_enabled = torch.is_grad_enabled
#: Plans remembered before the memo starts anew.
MEMO_SIZE = 4096
_MEMO: dict[Hashable, Plan] = {}
#: Plans by the objects that they were asked for, with what reads which of Theta's tensors want a gradient, and what
#: it read then.
_RECENT: dict[Hashable, tuple[weakref.ref[Basis], weakref.ref[Theta], Callable[[Any], Any], Any, Plan]] = {}


@dataclass(frozen=True)
class Candidate:
    """A path that was weighed: its cost, its predicted time, why it was left, if it was, and its time if measured."""

    path: str
    kernel: str
    cost: Cost
    seconds: float
    rejected: str = ""
    measured: float | None = None


@dataclass(frozen=True)
class Plan:
    """A choice among the paths of (1); `str(plan)` is a table of all that were weighed.

    Args:
        rule: what runs.
        reason: why it was chosen.
        candidates: every path that applies, the chosen one first.
        problem: the sizes that the plan was made for, in words.
        parts: plans of the parts of `a | b`, where each has its own.
    """

    rule: Rule = dataclasses.field(repr=False)
    reason: str
    candidates: tuple[Candidate, ...] = dataclasses.field(repr=False)
    problem: str
    parts: tuple[Plan, ...] = dataclasses.field(default=(), repr=False)

    @property
    def path(self) -> str:
        """The order of the products."""
        return self.rule.path

    @property
    def kernel(self) -> str:
        """What computes them."""
        return self.rule.kernel

    @property
    def cost(self) -> Cost:
        """The predicted cost of the chosen path."""
        return self.candidates[0].cost

    @property
    def seconds(self) -> float:
        """The predicted time of the chosen path."""
        return self.candidates[0].seconds

    @property
    def measured(self) -> float | None:
        """The measured time of the chosen path in seconds, if it was timed."""
        return self.candidates[0].measured

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        """Compute (1) as planned: (..., M, P) -> (..., N, Q)."""
        return self.rule.run(x, basis, theta)

    def biased(self, x: Tensor, basis: Basis, theta: Theta, bias: Tensor | None) -> Tensor:
        """`run`, and b (Q) added where there is one."""
        return self.rule.biased(x, basis, theta, bias)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "path", "kernel", "GFLOP", "MB moved", "MB held", "ms", "measured ms", "")]
        rows += [_row(candidate, self.reason) for candidate in self.candidates]
        if all(candidate.measured is None for candidate in self.candidates):
            rows = [(*row[:7], row[8]) for row in rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [self.problem, *("  ".join(_aligned(cell, width, i, len(widths) - 1) for i, (cell, width) in
                                           enumerate(zip(row, widths, strict=True))).rstrip() for row in rows)]
        for part in self.parts:
            lines += ["  " + line for line in str(part).splitlines()]
        return "\n".join(lines)


def plan_for(x: Tensor, basis: Basis, theta: Theta, *, path: str | None = None,
             max_bytes: int | None = None) -> Plan:
    """The plan for these shapes: remembered, or made from the rules that apply.

    Args:
        x: (..., M, P).
        path: take this order, whatever it costs.
        max_bytes: drop paths that hold more beside their arguments and result; where all do, the smallest is taken.

    Raises:
        ConfigError: if no rule has this path.
    """
    if is_compiling():
        return decide(_problem(x, basis, theta, max_bytes, nominal=True), path)
    key = (id(basis), id(theta), x.shape, x.dtype, x.device, x.requires_grad, _grad_enabled(), path, max_bytes,
           Autotuning.enabled)
    recent = _RECENT.get(key)
    if recent is not None:
        known_basis, known_theta, grads, wanted, plan = recent
        if known_basis() is basis and known_theta() is theta and grads(theta) == wanted:
            return plan
    made, grads = _remembered(x, basis, theta, path, max_bytes), _grads_of(theta)
    if len(_RECENT) >= MEMO_SIZE:
        _RECENT.clear()
    _RECENT[key] = weakref.ref(basis), weakref.ref(theta), grads, grads(theta), made
    return made


def _remembered(x: Tensor, basis: Basis, theta: Theta, path: str | None, max_bytes: int | None) -> Plan:
    """The plan made before for these shapes, whatever the objects, or a new one."""
    grad, tuned = torch.is_grad_enabled(), Autotuning.enabled
    key = (token(basis), token(theta), x.shape, x.dtype, x.device, grad and x.requires_grad,
           grad and wants_grad(theta), path, max_bytes, tuned)
    known = _MEMO.get(key)
    if known is None:
        if len(_MEMO) >= MEMO_SIZE:
            _MEMO.clear()
        shapes = (coarse(signature(basis)), coarse(x.shape[:-1]), signature(theta), x.shape[-1], *key[3:-1])
        problem = _problem(x, basis, theta, max_bytes, nominal=False)
        known = _MEMO[key] = decide(problem, path, shapes if tuned else None)
    return known


def _grads_of(theta: Theta) -> Callable[[Any], Any]:
    """What reads from Theta which of its tensors want a gradient; tensors within its parts are asked one by one."""
    fields = vars(theta).values()
    if theta.tensors and all(isinstance(field, Tensor) for field in fields):
        return attrgetter(*(f"{name}.requires_grad" for name in vars(theta)))
    return wants_grad


def decide(problem: Problem, path: str | None = None, key: Hashable = None) -> Plan:
    """Weigh the rules that apply to a problem and choose the cheapest; see `plan_for`.

    With `key`, the class of the problem, those within `tuning.LIMIT` of the cheapest are timed, and the fastest taken.
    """
    weighed = _weigh(problem, path)
    asked = [w for w in weighed if path is None or w.rule.path == path]
    allowed = [w for w in asked if w.rule.unasked(problem)] or asked
    fitting = [w for w in allowed if problem.max_bytes is None or w.cost.peak_bytes <= problem.max_bytes]
    chosen = _least(fitting, [w.seconds for w in fitting]) if fitting else _smallest(allowed)
    if torch.compiler.is_compiling():
        return Plan(chosen.rule, "", (_candidate(chosen, ""),), "")
    times: tuning.Seconds = {}
    if key is not None:
        survivors = [w for w in fitting if w.seconds <= tuning.LIMIT * chosen.seconds]
        times = tuning.measured(problem, [w.rule for w in survivors], key) if len(survivors) > 1 else {}
        chosen = _least(survivors, [_time(w, times) for w in survivors]) if times else chosen
    reason = "asked for" if path is not None else "cheapest" if fitting else "smallest; all hold more than max_bytes"
    others = sorted((w for w in weighed if w is not chosen), key=lambda w: w.seconds)
    left = [_candidate(w, _rejection(w, chosen, problem, path, times), times) for w in others]
    return Plan(chosen.rule, "measured" if times else reason, (_candidate(chosen, "", times), *left), _words(problem),
                chosen.rule.parts(problem))


def _problem(x: Tensor, basis: Basis, theta: Theta, max_bytes: int | None, nominal: bool) -> Problem:
    batch = 1
    if not nominal:
        for size in torch.broadcast_shapes(x.shape[:-2], basis.batch_shape):
            batch *= size
    grad = torch.is_grad_enabled()
    return Problem(basis, theta, Sizes(batch, x.dtype.itemsize, nominal), x, grad and x.requires_grad,
                   grad and wants_grad(theta), max_bytes)


class _Weighed(NamedTuple):
    """A rule, its cost, and its predicted time."""

    rule: Rule
    cost: Cost
    seconds: float


def _weigh(problem: Problem, path: str | None) -> list[_Weighed]:
    basis = problem.basis
    rules = [r for r in rules_for(type(basis)) if r.applies(basis, problem.theta, problem.x)]
    if path is not None:
        _check_path(path, rules, basis)
    machine, costs = rates(problem.x.device), [r.cost(problem) for r in rules]
    return [_Weighed(r, cost, cost.seconds(machine, problem.sizes.itemsize))
            for r, cost in zip(rules, costs, strict=True)]


def _least(weighed: list[_Weighed], measures: list[float]) -> _Weighed:
    """The first with the least measure, found in a loop that compilers can trace."""
    best = 0
    for i in range(1, len(weighed)):
        if measures[i] < measures[best]:
            best = i
    return weighed[best]


def _smallest(weighed: list[_Weighed]) -> _Weighed:
    return _least(weighed, [w.cost.peak_bytes for w in weighed])


def _time(weighed: _Weighed, times: tuning.Seconds) -> float:
    return times.get(tuning.label(weighed.rule), float("inf"))


def _check_path(path: str, rules: list[Rule], basis: Basis) -> None:
    known = sorted({r.path for r in rules})
    if path not in known:
        raise ConfigError("plan", f"path must be one of {', '.join(map(repr, known))} for {type(basis).__name__}",
                          repr(path))


def _candidate(weighed: _Weighed, rejected: str, times: tuning.Seconds | None = None) -> Candidate:
    measured = None if times is None else times.get(tuning.label(weighed.rule))
    return Candidate(weighed.rule.path, weighed.rule.kernel, weighed.cost, weighed.seconds, rejected, measured)


def _rejection(weighed: _Weighed, chosen: _Weighed, problem: Problem, path: str | None,
               times: tuning.Seconds) -> str:
    rule, cost, seconds = weighed
    if path is not None and rule.path != path:
        return "not asked for"
    if path is None and not rule.unasked(problem):
        return "only on request"
    if problem.max_bytes is not None and cost.peak_bytes > problem.max_bytes:
        return f"over max_bytes={problem.max_bytes}"
    if tuning.label(rule) in times:
        return f"{_time(weighed, times) / _time(chosen, times):.3g}x measured"
    return f"{seconds / chosen.seconds:.3g}x" if chosen.seconds else "not cheaper"


def _words(problem: Problem) -> str:
    basis, theta, x = problem.basis, problem.theta, problem.x
    grads = [name for name, wanted in (("x", problem.x_grad), ("theta", problem.theta_grad)) if wanted]
    phase = f"forward and backward to {' and '.join(grads)}" if grads else "forward"
    return (f"{type(basis).__name__} (K={basis.size}, M={basis.num_inputs}, N={basis.num_outputs}), {theta!r}, "
            f"x {tuple(x.shape)} {str(x.dtype).removeprefix('torch.')} on {x.device}, {phase}")


def _row(candidate: Candidate, reason: str) -> tuple[str, ...]:
    cost = candidate.cost
    numbers = (cost.flops / 1e9, (cost.bytes + cost.gathered) / 1e6, cost.peak_bytes / 1e6, candidate.seconds * 1e3)
    mark = "" if candidate.rejected else "*"
    measured = "" if candidate.measured is None else f"{candidate.measured * 1e3:.3g}"
    texts = (f"{n:.3g}" for n in numbers)
    return mark, candidate.path, candidate.kernel, *texts, measured, candidate.rejected or reason


def _aligned(cell: str, width: int, column: int, last: int) -> str:
    return cell.rjust(width) if 3 <= column < last else cell.ljust(width)
