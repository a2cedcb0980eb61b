"""reproduce: run recipes one after the other, and compare their results with published ones."""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from structconv.commands.options import no_more
from structconv.commands.output import print_json
from structconv.errors import ConfigError
from structconv_systems.commands.recipes import carried_out, placed
from structconv_systems.recipes.register import RECIPES, Entry, entry_named
from structconv_systems.train.config import resolve, to_json, written
from structconv_systems.train.effect import LEARNED, NOT_SHOWN, ONE_SEED
from structconv_systems.train.interrupt import Interrupt
from structconv_systems.train.options import Measured
from structconv_systems.train.progress import Progress, progress_for
from structconv_systems.train.run import Run
from structconv_systems.train.summary import share_left

__all__ = ["add"]

#: Letters of overrides in a folder's name; longer ones are named by their SHA-256.
_LONGEST = 80


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the verb."""
    text = "run recipes and compare their results with the published ones"
    parser = verbs.add_parser("reproduce", help=text, description=text, parents=[shared], allow_abbrev=False)
    parser.add_argument("names", nargs="*", metavar="NAME",
                        help="recipes from `structconv list`; key=value sets an option of all of them")
    parser.add_argument("--all", action="store_true", help="run every recipe whose data is in --data")
    parser.add_argument("--data", metavar="DIR", default=None,
                        help="folder of data sets, with one folder each: multi30k, text, ...")
    parser.add_argument("--preset", metavar="NAME", default="default", help="quick, default (default) or paper")
    parser.add_argument("--budget", metavar="MINUTES", type=float, default=None,
                        help="leave out recipes that would take longer than the rest of this time")
    parser.add_argument("--out", metavar="DIR", default="runs/reproduce",
                        help="folder of the runs; interrupted runs there are continued (default: runs/reproduce)")
    parser.add_argument("--record", metavar="FILE", default=None,
                        help="JSON file for the outcomes, with a page beside it (default: results.json in --out)")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, rest: list[str]) -> int:
    words = [*args.names, *(word for word in rest if not word.startswith("-"))]
    no_more("reproduce", [word for word in rest if word.startswith("-")])
    overrides = [word for word in words if "=" in word]
    entries = _chosen([word for word in words if "=" not in word], args.all)
    recipes = [resolve(entry.recipe, [*_data(args.data, entry), *overrides], args.preset) for entry in entries]
    if not args.all:
        for recipe in recipes:
            recipe.check()
    if not recipes:
        raise ConfigError("structconv reproduce", "recipes must be named", "none", "Name some, or give --all.")
    if args.budget is not None and not args.budget >= 0:
        raise ConfigError("structconv reproduce", "--budget must be minutes, 0 or more", args.budget)
    rows, left_out = [], []
    progress, began = progress_for(), time.monotonic()
    with progress, Interrupt(progress.note) as interrupt:
        for entry, recipe in zip(entries, recipes, strict=True):
            left = None if args.budget is None else 60 * args.budget - (time.monotonic() - began)
            reason = _obstacle(entry, recipe, args, left, progress)
            if reason:
                left_out.append(recipe.name)
                progress.note(f"{recipe.name} is left out: {reason}")
            else:
                rows.append(_reproduced(entry, recipe, args, overrides, interrupt, progress))
    from structconv_systems.report.study import sentence

    if args.json:
        print_json({"outcomes": rows, "left_out": left_out, "minutes": (time.monotonic() - began) / 60})
    else:
        for row in rows:
            learned = row["learned"]
            print(f"{row['recipe']}: {sentence(row)}" + (
                "" if learned is None else f" In training the figure of a step fell to x{learned:.2g}."))
    return 1 if any(_missed(row) for row in rows) else 0


def _missed(row: Mapping[str, Any]) -> bool:
    """Return True if a measured effect is not shown; for one seed, if its sign is wrong; for a quick preset that is too
    short for it, if the model did not learn."""
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


def _data(folder: str | None, entry: Entry) -> list[str]:
    """The option that names a recipe's own folder, of one that reads files."""
    assert issubclass(entry.recipe, Measured)
    if not entry.recipe.folder:
        return []
    if folder is None:
        raise ConfigError("structconv reproduce", f"--data must name the folder with {entry.recipe.folder}, which "
                          f"{entry.recipe.name} reads", "none", entry.recipe.where)
    return [f"data={Path(folder) / entry.recipe.folder}"]


def _obstacle(entry: Entry, recipe: Any, args: argparse.Namespace, left: float | None, progress: Progress) -> str:
    """Why it cannot run, if so: its data is not there, or it takes more than the seconds that are left."""
    try:
        recipe.check()
    except ConfigError as error:
        return str(error)
    if left is None or (_place(args, recipe) / "summary.json").is_file():
        return ""
    need = _estimate(entry, recipe, progress)
    return "" if need <= left else f"it takes {need / 60:.1f} min, and {max(left, 0) / 60:.1f} are left"


def _estimate(entry: Entry, recipe: Any, progress: Progress) -> float:
    """Estimate the seconds of its trainings from a few steps of the first training of each group."""
    progress.phase(f"{recipe.name}: trying a few steps")
    from structconv_systems.train.study import tried_all

    jobs = entry.runner().jobs
    assert jobs is not None
    return float(tried_all(jobs(placed(recipe), None))["seconds"])


def _reproduced(entry: Entry, recipe: Any, args: argparse.Namespace, overrides: list[str],
                interrupt: Interrupt, progress: Progress) -> dict[str, Any]:
    folder = _place(args, recipe)
    summary = carried_out(entry, recipe, partial(_open, folder), interrupt, progress)
    from structconv_systems.report.results import outcome, record

    environment = json.loads((folder / "environment.json").read_bytes())
    data = ["--data DIR"] if recipe.folder else []
    command = " ".join(["structconv reproduce", recipe.name, *overrides, *data, f"--preset {recipe.preset}"])
    learned = None
    if recipe.preset == "quick" and recipe.learning:
        learned = share_left(Run.open(folder).metrics, recipe.learning, {pair[0] for pair in recipe.effect.pairs})
    row = outcome(summary, environment, recipe.overrides, command, learned)
    record(Path(args.record) if args.record else Path(args.out) / "results.json", row)
    return row


def _place(args: argparse.Namespace, recipe: Any) -> Path:
    """The folder of its run; overrides are part of its name."""
    words = [recipe.name, recipe.preset]
    if recipe.overrides:
        text = written(recipe.overrides)
        short = re.sub(r"[^\w=.,-]+", "-", text)
        words.append(short if len(short) <= _LONGEST else hashlib.sha256(text.encode()).hexdigest()[:16])
    return Path(args.out) / "-".join(words)


def _open(folder: Path, recipe: Any) -> Run:
    """Return the run in the folder if it has this recipe and these options; else a new run."""
    if not (folder / "config.json").is_file():
        return Run.create(folder, recipe)
    run = Run.open(folder)
    if run.config_text != to_json(recipe):
        raise ConfigError("structconv reproduce", f"{folder} must be a run of {recipe.name} with the same options",
                          "one with others", "Name another folder with --out.")
    return run
