"""A run of the benchmark: which cases, at which sizes, with and without huge pages, and what is printed."""

from __future__ import annotations

import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks import memory, peers, rates
from benchmarks.case import Case
from benchmarks.plot import SIZES, draw
from benchmarks.records import HEADERS, TEXT_COLUMNS, Line, from_json, means, row
from benchmarks.runner import HUGE_PAGES, Probe, Settings, run
from benchmarks.suites import SUITES, cases
from structconv.commands.output import print_json
from structconv.commands.table import print_table
from structconv.errors import ConfigError
from structconv.primitives.memory import keep_memory

__all__ = ["Session", "execute"]

#: Edges beyond which the quick run does not sweep.
_QUICK_SWEEP = 100_000
#: Cores in use by others above which a warning is printed.
_BUSY = 0.25
#: Fields of the JSON that describe the run and not the comparison.
_RUN_FIELDS = ("machine", "versions")


@dataclass(frozen=True, kw_only=True)
class Session:
    """The options of a session.

    Args:
        suites, patterns: names of suites, all where there are none, and of cases, where "*" and "?" stand for any.
        settings: how to measure.
        threads: of torch; as it is where absent.
        plot: where to draw the sweep over sizes; without it there is none.
        pages: "off", "on" or "both": whether tensors lie on transparent huge pages.
        as_json: print an object a line instead of a table.
        keep_memory: keep freed memory of large results during the run, by `structconv.keep_memory()`.
    """

    suites: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ("*",)
    settings: Settings = field(default_factory=Settings)
    threads: int | None = None
    plot: Path | None = None
    pages: str = "off"
    as_json: bool = False
    keep_memory: bool = False

    def chosen(self) -> list[Case | Probe]:
        """The cases; in a quick run the headline ones, unless a pattern names a case in full."""
        listed = [case for suite in self.suites or SUITES for case in cases(suite)]
        for pattern in self.patterns:
            if not fnmatch.filter([case.name for case in listed], pattern):
                raise ConfigError("benchmarks", "--case must match a case of the suites", repr(pattern),
                                  "python -m benchmarks --list shows them.")
        result = [case for case in listed if any(fnmatch.fnmatch(case.name, pattern) for pattern in self.patterns)
                 and (case.headline or not self.settings.quick or case.name in self.patterns)]
        if not result:
            raise ConfigError("benchmarks", "--case must match a headline case in a quick run",
                              ", ".join(map(repr, self.patterns)), "Name it in full, or leave --quick out.")
        return result

    def sizes(self, case: Case | Probe) -> tuple[int | None, ...]:
        """The numbers of edges to run a case at; `None` is its own."""
        if self.plot is None or not case.swept:
            return (None,)
        return tuple(size for size in SIZES if not self.settings.quick or size <= _QUICK_SWEEP)

    def arguments(self) -> list[str]:
        """The command line of the same run in another process, as JSON and without the plot."""
        words = [word for suite in self.suites for word in ("--suite", suite)]
        words += [word for pattern in self.patterns for word in ("--case", pattern)] + ["--json"]
        words += ["--quick"] if self.settings.quick else []
        words += ["--keep-memory"] if self.keep_memory else []
        for flag, value in (("--repeats", self.settings.repeats), ("--seconds", self.settings.seconds),
                            ("--threads", self.threads)):
            words += [flag, str(value)] if value is not None else []
        return [*words, "--huge-pages", "off", *(["--sweep"] if self.plot is not None else [])]


def execute(session: Session) -> int:
    """Run, print, draw; 1 where a peer disagreed or stopped with an error, else 0."""
    if session.threads is not None:
        torch.set_num_threads(session.threads)
    if session.keep_memory:
        keep_memory()
    lines: list[Line] = []
    try:
        for line in _lines(session):
            lines.append(line)
            if session.as_json:
                print_json(line.as_json() | ({} if "machine" in line.extra else {
                    "machine": rates.summary(), "versions": peers.versions()}))
    except KeyboardInterrupt:
        _show(session, lines)
        raise
    _show(session, lines)
    return int(any(line.failed for line in lines))


