"""Fit the constants of the cost model on this machine: every one of `structconv.planning.fitted`.

    python -m benchmarks.fit [--quick] [--out FILE] [--json]

What a constant compares is timed in turns, in rounds (`benchmarks.experiments`); each round gives it a value for every
case, and the table has the median of all of them beside the present value, with the first and the third quartile.
Everything is forward, in float32, on the CPU. Of one thread (`--quick`, or OMP_NUM_THREADS=1) the processor's time is
taken, which other processes hardly change. The JSON, one object, has the machine, the threads, the versions and the
date, the values, and the seconds that they follow from. No source is changed: a constant is edited by hand.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import peers, rates
from benchmarks.experiments import EXPERIMENTS, Experiment
from structconv.cli import Parser
from structconv.commands.output import print_json
from structconv.commands.table import print_table
from structconv.planning import fitted
from structconv_systems.timing import Times, alternate, clock, quartiles
from structconv_systems.train.progress import progress_for

HEADERS = ("constant", "unit", "present", "fitted", "quartiles", "samples")
#: Rounds of an experiment, and about how many seconds they may take.
QUICK, WHOLE = (3, 1.0), (11, 30.0)
#: Cores in use by others above which a warning is printed.
BUSY = 0.25


class Fit(NamedTuple):
    """A constant and its measured values."""

    name: str
    unit: str
    values: tuple[float, ...]

    @property
    def present(self) -> float:
        """The value in the cost model."""
        return float(getattr(fitted, self.name))

    def as_json(self) -> dict[str, Any]:
        """The fields of the JSON."""
        low, high = quartiles(self.values)
        return {"constant": self.name, "unit": self.unit, "present": self.present,
                "fitted": statistics.median(self.values), "quartiles": [low, high], "samples": len(self.values),
                "seen": list(self.values)}

    def row(self) -> tuple[str, ...]:
        """The line under `HEADERS`."""
        low, high = quartiles(self.values)
        return (self.name, self.unit, f"{self.present:.3g}", f"{statistics.median(self.values):.3g}",
                f"{low:.3g} to {high:.3g}", str(len(self.values)))


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, measure, print; returns the exit code."""
    args = _arguments(argv)
    torch.manual_seed(0)
    fits: list[Fit] = []
    measured: dict[str, dict[str, Times]] = {}
    with progress_for() as progress, torch.no_grad():
        for number, experiment in enumerate(EXPERIMENTS, 1):
            progress.phase(f"[{number}/{len(EXPERIMENTS)}] {experiment.name}")
            times = measured[experiment.name] = timed(experiment, args.quick)
            fits += fits_of(experiment, times)
        progress.phase("rates of the machine")
        result = record(args.quick, fits, measured)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.json:
        print_json(result)
    else:
        _print(result, fits)
    return 0


def timed(experiment: Experiment, quick: bool) -> dict[str, Times]:
    """The times of its works, taken in turns on as many threads as it wants; of one thread alone, its processor's."""
    repeats, seconds = QUICK if quick else WHOLE
    threads = torch.get_num_threads()
    torch.set_num_threads(threads_of(experiment, quick))
    timer = partial(clock, now=time.thread_time) if torch.get_num_threads() == 1 else clock
    try:
        works = experiment.works(quick)
        for work in works.values():  # what imports and sorts at first is no sign of how long a call takes
            work()
        return alternate(works, repeats=repeats, seconds=seconds, timer=timer)
    finally:
        torch.set_num_threads(threads)


def threads_of(experiment: Experiment, quick: bool) -> int:
    """The threads of torch that it is timed on."""
    return 1 if quick else experiment.threads or torch.get_num_threads()


def fits_of(experiment: Experiment, times: dict[str, Times]) -> list[Fit]:
    """The values of an experiment's constants, those of all rounds together."""
    rounds = range(len(next(iter(times.values())).samples))
    values = [experiment.values({name: work.samples[i] for name, work in times.items()}) for i in rounds]
    return [Fit(name, unit, tuple(value for each in values for value in each[name]))
            for name, unit in experiment.units.items()]


def record(quick: bool, fits: Sequence[Fit], measured: dict[str, dict[str, Times]]) -> dict[str, Any]:
    """Return the contents of the JSON file."""
    busy = [work.other_load or 0.0 for times in measured.values() for work in times.values()]
    return {"date": datetime.datetime.now(datetime.UTC).isoformat("T", "seconds"), "quick": quick,
            "machine": {"processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
                        "cores": os.cpu_count(), **rates.summary()},
            "threads": torch.get_num_threads(), "versions": peers.versions(), "other_load": max(busy),
            "constants": [fit.as_json() for fit in fits],
            "experiments": [{"name": each.name, "threads": threads_of(each, quick),
                             "seconds": {name: work.samples for name, work in measured[each.name].items()}}
                            for each in EXPERIMENTS]}


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m benchmarks.fit", description=(__doc__ or "").partition("\n")[0],
                    allow_abbrev=False)
    parser.add_argument("--quick", action="store_true",
                        help="small sizes, three rounds, one thread: rough values in seconds")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON to this file as well")
    parser.add_argument("--json", action="store_true", help="print the JSON instead of the table")
    args = parser.parse_args(argv)
    if args.out is not None and (args.out.is_dir() or not os.access(args.out.parent, os.W_OK | os.X_OK)):
        parser.error(f"--out must be a file in a folder that exists and can be written; got {args.out}")
    return args


def _print(result: dict[str, Any], fits: Sequence[Fit]) -> None:
    print_table(HEADERS, [fit.row() for fit in fits], texts=2)
    machine = result["machine"]
    print(f"{machine['processor']}, {result['threads']} threads of {machine['cores']} cores; torch "
          f"{result['versions']['torch']}; {result['date']}")
    if result["other_load"] > BUSY:
        print(f"Other processes kept up to {result['other_load']:.1f} cores busy meanwhile: measure again on a quiet "
              "machine.")


if __name__ == "__main__":
    sys.exit(main())
