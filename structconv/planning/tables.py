"""`Plan`: the chosen path and the table of all paths that were considered, as text and for a notebook."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from html import escape

from structconv.planning.cost import Cost
from structconv.planning.problem import BoundRun, Call, Run

__all__ = ["PLANS", "Candidate", "Plan"]

_HEAD = ("", "path", "kernel", "GFLOP", "MB moved", "MB held", "ms", "measured ms", "")
_FIRST_NUMBER, _MEASURED = 3, 7


@dataclass(frozen=True)
class Candidate:
    """A path that was considered: its cost, its predicted time, why it was rejected, and its time if measured.

    Example:

        >>> from structconv import Conv, Cuboid, Grid
        >>> layer = Conv(Cuboid((3, 3)), 16, 16)
        >>> plan = layer.plan(torch.randn(100, 16), structure=Grid((10, 10)))
        >>> [(candidate.path, candidate.kernel) for candidate in plan.candidates if not candidate.rejected]
        [('operator_first', 'torch.conv')]
    """

    path: str
    kernel: str
    cost: Cost
    seconds: float
    rejected: str = ""
    measured: float | None = None


@dataclass(frozen=True, eq=False)
class Plan:
    """The chosen path of eq. 8 and the function that computes it; `str(plan)` is a table of all paths considered.

    Args:
        run: the call -> y.
        weights: the call -> the entries of the basis, (..., K, E) along edges or (..., K, M, N).
        reason: why it was chosen.
        candidates: every path that applies, the chosen one first.
        problem: the sizes that the plan was made for, in words; it serves all of the same quarter octave.
        parts: plans of the parts of `a | b`, where each has its own.
        served: the key of basis and Theta in the calls that it serves.
        bind: the call of a step -> the function that computes the following steps, or `None`; see `Kernel.bind`.

    Example:

        >>> from structconv import Conv, Cuboid, Grid
        >>> plan = Conv(Cuboid((3, 3)), 16, 16).plan(torch.randn(100, 16), structure=Grid((10, 10)))
        >>> plan.path, plan.kernel, plan.reason
        ('operator_first', 'torch.conv', 'cheapest')
        >>> sorted({candidate.path for candidate in plan.candidates})
        ['channels_first', 'operator_first', 'structure_first']
    """

    run: Run = dataclasses.field(repr=False)
    weights: Run = dataclasses.field(repr=False)
    reason: str
    candidates: tuple[Candidate, ...] = dataclasses.field(repr=False)
    problem: str
    parts: tuple[Plan, ...] = dataclasses.field(default=(), repr=False)
    served: Hashable = dataclasses.field(default=None, repr=False)
    bind: Callable[[Call], BoundRun | None] | None = dataclasses.field(default=None, repr=False)

    @property
    def path(self) -> str:
        """The order of the products."""
        return self.candidates[0].path

    @property
    def kernel(self) -> str:
        """The kernel's name."""
        return self.candidates[0].kernel

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

    def __str__(self) -> str:
        rows = _rows(self)
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [self.problem]
        for row in rows:
            cells = [cell.rjust(width) if _is_number(i, row) else cell.ljust(width)
                     for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
            lines.append("  ".join(cells).rstrip())
        for part in self.parts:
            lines += ["  " + line for line in str(part).splitlines()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head, *rows = _rows(self)
        table = "".join([_html_row("th", head), *(_html_row("td", row) for row in rows)])
        parts = "".join(f'<div style="margin-left: 2em">{part._repr_html_()}</div>' for part in self.parts)
        return f"<p>{escape(self.problem)}</p><table>{table}</table>{parts}"


#: The plans of this process, by the keys of the calls that they serve. A registration clears them.
PLANS: dict[Hashable, Plan] = {}


def _html_row(tag: str, row: tuple[str, ...]) -> str:
    cells = (f'<{tag} style="text-align: {"right" if _is_number(i, row) else "left"}">{escape(cell)}</{tag}>'
             for i, cell in enumerate(row))
    return f"<tr>{''.join(cells)}</tr>"


def _rows(plan: Plan) -> list[tuple[str, ...]]:
    """The head and a row for each candidate; measured times where there are any."""
    rows = [_HEAD, *(_row(candidate, plan.reason) for candidate in plan.candidates)]
    if any(candidate.measured is not None for candidate in plan.candidates):
        return rows
    return [(*row[:_MEASURED], *row[_MEASURED + 1:]) for row in rows]


def _row(candidate: Candidate, reason: str) -> tuple[str, ...]:
    cost = candidate.cost
    numbers = (cost.flops / 1e9, (cost.bytes + cost.gathered) / 1e6, cost.peak_bytes / 1e6, candidate.seconds * 1e3)
    mark = "" if candidate.rejected else "*"
    measured = "" if candidate.measured is None else f"{candidate.measured * 1e3:.3g}"
    return mark, candidate.path, candidate.kernel, *(f"{n:.3g}" for n in numbers), measured, (
        candidate.rejected or reason)


def _is_number(column: int, row: tuple[str, ...]) -> bool:
    return _FIRST_NUMBER <= column < len(row) - 1
