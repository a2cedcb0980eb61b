"""reproduce: run recipes, several at a time, and compare their results with published ones."""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from structconv.commands.options import no_more
from structconv.commands.output import print_json
from structconv.commands.stop import Stop
from structconv.errors import ConfigError
from structconv_systems.commands.recipes import carried_out, placed
from structconv_systems.recipes.register import RECIPES, Entry, entry_named
from structconv_systems.train.config import resolve, to_json, written
from structconv_systems.train.effect import LEARNED, NOT_SHOWN, ONE_SEED, share_left
from structconv_systems.train.interrupt import EXIT_INTERRUPTED, Interrupt, Interrupted
from structconv_systems.train.options import Measured
from structconv_systems.train.progress import Progress, progress_for
from structconv_systems.train.run import Run

__all__ = ["add", "data_of", "opened", "place_of"]

#: Letters of overrides in a folder's name; longer ones are named by their SHA-256.
_LONGEST = 80


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb."""
    text = "run recipes and compare their results with the published ones"
    parser = verbs.add_parser("reproduce", help=text, description=text, parents=[shared], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="recipes from `structconv list`; key=value sets an option of all of them")
    parser.add_argument("--all", action="store_true",
                        help="run every recipe whose data is in --data, by default with its further data sets")
    parser.add_argument("--data", metavar="DIR", default=None,
                        help="folder of data sets, with one folder each: multi30k, text, ...")
    parser.add_argument("--preset", metavar="NAME", default="default", help="quick, default (default) or paper")
    parser.add_argument("--jobs", metavar="N", type=int, default=None,
                        help="recipes at a time, each in a process of its own (default: as many as the CPU has cores "
                             "for their threads; 1 on other devices)")
    parser.add_argument("--budget", metavar="MINUTES", type=float, default=None,
                        help="leave out recipes that would take longer than the rest of this time")
    parser.add_argument("--out", metavar="DIR", default="runs/reproduce",
                        help="folder of the runs; interrupted runs there are continued (default: runs/reproduce)")
    parser.add_argument("--resume", action="store_true", help="continue interrupted runs in --out, as is the default")
    parser.add_argument("--record", metavar="FILE", default=None,
                        help="JSON file for the outcomes, with a page beside it (default: results.json in --out)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    words = [*args.names, *(word for word in rest if not word.startswith("-"))]
    no_more("reproduce", [word for word in rest if word.startswith("-")])
    overrides = [word for word in words if "=" in word]
    entries = _chosen([word for word in words if "=" not in word], args.all)
    if len(entries) > 1 and any(word.startswith("rates=") for word in overrides):
        raise ConfigError("structconv reproduce", "rates must be of the groups of one recipe",
                          f"{len(entries)} recipes")
    everything = args.all and args.preset == "default" and not overrides
    tasks = [_Task(" ".join([entry.recipe.name, *further]), entry,
                   resolve(entry.recipe, [*data_of(args.data, entry), *overrides, *further], args.preset),
                   [*overrides, *further])
             for entry in entries
             for further in [(), *(cast(type[Measured], entry.recipe).further if everything else ())]]
    if not tasks:
        raise ConfigError("structconv reproduce", "recipes must be named", "none", "Name some, or give --all.")
    if args.budget is not None and not args.budget >= 0:
        raise ConfigError("structconv reproduce", "--budget must be minutes, 0 or more", args.budget)
    if args.jobs is not None and args.jobs < 1:
        raise ConfigError("structconv reproduce", "--jobs must be at least 1", args.jobs)
    from structconv_systems.report.results import check_record

    check_record(_record(args))  # before the trainings, for it is written after them
    progress, began = progress_for(), time.monotonic()
    with progress, Interrupt(progress.note) as interrupt:
        ready, left_out = [], []
        for task in tasks:
            try:
                task.recipe.check()
                ready.append(task)
            except ConfigError as error:
                if not args.all:
                    raise
                left_out.append(task.name)
                progress.note(f"{task.name} is left out: {error}")
        if len(ready) > 1 and args.jobs != 1 and (args.jobs or all(task.recipe.device == "cpu" for task in ready)):
            rows, late = _side_by_side(ready, args, began, interrupt, progress)
        else:
            rows, late = _in_turn(ready, args, began, interrupt, progress)
        left_out = [task.name for task in tasks if task.name in (*left_out, *late)]
    from structconv_systems.report.study import sentence

    if args.json:
        print_json({"outcomes": rows, "left_out": left_out, "minutes": (time.monotonic() - began) / 60})
    else:
        for row in rows:
            learned = row["learned"]
            print(f"{row['recipe']}: {sentence(row)}" + (
                "" if learned is None else f" In training the figure of a step fell to x{learned:.2g}."))
    return 1 if any(_missed(row) for row in rows) else 0


class _Task(NamedTuple):
    name: str
    entry: Entry
    recipe: Any
    overrides: list[str]


def _in_turn(ready: Sequence[_Task], args: argparse.Namespace, began: float, interrupt: Interrupt, progress: Progress
             ) -> tuple[list[dict[str, Any]], list[str]]:
    """Reproduce one recipe after the other; return the outcomes and the names that the budget leaves out."""
    rows, left_out = [], []
    for task in ready:
        left = _left(args, began)
        if left is not None and not (place_of(args.out, task.recipe) / "summary.json").is_file():
            need = _estimate(task, progress)
            if need > left:
                left_out.append(task.name)
                progress.note(f"{task.name} is left out: it takes {need / 60:.1f} min, and {left / 60:.1f} are left")
                continue
        rows.append(_reproduced(task, args, interrupt, progress))
    return rows, left_out


def _left(args: argparse.Namespace, began: float) -> float | None:
    """Seconds left of ``--budget``."""
    return None if args.budget is None else max(60 * args.budget - (time.monotonic() - began), 0.0)


def _side_by_side(ready: Sequence[_Task], args: argparse.Namespace, began: float, interrupt: Interrupt,
                  progress: Progress) -> tuple[list[dict[str, Any]], list[str]]:
    """Reproduce several recipes at a time, each in a process of its own; return the outcomes and the names left out.

    A signal, or the first recipe that fails, makes the others save and stop."""
    rows: dict[str, dict[str, Any]] = {}
    left_out: list[str] = []
    running: list[_Process] = []
    failed: list[_Failed] = []
    waiting, never, stopping = [*ready], [], False
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def has_room(task: _Task) -> bool:
        if args.jobs is not None:
            return len(running) < args.jobs
        return not running or sum(process.threads for process in running) + task.recipe.threads <= cores

    shared = [*([] if args.data is None else ["--data", args.data]), "--preset", args.preset,
              "--out", args.out, "--record", str(_record(args)), *(["--debug"] if args.debug else [])]
    progress.phase("recipes side by side")
    progress.jobs(len(waiting))
    try:
        while running or waiting:
            while (task := next(filter(has_room, waiting), None)) is not None:
                waiting.remove(task)
                left = _left(args, began)
                budget = [] if left is None else ["--budget", str(left / 60)]
                running.append(_Process(task, [*shared, *budget], progress))
            for process in [process for process in running if process.popen.poll() is not None]:
                running.remove(process)
                answer = process.answer()
                if "outcomes" in answer:
                    for row in answer["outcomes"]:
                        rows[process.name] = row
                    left_out += [process.name for _ in answer["left_out"]]
                    progress.job_done(process.name)
                else:
                    failed.append(_Failed(process.name, process.popen.returncode, answer))
            if (failed or interrupt.requested) and not stopping:
                stopping, never, waiting = True, waiting, []
                for process in running:
                    process.popen.terminate()
            time.sleep(0.1)
    finally:
        for process in running:
            process.popen.kill()
    if failed:
        raise failed[0]
    if never:
        raise Interrupted(f"stopped before {never[0].name}; the same command continues", Path(args.out))
    return [rows[task.name] for task in ready if task.name in rows], left_out


class _Process:
    """One recipe in a process of its own; its messages are shown under its name."""

    def __init__(self, task: _Task, words: list[str], progress: Progress) -> None:
        self.name, self.threads, self._progress, self._printed = task.name, task.recipe.threads, progress, ""
        self.popen = subprocess.Popen([sys.executable, "-m", "structconv", "reproduce", task.recipe.name,
                                       *task.overrides, *words, "--jobs", "1", "--json"],
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      encoding="utf-8", errors="replace")
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._forward)]
        for reader in self._readers:
            reader.start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        self._printed = self.popen.stdout.read()

    def _forward(self) -> None:
        assert self.popen.stderr is not None
        for line in self.popen.stderr:
            self._progress.note(f"{self.name}: {line.rstrip()}")

    def answer(self) -> dict[str, Any]:
        """Return the JSON that the ended process printed last; an error if it printed nothing."""
        for reader in self._readers:
            reader.join()
        lines = self._printed.splitlines()
        answer: dict[str, Any] = json.loads(lines[-1]) if lines else {
            "error": f"its process ended with code {self.popen.returncode}"}
        return answer


class _Failed(Stop):
    def __init__(self, name: str, code: int, answer: Mapping[str, Any]) -> None:
        super().__init__(f"{name}: {answer['error']}")
        self.exit_code = EXIT_INTERRUPTED if code == -signal.SIGTERM else max(code, 1)
        self._more = {key: value for key, value in answer.items() if key not in ("error", "exit_code")}

    @property
    def details(self) -> dict[str, Any]:
        return self._more


def _missed(row: Mapping[str, Any]) -> bool:
    """Return True if the effect is not shown, for one seed if its sign is wrong, or if a quick preset did not learn."""
    if row["learned"] is not None:
        return bool(row["learned"] >= LEARNED)
    return bool(row["effect"] and row["value"] is not None and row["state"] == NOT_SHOWN and row["reason"] != ONE_SEED)


def _chosen(names: list[str], everything: bool) -> list[Entry]:
    if everything:
        return [entry for entry in RECIPES.values() if issubclass(entry.recipe, Measured)]
    entries = [entry_named(name) for name in dict.fromkeys(names)]
    for entry in entries:
        if not issubclass(entry.recipe, Measured):
            raise ConfigError("structconv reproduce", "a recipe must have a figure and presets", entry.recipe.name,
                              f"Run it with structconv {entry.verb} {entry.recipe.name}.")
    return entries


def data_of(folder: str | None, entry: Entry) -> list[str]:
    """Return the option ``data=`` with the folder of a recipe, if the recipe reads files."""
    assert issubclass(entry.recipe, Measured)
    if not entry.recipe.folder:
        return []
    if folder is None:
        raise ConfigError("structconv", f"--data must name the folder with {entry.recipe.folder}, which "
                          f"{entry.recipe.name} reads", "none", entry.recipe.where)
    return [f"data={Path(folder) / entry.recipe.folder}"]


def _estimate(task: _Task, progress: Progress) -> float:
    """Estimate the seconds of all trainings from a few steps of each group."""
    progress.phase(f"{task.name}: trying a few steps")
    from structconv_systems.train.study import tried_all

    jobs = task.entry.runner().jobs
    assert jobs is not None
    return float(tried_all(jobs(placed(task.recipe), None))["seconds"])


def _reproduced(task: _Task, args: argparse.Namespace, interrupt: Interrupt, progress: Progress) -> dict[str, Any]:
    recipe, folder = task.recipe, place_of(args.out, task.recipe)
    summary = carried_out(task.entry, recipe, partial(opened, folder), interrupt, progress)
    from structconv_systems.report.results import outcome, record

    run = Run.open(folder)
    data = ["--data DIR"] if recipe.folder else []
    command = " ".join(["structconv reproduce", recipe.name, *task.overrides, *data, f"--preset {recipe.preset}"])
    learned = None
    if recipe.preset == "quick" and recipe.learning:
        run.metrics.check({job: result["steps"] for job, result in summary["results"].items()})
        learned = share_left(run.metrics, recipe.learning, {pair[0] for pair in recipe.effect.pairs})
    row = outcome(summary, run.environment, recipe.overrides, command, learned)
    record(_record(args), row)
    return row


def _record(args: argparse.Namespace) -> Path:
    return Path(args.record) if args.record else Path(args.out) / "results.json"


def place_of(out: str, recipe: Any) -> Path:
    """Return the folder of a run; its name has the overrides."""
    words = [recipe.name, recipe.preset]
    if recipe.overrides:
        text = written(recipe.overrides)
        short = re.sub(r"[^\w=.,-]+", "-", text)
        words.append(short if len(short) <= _LONGEST else hashlib.sha256(text.encode()).hexdigest()[:16])
    return Path(out) / "-".join(words)


def opened(folder: Path, recipe: Any) -> Run:
    """Return the run in the folder if it has this recipe and these options; else a new run."""
    if not (folder / "config.json").is_file():
        return Run.create(folder, recipe)
    run = Run.open(folder)
    if run.config_text != to_json(recipe):
        raise ConfigError("structconv", f"{folder} must be a run of {recipe.name} with the same options",
                          "one with others", "Name another folder with --out.")
    return run