def _show(session: Session, lines: Sequence[Line]) -> None:
    """The table and the picture of what has been measured, the whole run or as far as it came."""
    if session.as_json:
        print_json({"means": means(lines)})
    elif lines:
        _print(lines)
    if lines and session.plot is not None and session.plot.suffix:
        draw(session.plot, [_bare(line) for line in lines])
        print(f"drawn: {session.plot}", file=sys.stderr)


def _lines(session: Session) -> Iterator[Line]:
    if session.pages in ("off", "both"):
        for case in session.chosen():
            for edges in session.sizes(case):
                name = f"{case.suite}/{case.name}" + (f" at {edges:,} edges" if edges else "")
                print(name, file=sys.stderr, flush=True)
                yield from run(case, session.settings, edges)
    if session.pages in ("on", "both"):
        session.chosen()
        yield from _elsewhere(session)


def _elsewhere(session: Session) -> Iterator[Line]:
    """Run it in a process whose tensors lie on huge pages: torch reads the setting once, when it first allocates."""
    command = [sys.executable, "-m", "benchmarks", *session.arguments()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, HUGE_PAGES: "1"}) as child:
        assert child.stdout is not None
        for text in child.stdout:
            if "means" not in (fields := json.loads(text)):
                yield from_json(fields)
    if child.returncode not in (0, 1):
        raise RuntimeError(f"the run with huge pages ended with code {child.returncode}")


def _bare(line: Line) -> Line:
    """A line without what describes the run."""
    for name in _RUN_FIELDS:
        line.extra.pop(name, None)
    return line


def _print(lines: Sequence[Line]) -> None:
    """The comparisons, sizes of the cases, means, and where it was. Single configurations are in the JSON only."""
    shown = [_bare(line) for line in lines if line.failed or "chosen" not in line.extra]
    print_table(HEADERS, [row(line) for line in shown], title="Ratio: the peer's time over ours. Memory: our peak over "
                "the peer's. Roofline: the least possible time over ours.", texts=TEXT_COLUMNS)
    sizes = {f"{line.suite}/{line.case}": line.size for line in shown}
    print_table(("case", "size"), list(sizes.items()), texts=2)
    _print_means(means(lines))
    _print_environment(lines)


def _print_means(groups: Sequence[dict[str, Any]]) -> None:
    print_table(("suite", "peer", "group", "phase", "lines", "geometric mean", "below 1", "slower"),
                [(*(mean[key] for key in ("suite", "peer", "group", "phase")), str(mean["lines"]),
                  f"{mean['geometric_mean']:.3g}x", str(len(mean["below_one"])), str(len(mean["slower"])))
                 for mean in groups],
                title="The geometric means of the ratios.", texts=4)
    for mean in groups:
        if mean["peer"] == "all" and not mean["phase"] and mean["below_one"]:
            print(f"below 1 in {mean['suite']}: {'; '.join(mean['below_one'])}")
            print("of which also with tensors and layers made anew, by more than the peer differs from its copy: "
                  f"{'; '.join(mean['slower']) or 'none'}")


def _print_environment(lines: Sequence[Line]) -> None:
    result = rates.summary()
    print(f"{result['threads']} threads; copies {result['copy_gbs']} GB/s, gathers of 256-byte rows "
          f"{result['gather_gbs']} GB/s, matrix products {result['gflops']} GFLOP/s")
    print(", ".join(f"{name} {version}" for name, version in peers.versions().items())
          + f"; memory by {memory.method()}")
    busy = max((line.other_load or 0.0 for line in lines), default=0.0)
    if busy > _BUSY:
        print(f"Other processes kept up to {busy:.1f} cores busy meanwhile: measure again on a quiet machine.")
    for line in lines:
        if line.failed:
            print(f"failed: {line.suite}/{line.case}, {line.phase}, {line.peer}: {line.note}")
