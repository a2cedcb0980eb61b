"""`Plan`: in which order (1) is computed, by which kernel, and why; and the lookup that finds one.

Plans are made from shapes and remembered by them. While `torch.compile` or `torch.export` trace, nothing is
remembered and every number of entries is taken for a nominal one: the choice then depends on what is static (K, P, Q
and D), and the traced program holds for any number of entries.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from structconv.bases.base import Basis
from structconv.errors import ConfigError
from structconv.planning.cost import Cost
from structconv.planning.counts import Sizes
from structconv.planning.machine import rates
from structconv.planning.rules import Problem, Rule, rules_for
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid
from structconv.theta import Theta

#: Plans remembered before the memo starts anew.
MEMO_SIZE = 4096
_MEMO: dict[Hashable, Plan] = {}


@dataclass(frozen=True)
class Candidate:
    """A path that was weighed: its cost, its predicted time, and why it was left, if it was."""

    path: str
    kernel: str
    cost: Cost
    seconds: float
    rejected: str = ""


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

    def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
        """Compute (1) as planned: (..., M, P) -> (..., N, Q)."""
        return self.rule.run(x, basis, theta)

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("", "path", "kernel", "GFLOP", "MB moved", "MB held", "ms", "")]
        rows += [_row(candidate, self.reason) for candidate in self.candidates]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [self.problem, *("  ".join(_aligned(cell, width, i) for i, (cell, width) in
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
    if torch.compiler.is_compiling():
        return decide(_problem(x, basis, theta, max_bytes, nominal=True), path)
    grad = torch.is_grad_enabled()
    key = (signature(basis), signature(theta), x.shape, x.dtype, x.device.type, grad and x.requires_grad,
           grad and any(t.requires_grad for t in theta.tensors), path, max_bytes)
    known = _MEMO.get(key)
    if known is None:
        if len(_MEMO) >= MEMO_SIZE:
            _MEMO.clear()
        known = _MEMO[key] = decide(_problem(x, basis, theta, max_bytes, nominal=False), path)
    return known


def decide(problem: Problem, path: str | None = None) -> Plan:
    """Weigh the rules that apply to a problem and choose the cheapest; see `plan_for`."""
    basis, theta = problem.basis, problem.theta
    rules = [r for r in rules_for(type(basis)) if r.applies(basis, theta, problem.x)]
    if path is not None:
        _check_path(path, rules, basis)
    machine = rates(problem.x.device)
    weighed = []
    for r in rules:
        cost = r.cost(problem)
        weighed.append((r, cost, cost.seconds(machine, problem.sizes.itemsize)))
    asked = [w for w in weighed if path is None or w[0].path == path]
    allowed = [w for w in asked if w[0].unasked(problem)] or asked
    fitting = [w for w in allowed if problem.max_bytes is None or w[1].peak_bytes <= problem.max_bytes]
    chosen = _least(fitting, 2) if fitting else _least(allowed, 1)
    if torch.compiler.is_compiling():
        return Plan(chosen[0], "", (_candidate(chosen, ""),), "")
    reason = "asked for" if path is not None else "cheapest" if fitting else "smallest; all hold more than max_bytes"
    others = sorted((w for w in weighed if w is not chosen), key=lambda w: w[2])
    left = [_candidate(w, _rejection(w, chosen, problem, path)) for w in others]
    return Plan(chosen[0], reason, (_candidate(chosen, ""), *left), _words(problem), chosen[0].parts(problem))


def signature(value: Any) -> Hashable:
    """The shapes and types that a plan for a basis may depend on, as a key. O(nodes of the expression)."""
    if isinstance(value, Tensor):
        return value.shape
    if isinstance(value, Graph):
        return value.num_edges, value.num_inputs, value.num_outputs
    if isinstance(value, Grid | int | str | torch.device):
        return value
    if isinstance(value, tuple):
        return value if _holds_integers(value) else tuple(map(signature, value))
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return kind, *[signature(getattr(value, name)) for name in _field_names(kind)]
    if isinstance(value, Basis):
        return kind, value.size, value.num_inputs, value.num_outputs, value.batch_shape
    return str(getattr(value, "__qualname__", kind))


def _holds_integers(value: tuple[Any, ...]) -> bool:
    """Whether a tuple is one of integers or of tuples of integers (offsets, strides), judged by its first item."""
    while value and isinstance(value[0], tuple):
        value = value[0]
    return bool(value) and type(value[0]) is int


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def _problem(x: Tensor, basis: Basis, theta: Theta, max_bytes: int | None, nominal: bool) -> Problem:
    batch = 1
    if not nominal:
        for size in torch.broadcast_shapes(x.shape[:-2], basis.batch_shape):
            batch *= size
    grad = torch.is_grad_enabled()
    return Problem(basis, theta, Sizes(batch, x.dtype.itemsize, nominal), x, grad and x.requires_grad,
                   grad and any(t.requires_grad for t in theta.tensors), max_bytes)


_Weighed = tuple[Rule, Cost, float]


def _least(weighed: list[_Weighed], field: int) -> _Weighed:
    measure: Callable[[_Weighed], float] = (lambda w: w[2]) if field == 2 else (lambda w: w[1].peak_bytes)
    best = weighed[0]
    for other in weighed[1:]:
        if measure(other) < measure(best):
            best = other
    return best


def _check_path(path: str, rules: list[Rule], basis: Basis) -> None:
    known = sorted({r.path for r in rules})
    if path not in known:
        raise ConfigError("plan", f"path must be one of {', '.join(map(repr, known))} for {type(basis).__name__}",
                          repr(path))


def _candidate(weighed: _Weighed, rejected: str) -> Candidate:
    return Candidate(weighed[0].path, weighed[0].kernel, weighed[1], weighed[2], rejected)


def _rejection(weighed: _Weighed, chosen: _Weighed, problem: Problem, path: str | None) -> str:
    rule, cost, seconds = weighed
    if path is not None:
        return "not asked for"
    if not rule.unasked(problem):
        return "only on request"
    if problem.max_bytes is not None and cost.peak_bytes > problem.max_bytes:
        return f"over max_bytes={problem.max_bytes}"
    return f"{seconds / chosen[2]:.3g}x" if chosen[2] else "not cheaper"


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
    return mark, candidate.path, candidate.kernel, *(f"{n:.3g}" for n in numbers), candidate.rejected or reason


def _aligned(cell: str, width: int, column: int) -> str:
    return cell.rjust(width) if 3 <= column <= 6 else cell.ljust(width)
