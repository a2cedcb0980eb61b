"""The page of a study: the effect, provenance, figures of each group, curves, and pictures."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from structconv.commands.table import number
from structconv_systems.data.text import read_json
from structconv_systems.report.page import CURVES, figure, page, paragraph, section, table, training_curves
from structconv_systems.train.config import written
from structconv_systems.train.effect import counted, effect_text, with_spread
from structconv_systems.train.options import Measured
from structconv_systems.train.run import Run

__all__ = ["group_rows", "sentence", "study_page"]


def sentence(head: Mapping[str, Any]) -> str:
    """Return a headline as a sentence."""
    if not head["effect"]:
        within = "" if head["low"] is None else f" [{head['low']:.3f}, {head['high']:.3f}]"
        value_text = number(head["value"]) + within
    else:
        value_text = effect_text(head["ratio"], head["value"], head["low"], head["high"])
    published = head["published"]
    if head["published_effect"] is not None:
        published = f"{effect_text(head['ratio'], head['published_effect'])} ({published})"
    reason = f", {head['reason']}" if head["reason"] else ""
    return f"{head['label']}: {value_text}; published: {published}; {head['state']}{reason}."


def group_rows(groups: Mapping[str, Mapping[str, Mapping[str, Any]]], columns: Mapping[str, str]
               ) -> list[tuple[str, ...]]:
    """Return a row for each group: its name and its figures with their deviation over seeds, - for none."""
    return [(name, *(with_spread(**group[metric]) if metric in group else "-" for metric in columns))
            for name, group in groups.items()]


def study_page(recipe: Measured, run: Run, columns: Mapping[str, str]) -> str:
    """Return the page of a run with its ``summary.json``, its pictures and their captions; a run of an earlier version
    has names of files instead."""
    summary = read_json(run.folder / "summary.json")
    results = summary["results"]
    parts = [paragraph(sentence(summary["headline"])),
             section("Figures", [table((recipe.name, *columns.values()), group_rows(summary["groups"], columns))]),
             section("Run", _origin(recipe, run, results)),
             section("Trainings", [table(("training", "steps", "minutes"), [
                 (name, str(row.get("steps", "")), f"{row['seconds'] / 60:.1f}") for name, row in results.items()])])]
    drawn = training_curves(run, {name: row["seconds"] for name, row in results.items()})
    curves = [figure(png, CURVES.format(metric.replace("_", " "))) for metric, png in drawn.items()]
    captions = run.captions
    shown = [figure(path.read_bytes(), captions.get(path.stem, path.stem.replace("-", " ")), path.suffix[1:])
             for path in sorted((run.folder / "pictures").glob("*")) if path.suffix in (".png", ".gif")]
    for title, pieces in (("Curves", curves), ("Pictures", shown), ("Other test data", _evaluations(run, columns))):
        if pieces:
            parts.append(section(title, pieces))
    return page(recipe.name, parts)


def _origin(recipe: Measured, run: Run, results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return split, options, seeds, command and versions; and the SHA-256 of each file that was read."""
    environment = run.environment
    rows = [("preset", recipe.preset), ("overrides", written(recipe.overrides) or "none"),
            ("seeds", ", ".join(map(str, range(recipe.seeds)))), ("command", " ".join(environment["command"])),
            ("begun", environment["started"]), ("commit", str(environment["commit"])),
            ("machine", f"{environment['processor']}, {counted(environment['threads'], 'thread')}"),
            ("versions", f"Python {environment['python']}, torch {environment['torch']}, "
                         f"structconv {environment['structconv']}")]
    splits = dict.fromkeys(row["split"] for row in results.values() if "split" in row)
    rows[:0] = [("split", split) for split in splits]
    files = read_json(run.folder / "files.json")
    data = ([table(("data set", "SHA-256"), [(Path(name).name, value) for name, value in files.items()])] if files
            else [paragraph("The recipe makes its data from a seed; it reads no files.")])
    return [table(("", ""), rows), *data]


def _evaluations(run: Run, columns: Mapping[str, str]) -> list[str]:
    """Return the results of `evaluate --test`, one table for each test set."""
    pieces = []
    for path in sorted((run.folder / "evaluations").glob("*.json")):
        evaluation = json.loads(path.read_bytes())
        hashes = ", ".join(f"{Path(name).name}: {value}" for name, value in evaluation["test"]["files"].items())
        pieces += [paragraph(f"Test data: {evaluation['test']['name']}" + (f" ({hashes})" if hashes else "")),
                   table(("group", *columns.values()), group_rows(evaluation["groups"], columns))]
    return pieces
