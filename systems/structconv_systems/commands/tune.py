"""tune: try learning rates in the groups of a recipe, by validation."""

from __future__ import annotations

import argparse
import math
from functools import partial
from typing import TYPE_CHECKING, Any

from structconv.commands.options import no_more
from structconv.commands.output import print_json
from structconv.commands.table import print_table
from structconv.errors import ConfigError, nearest
from structconv_systems.commands.recipes import working
from structconv_systems.commands.reproduce import data_of, opened, place_of
from structconv_systems.recipes.register import Entry, entry_named
from structconv_systems.train.config import Recipe, resolve
from structconv_systems.train.interrupt import Diverged, Interrupt, Interrupted
from structconv_systems.train.options import Measured, Trained
from structconv_systems.train.progress import Progress, progress_for
from structconv_systems.train.run import Run

if TYPE_CHECKING:
    from structconv_systems.train.study import Job

__all__ = ["add"]


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb."""
    text = "try learning rates in the groups of a recipe, by validation"
    parser = verbs.add_parser("tune", help=text, allow_abbrev=False, parents=[shared], description=(
        "Train each group once at each learning rate, with seed 0, and print the best validation of each. The same "
        "command continues, or adds rates."))
    parser.add_argument("name", metavar="NAME", help="a recipe from `structconv list`")
    parser.add_argument("rates", metavar="RATE,...", help="learning rates, with commas between them")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="options of the recipe")
    parser.add_argument("--groups", metavar="NAME,...", default=None, help="groups to train (default: all that learn)")
    parser.add_argument("--data", metavar="DIR", default=None,
                        help="folder of data sets, with one folder each: multi30k, text, ...")
    parser.add_argument("--preset", metavar="NAME", default="default", help="quick, default (default) or paper")
    parser.add_argument("--out", metavar="DIR", default="runs/tune", help="folder of the runs (default: runs/tune)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    overrides = [*args.overrides, *(word for word in rest if "=" in word and not word.startswith("-"))]
    no_more("tune", [word for word in rest if word not in overrides])
    entry = entry_named(args.name)
    if not issubclass(entry.recipe, Measured) or not hasattr(entry.recipe, "learning_rate"):
        raise ConfigError("structconv tune", "a recipe must have groups that train at `learning_rate`", args.name)
    own = {word.partition("=")[0] for word in overrides}
    words = [*data_of(args.data, entry), *overrides, "seeds=1",
             *(f"{key}={value}" for key, value in entry.recipe.tuning.items() if key not in own)]
    words += ["rates="] if issubclass(entry.recipe, Trained) else []
    rates = list(dict.fromkeys(rate for rate in args.rates.split(",") if rate))
    if not rates:
        raise ConfigError("structconv tune", "rates must be numbers, with commas between them", repr(args.rates))
    recipes = {rate: resolve(entry.recipe, [*words, f"learning_rate={rate}"], args.preset) for rate in rates}
    with progress_for() as progress, Interrupt(progress.note) as interrupt:
        tables = {rate: _tried(entry, recipe, args, interrupt, progress) for rate, recipe in recipes.items()}
    groups = {group: {rate: table[group] for rate, table in tables.items()} for group in next(iter(tables.values()))}
    if args.json:
        print_json({"recipe": args.name, "validation": groups})
    else:
        print_table(("group", *rates), [(group, *("-" if math.isnan(best) else f"{best:.4g}" for best in row.values()))
                                        for group, row in groups.items()])
    return 0


def _tried(entry: Entry, recipe: Recipe, args: argparse.Namespace, interrupt: Interrupt, progress: Progress
           ) -> dict[str, float]:
    """Return the best validation of each group; NaN if the training diverged."""
    with working(entry, recipe, partial(opened, place_of(args.out, recipe)), progress) as (recipe, runner, run):
        from structconv_systems.train.study import learning

        assert runner.jobs is not None, "whatever trains by gradients has jobs"
        progress.phase("reading the data")
        jobs = learning(runner.jobs(recipe, run))
        if not jobs:
            raise ConfigError("structconv tune", "trainings must have a validation part", "none")
        chosen = list(jobs) if args.groups is None else args.groups.split(",")
        for group in chosen:
            if group not in jobs:
                raise ConfigError("structconv tune", "--groups must be of the recipe's", repr(group),
                                  nearest(group, jobs) or f"Known: {', '.join(jobs)}.")
        progress.jobs(len(chosen))
        return {group: _best(jobs[group], run, interrupt, progress) for group in chosen}


def _best(job: Job, run: Run, interrupt: Interrupt, progress: Progress) -> float:
    """Train without the test and return the best validation."""
    from structconv_systems.train.loop import Task, fit

    def make() -> Task:
        task = job.make()
        task.test = dict  # type: ignore[method-assign]
        return task

    try:
        result = fit(make, job.schedule(), run=run, job=job.name, interrupt=interrupt, progress=progress)
    except Diverged as diverged:
        progress.note(str(diverged))
        return math.nan
    except Interrupted as stopped:
        raise Interrupted(f"{stopped}; the same command continues", run.folder) from None
    run.metrics.check({job.name: result["steps"]})
    figures = [line[job.metric] for line in run.metrics if line["job"] == job.name and line.get(job.metric) is not None]
    return (max if job.higher else min)(figures, default=math.nan)
