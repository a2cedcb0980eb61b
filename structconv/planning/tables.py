"""A plan's table of all that were weighed, as text and for a notebook."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structconv.planning.plan import Candidate, Plan

__all__ = ["html", "text"]

_HEAD = ("", "path", "kernel", "GFLOP", "MB moved", "MB held", "ms", "measured ms", "")
_FIRST_NUMBER, _MEASURED = 3, 7


def text(plan: Plan) -> str:
    """The problem in a line, the table, and those of the parts, indented."""
    rows = _rows(plan)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [plan.problem]
    for row in rows:
        cells = [cell.rjust(width) if _is_number(i, row) else cell.ljust(width)
                 for i, (cell, width) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    for part in plan.parts:
        lines += ["  " + line for line in text(part).splitlines()]
    return "\n".join(lines)


def html(plan: Plan) -> str:
    """The same as a table of HTML."""
    head, *rows = _rows(plan)
    table = "".join([_html_row("th", head), *(_html_row("td", row) for row in rows)])
    parts = "".join(f'<div style="margin-left: 2em">{html(part)}</div>' for part in plan.parts)
    return f"<p>{escape(plan.problem)}</p><table>{table}</table>{parts}"


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
