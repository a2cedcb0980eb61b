"""Try learning rates in the groups of a recipe, by validation: `python tools/rates.py NAME RATE,RATE,... [key=value]`.

Each group trains once, with seed 0, at each rate; the table has the best validation of each. Nothing is tested. A
second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from structconv_systems.recipes.register import entry_named
from structconv_systems.train.config import resolve, to_json, written
from structconv_systems.train.interrupt import Interrupt
from structconv_systems.train.loop import Task, fit
from structconv_systems.train.options import Trained
from structconv_systems.train.progress import Progress, progress_for
from structconv_systems.train.run import Run
from structconv_systems.train.stopping import Best
from structconv_systems.train.study import Job


def main(words: list[str] | None = None) -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("rates")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--data", default="data")
    parser.add_argument("--preset", default="default")
    parser.add_argument("--groups", default="", help="their names, with commas between them; empty: all")
    parser.add_argument("--out", type=Path, default=Path("runs/rates"))
    args = parser.parse_args(words)
    rates = args.rates.split(",")
    rows: dict[str, dict[str, float]] = {}
    with progress_for() as progress, Interrupt(progress.note) as interrupt:
        for rate in rates:
            for group, best in _tried(args, rate, interrupt, progress).items():
                rows.setdefault(group, {})[rate] = best
    print(f"| group | {' | '.join(rates)} |\n| --- |{' ---: |' * len(rates)}")
    for group, found in rows.items():
        print(f"| {group} | {' | '.join(f'{found[rate]:.4g}' for rate in rates)} |")


def _tried(args: argparse.Namespace, rate: str, interrupt: Interrupt, progress: Progress) -> dict[str, float]:
    """The best validation of each group at a rate."""
    entry = entry_named(args.name)
    if not issubclass(entry.recipe, Trained):
        raise SystemExit(f"{args.name} has no groups with a learning rate")
    folder = [f"data={Path(args.data) / entry.recipe.folder}"] if entry.recipe.folder else []
    words = [*folder, *args.overrides, "seeds=1", "rates=", f"learning_rate={rate}"]
    recipe = resolve(entry.recipe, words, args.preset)
    torch.set_num_threads(recipe.threads)
    place = args.out / "-".join([args.name, args.preset, written(recipe.overrides).replace(" ", "-").replace("/", "-")])
    run = Run.open(place) if (place / "config.json").is_file() else Run.create(place, recipe)
    if run.config_text != to_json(recipe):
        raise SystemExit(f"{place} is a run with other options; name another folder with --out")
    jobs = entry.runner().jobs
    assert jobs is not None
    chosen = [job for job in jobs(recipe, run)
              if not args.groups or job.name.partition("/")[0] in args.groups.split(",")]
    progress.jobs(len(chosen))
    return {job.name.partition("/")[0]: _best(job, run, interrupt, progress) for job in chosen}


def _best(job: Job, run: Run, interrupt: Interrupt, progress: Progress) -> float:
    """Train it, without its test, and return its best validation."""

    def make() -> Task:
        task = job.make()
        task.test = dict  # type: ignore[method-assign]
        return task

    fit(make, job.schedule(), run=run, job=job.name, interrupt=interrupt, progress=progress)
    rule = job.schedule().stopping
    metric, sign = (rule.metric, rule.sign) if isinstance(rule, Best) else ("val_loss", -1.0)
    return sign * max(sign * line[metric] for line in run.metrics if line["job"] == job.name and metric in line)


if __name__ == "__main__":
    main()
