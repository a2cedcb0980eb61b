"""One measured comparison, as a line of JSON and as a row of the table; the means of many."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

__all__ = ["HEADERS", "TEXT_COLUMNS", "Line", "from_json", "means", "row"]

HEADERS = ("case", "phase", "peer", "ours, ms", "peer, ms", "ratio", "memory", "roofline", "error", "note")
#: How many of them are text.
TEXT_COLUMNS = 3


@dataclass(frozen=True, kw_only=True)
class Line:
    """Ours against one peer in one phase of one case; what was not measured or does not apply is `None`.

    Args:
        suite, case, size: which; the sizes in words.
        group: the cases of the suite with which it is averaged, in words.
        phase: "forward" (inference) or "both" (forward, and backward to x and all parameters).
        peer: whose time the ratio has in its numerator; `None` where a kernel is compared with the roofline only.
        ratio: the peer's median time over ours.
        memory_ratio: our peak over the peer's.
        roofline: the least time that the machine's measured rates allow, over ours.
        max_error: max |ours - peer| / max |peer| over outputs and gradients.
        ours_ms, peer_ms: first quartile, median, third quartile.
        ours_peak_mb, peer_peak_mb: memory beyond what is held before, found by `memory_method`.
        edges: E where the case is sparse.
        rounds, repeated: samples of each, and how many rounds were taken again for their spread.
        other_load: cores kept busy by other processes meanwhile.
        overhead_us: our median less the peer's, where a case measures that.
        huge_pages: whether torch was told to put tensors on transparent huge pages.
        note: why something is missing.
        failed: whether the note is an error or a disagreement.
        extra: what only some suites have; its entries are fields of the JSON.
    """

    suite: str
    case: str
    phase: str
    peer: str | None
    ratio: float | None = None
    memory_ratio: float | None = None
    roofline: float | None = None
    max_error: float | None = None
    ours_ms: tuple[float, float, float] | None = None
    peer_ms: tuple[float, float, float] | None = None
    ours_peak_mb: float | None = None
    peer_peak_mb: float | None = None
    memory_method: str | None = None
    size: str = ""
    group: str = ""
    edges: int | None = None
    rounds: int | None = None
    repeated: int | None = None
    other_load: float | None = None
    overhead_us: float | None = None
    huge_pages: bool = False
    note: str = ""
    failed: bool = False
    extra: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """The fields, those of `extra` among them; numbers to six digits."""
        fields = {key: _rounded(value) for key, value in dataclasses.asdict(self).items() if key != "extra"}
        return fields | {key: _rounded(value) for key, value in self.extra.items()}


def from_json(fields: dict[str, Any]) -> Line:
    """The line whose `as_json` this is."""
    own = {entry.name for entry in dataclasses.fields(Line)} - {"extra"}
    known: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value
                             for key, value in fields.items() if key in own}
    return Line(**known, extra={key: value for key, value in fields.items() if key not in own})


def row(line: Line) -> tuple[str, ...]:
    """The line under `HEADERS`."""
    remarks = [line.note] if line.note else []
    if line.overhead_us is not None:
        remarks.append(f"{line.overhead_us:+.1f} us")
    remarks += [f"{key.replace('_', ' ')} " + ", ".join(map(_number, value if isinstance(value, list) else [value]))
                for key, value in line.extra.items()]
    if line.huge_pages:
        remarks.append("huge pages")
    edges = f" at {line.edges:,}" if "ns_per_edge" in line.extra else ""
    return (f"{line.suite}/{line.case}{edges}", line.phase, line.peer or "-", _milliseconds(line.ours_ms),
            _milliseconds(line.peer_ms), _number(line.ratio, "x"), _number(line.memory_ratio, "x"),
            "" if line.roofline is None else f"{100 * line.roofline:.0f}%",
            "" if line.max_error is None else f"{line.max_error:.0e}", ", ".join(remarks))


def means(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The geometric mean of the ratios of each suite, of each of its phases, and of each peer, group and phase.

    `below_one` names the lines whose peer is faster. `slower` names those of them in which it is in each measurement,
    also of tensors and layers made anew, by more than it differs from a copy of itself: the median of all, which is
    named, lies below each ratio of the peer to its copy. Lines whose numbers were not compared do not count.
    """
    compared = [line for line in lines if line.ratio is not None and line.max_error is not None]
    groups: dict[tuple[str, str, str, str], list[Line]] = {}
    for level in (lambda line: ("all", "", ""), lambda line: ("all", "", line.phase),
                  lambda line: (line.peer, line.group, line.phase)):
        for line in compared:
            groups.setdefault((line.suite, *level(line)), []).append(line)
    return [{"suite": suite, "peer": peer, "group": group, "phase": phase, "lines": len(members),
             "geometric_mean": _rounded(statistics.geometric_mean(line.ratio or 0.0 for line in members)),
             "below_one": [_named(line) for line in members if (line.ratio or 0.0) < 1],
             "slower": [_named(replace(line, ratio=middle)) for line in members
                        if max(ratios := [line.ratio or 0.0, *line.extra.get("anew", ())]) < 1
                        and (middle := statistics.median(ratios)) < min(line.extra.get("itself", (1.0,)))]}
            for (suite, peer, group, phase), members in groups.items()]


def _named(line: Line) -> str:
    return f"{line.case}, {line.phase}, {line.peer} {line.ratio:.2f}x"


def _milliseconds(times: tuple[float, float, float] | None) -> str:
    return "" if times is None else f"{times[1]:.3g}"


def _number(value: Any, unit: str = "") -> str:
    if value is None:
        return ""
    if not isinstance(value, float):
        return f"{value}{unit}"
    return f"{value:.0f}{unit}" if value >= 100 else f"{value:.3g}{unit}"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, tuple | list):
        return [_rounded(item) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
