"""compare, train, evaluate, resume: the verbs that work on runs."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from structconv.commands.options import Once, no_more
from structconv.commands.output import json_text, print_json
from structconv.commands.table import print_table
from structconv.errors import ConfigError
from structconv_systems.data.text import sha256_of
from structconv_systems.recipes.register import RECIPES, Entry, entry_named, recipe_of
from structconv_systems.train.config import Recipe, options, presets, resolve, to_json
from structconv_systems.train.interrupt import Interrupt, Interrupted
from structconv_systems.train.options import Measured
from structconv_systems.train.progress import Progress, progress_for
from structconv_systems.train.run import Run, check_new

if TYPE_CHECKING:
    from structconv_systems.train.study import Runner

__all__ = ["add", "carried_out", "placed", "working"]

#: Values that begin with a dash, for argparse: -1, and -1,0,1.
_NUMBERS = re.compile(r"-[\d.][\d.,e+-]*$")
_HELP = {"compare": "learn one task through several bases and report on them", "train": "train a recipe"}


def add(verbs: Any, shared: argparse.ArgumentParser) -> None:
    """Add the four verbs; each recipe is a subcommand with an option a key."""
    for verb, text in _HELP.items():
        names = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False).add_subparsers(
            dest="recipe", metavar="RECIPE", required=True)
        for entry in RECIPES.values():
            if entry.verb == verb:
                _add_recipe(names, entry, shared)
    for verb, run, text, flag, metavar, more in (
            ("resume", _resume, "continue an interrupted run", "--steps", "N",
             "train on until step N, or epoch N of a recipe that counts epochs; of a finished run, too"),
            ("evaluate", _evaluate, "measure the final weights of a run again", "--test", "NAME",
             "measure other files of the same format, a file or the stem of two; or another number of bodies")):
        parser = verbs.add_parser(verb, help=text, description=text, parents=[shared], allow_abbrev=False)
        parser.add_argument("folder", metavar="RUN", help="the run's folder")
        parser.add_argument(flag, metavar=metavar, default=None, help=more)
        parser.set_defaults(run=run)


def _add_recipe(names: Any, entry: Entry, shared: argparse.ArgumentParser) -> None:
    parser = names.add_parser(entry.recipe.name, help=entry.summary, description=entry.summary, parents=[shared],
                              allow_abbrev=False, epilog="Options may also be written key=value.")
    parser._negative_number_matcher = _NUMBERS
    parser.add_argument("--out", metavar="DIR", default=None, help="folder of the run, a new one (default: in runs/)")
    parser.add_argument("--preset", metavar="NAME", default="default",
                        help=f"values of the other options: {', '.join(presets(entry.recipe))} (default: default)")
    if issubclass(entry.recipe, Measured):
        parser.add_argument("--dry-run", action="store_true",
                            help="train a few steps and print how long the whole would take")
    for key in options(entry.recipe):
        default = ",".join(map(str, key.default)) if isinstance(key.default, tuple) else key.default
        flag = f"--{key.key.replace('_', '-')}"
        text = f"{key.help} (default: {default})" if default != "" else key.help
        if key.kind == "bool":
            parser.add_argument(flag, dest=f"key_{key.key}", default=None, help=text,
                                action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, dest=f"key_{key.key}", default=None, metavar=key.kind.split("[")[0].upper(),
                                help=text, action=Once)
    parser.set_defaults(run=_start)


def _start(args: argparse.Namespace, rest: list[str]) -> int:
    entry = entry_named(args.recipe)
    recipe = resolve(entry.recipe, _overrides(entry, args, rest), args.preset)
    if getattr(args, "dry_run", False):
        return _try(entry, recipe, args.json)
    check_new(args.out)
    return _execute(entry, recipe, partial(Run.create, args.out), args.json)


def _try(entry: Entry, recipe: Recipe, as_json: bool) -> int:
    recipe.check()
    with progress_for() as progress:
        progress.phase("loading torch and reading the data")
        recipe = placed(recipe)
        runner = _runner(entry, recipe)
        from structconv_systems.train.study import tried_all

        assert runner.jobs is not None, "whatever has the option can be tried"
        jobs = runner.jobs(recipe, None)
        progress.phase("trying a few steps of each kind of training")
        report = {"recipe": json.loads(to_json(recipe)), **tried_all(jobs)}
    if as_json:
        print_json(report)
    else:
        print(to_json(recipe), end="")
        print_table(("training", "number", "parameters", "flops a step", "MiB", "ms a step", "steps", "min each"), [
            (name, str(row["trainings"]), f"{row['parameters']:,}", f"{row['flops_per_step']:.3g}",
             f"{row['bytes'] / 2**20:,.0f}", f"{1e3 * row['seconds_per_step']:.0f}", f"{row['steps']:,}",
             f"{row['seconds'] / 60:.1f}") for name, row in report["groups"].items()])
        print(f"{len(jobs)} trainings: {report['seconds'] / 60:.1f} min without validation and test; MiB without what "
              "torch itself takes")
    return 0


def _resume(args: argparse.Namespace, rest: list[str]) -> int:
    no_more("resume", rest)
    run = Run.open(args.folder)
    entry, recipe = recipe_of(run)
    longer = recipe if args.steps is None else _longer(recipe, args.steps)
    return _execute(entry, longer, lambda recipe: run, args.json, other=args.steps is not None)


def _longer(recipe: Any, steps: str) -> Any:
    key = next((key for key in ("steps", "epochs") if hasattr(recipe, key)), None)
    if key is None:
        raise ConfigError("structconv resume", "--steps needs a recipe that counts steps or epochs", recipe.name)
    longer = dataclasses.replace(recipe, **{key: steps})
    if getattr(longer, key) < (least := getattr(recipe, key)):
        raise ConfigError("structconv resume", f"--steps must be at least the run's {key}={least}", steps)
    return longer


def _execute(entry: Entry, recipe: Recipe, open_run: Callable[[Recipe], Run], as_json: bool, *,
             other: bool = False) -> int:
    progress = progress_for()
    with progress, Interrupt(progress.note) as interrupt:
        summary = carried_out(entry, recipe, open_run, interrupt, progress, other=other)
    _report(entry, recipe, summary, as_json)
    return 0


def carried_out(entry: Entry, recipe: Recipe, open_run: Callable[[Recipe], Run], interrupt: Interrupt,
                progress: Progress, *, other: bool = False) -> dict[str, Any]:
    """Begin or continue a run and return its summary; with `other` the run gets the options of this recipe."""
    with working(entry, recipe, open_run, progress) as (recipe, runner, run):
        progress.note(f"run folder: {run.folder}")
        _ = run.environment  # the report needs it
        if other:
            run.configured(recipe)
        try:
            return runner.execute(recipe, run, interrupt, progress)
        except Interrupted as stopped:
            raise Interrupted(f"{stopped}; continue with: structconv resume {run.folder}", run.folder) from None


@contextmanager
def working(entry: Entry, recipe: Recipe, open_run: Callable[[Recipe], Run], progress: Progress
            ) -> Iterator[tuple[Recipe, Runner, Run]]:
    """Lock the run of a recipe whose files are unchanged; yield the recipe with its device, its runner and the run."""
    recipe.check()
    progress.phase("loading torch")
    recipe = placed(recipe)
    runner = _runner(entry, recipe)
    run = open_run(recipe)
    with run.exclusive():
        run.check_files(recipe)
        yield recipe, runner, run


def _evaluate(args: argparse.Namespace, rest: list[str]) -> int:
    no_more("evaluate", rest)
    run = Run.open(args.folder)
    entry, recipe = recipe_of(run)
    if args.test is not None:
        recipe = _on_other_files(recipe, args.test)
        if not os.access(run.folder, os.W_OK):
            raise ConfigError("structconv evaluate", "--test needs a writable run, for it keeps what it measures",
                              f"{run.folder}, which is not")
    recipe.check()
    with progress_for() as progress:
        progress.phase("loading torch")
        run.check_files(recipe, others=args.test is not None)
        runner = _runner(entry, recipe)
        summary = runner.evaluate(recipe, run, progress)
        if args.test is not None:
            summary["test"] = _stored(run, recipe, args.test, summary)
            if runner.report is not None:
                runner.report(recipe_of(run)[1], run)
    _report(entry, recipe, summary, args.json)
    if args.test is not None and not args.json:
        print(f"test: {args.test}; kept in {run.folder / summary['test']['file']}")
    return 0


def _stored(run: Run, recipe: Recipe, name: str, summary: dict[str, Any]) -> dict[str, Any]:
    """Write what was measured on other data into ``evaluations/``; return the name of the data, its files and the file
    written."""
    files = {str(file): sha256_of(file) for file in recipe.files("test")}
    key = hashlib.sha256(json.dumps([name, files]).encode()).hexdigest()[:8]
    short = re.sub(r"[^\w.-]+", "-", Path(name).name)
    place = f"evaluations/{short}-{key}.json"
    test = {"name": name, "files": files, "file": place}
    run.write(place, json_text({**summary, "test": test}, indent=2) + "\n")
    return test


def _on_other_files(recipe: Any, name: str) -> Any:
    if not name:
        raise ConfigError("structconv evaluate", "--test must name test data", "an empty text")
    if "test" not in (key.key for key in options(type(recipe))):
        raise ConfigError("structconv evaluate", "--test needs a recipe that reads test files of its own", recipe.name)
    return dataclasses.replace(recipe, test=recipe.from_here(name))


def _report(entry: Entry, recipe: Recipe, summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(summary)
    else:
        entry.runner().show(recipe, summary)


def placed(recipe: Recipe) -> Recipe:
    """Replace the device `auto` by one of this machine; `ConfigError` if the named device is absent."""
    from structconv_systems.train.device import chosen

    return dataclasses.replace(recipe, device=chosen(recipe.device))


def _runner(entry: Entry, recipe: Recipe) -> Runner:
    """Return the runner of the recipe, with as many threads as the recipe asks for."""
    import torch

    torch.set_num_threads(recipe.threads)
    return entry.runner()


def _overrides(entry: Entry, args: argparse.Namespace, rest: list[str]) -> list[str]:
    """Return all overrides as ``key=value``: known options, then the words that argparse does not know."""
    overrides = [f"{name.removeprefix('key_')}={value}" for name, value in vars(args).items()
             if name.startswith("key_") and value is not None]
    words = iter(rest)
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            overrides.append(f"{key}={value if equals else next(words, '')}")
        elif "=" in word:
            overrides.append(word)
        else:
            raise ConfigError(f"structconv {entry.verb} {entry.recipe.name}", "an override must read key=value or "
                              "--key value", repr(word))
    return overrides
