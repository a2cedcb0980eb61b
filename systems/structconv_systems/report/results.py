"""The table of the recipes' results beside published ones, from a JSON file with the latest result of each."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from structconv.commands.output import json_text
from structconv.commands.table import number
from structconv.errors import ConfigError, DataError
from structconv.files import write_atomically
from structconv_systems.data.text import read_json
from structconv_systems.report.study import group_rows
from structconv_systems.train.config import written
from structconv_systems.train.effect import LEARNED, ONE_SEED, counted, effect_text
from structconv_systems.train.run import in_turn

__all__ = ["check_record", "outcome", "record", "recorded", "render", "render_recipe"]

_TITLE = """# Systems

Compare each system with its paper. Each row is the effect that the paper claims: the system against a named baseline,
on the data and at the size of the recipe, which are mostly smaller than the paper's. The interval is Student's t at
95 % over seeds. A ratio (x1.3) compares errors, a difference (+1.3) compares scores; above 1 or 0 the system is better.

- **reproduced**: the whole interval shows the effect, and its mean reaches half of the published one (of a ratio: half
  of its logarithm).
- **partly**: the whole interval shows the effect, but it is smaller than that.
- **not shown**: the mean is on the side of the baseline, or the interval includes no effect, or there is no interval
  (one seed), or no baseline.
- **not run since the change**: the recipe has a new baseline or task, and no figures of it yet.

Two papers claim no gain, only that nearly nothing is lost (`fixed-heads`, `mnist-cheb`): there, as the row says, a
small loss counts as no effect. Published figures of `cora-*`, `dcrnn`, `molecules`, `nri`, `rgcn-entities`,
`transformer` and `tsp` were written down from memory.

System and baseline train with the same data, steps and choice of weights. Where a page has a row of learning rates,
each trains at the best of them in validation, unless the row says otherwise; elsewhere they share one.

The name of a system leads to its page: formula, commands, differences from the paper, figures, machine and date.
Minutes are those of the clock: they are longer where the machine had other work.

"""
#: The begin of the part of a page that each outcome replaces.
_RESULTS = "<!-- results: written by structconv reproduce --record -->\n"
_HEADERS = ("system", "compared", "published", "here", "state", "minutes")
#: The keys of every outcome.
_KEYS = {"recipe", "preset", "label", "effect", "ratio", "published_effect", "published", "value", "low", "high",
         "seeds", "state", "reason", "groups", "minutes", "machine", "commit", "date", "command"}
_PARTS = (("Default presets", False), ("Quick presets", True))
_QUICK = """At most about three minutes each, 21 together on two cores (`structconv reproduce --all --preset quick`),
and one seed unless an interval is given. A row without an interval cannot be "reproduced".

- **sign**: the effect has the sign of the published one.
- **learns**: three minutes are too few for the effect; the figure of a training step falls to the given share.

"""


def outcome(summary: Mapping[str, Any], environment: Mapping[str, Any], overrides: Mapping[str, Any],
            command: str, learned: float | None = None) -> dict[str, Any]:
    """Return the record of a run: headline, cost, machine, date and command.

    Args:
        overrides: options that differ from the preset.
        learned: the `share_left` of what must fall in a quick preset; see `Measured.learning`.
    """
    machine = f"{environment['processor']}, {counted(environment['threads'], 'thread')}, torch {environment['torch']}"
    return {"recipe": summary["recipe"], "preset": summary["preset"], "overrides": dict(overrides),
            **summary["headline"], "learned": learned, "groups": summary["groups"],
            "minutes": summary["seconds"] / 60, "machine": machine,
            "commit": environment["commit"], "date": environment["started"][:10], "command": command}


def record(path: Path, row: dict[str, Any]) -> None:
    """Put an outcome into a JSON file, in place of the one with the same recipe, preset and overrides, and write the
    pages beside it: the table, and a folder with a page for each recipe. Processes that record side by side take turns.

    Raises:
        DataError: the file holds anything else.
    """
    with in_turn(path.parent):
        known = recorded(path)
        rows = sorted([*(other for other in known if _key(other) != _key(row)), row], key=_key)
        write_atomically(path, json_text(rows, indent=1) + "\n")
        write_atomically(path.with_suffix(".md"), render(rows, path.stem))
        folder = path.with_suffix("")
        folder.mkdir(exist_ok=True)
        for name in {row["recipe"] for row in rows}:
            page = folder / f"{name}.md"
            text = page.read_text(encoding="utf-8") if page.is_file() else ""
            write_atomically(page, render_recipe([row for row in rows if row["recipe"] == name], text))


def check_record(path: Path) -> None:
    """Make the folders above the file; `ConfigError` if `record` could not write."""
    if path.suffix != ".json" or path.is_dir():
        raise ConfigError("record", "the file of outcomes must be a file NAME.json", repr(str(path)))
    path.parent.mkdir(parents=True, exist_ok=True)
    for place in (path.parent, path, path.with_suffix(".md"), path.with_suffix("")):
        if place.exists() and not os.access(place, os.W_OK):
            raise ConfigError("record", "the file of outcomes and its pages must be writable", repr(str(place)))
    recorded(path)


def recorded(path: Path) -> list[dict[str, Any]]:
    """Return the outcomes in a file, none if there is no file; `DataError` if it holds anything else."""
    known = read_json(path) if path.is_file() else []
    if not isinstance(known, list):
        raise DataError(path, "a list of outcomes", type(known).__name__)
    for place, row in enumerate(known, 1):
        if not isinstance(row, dict) or not row.keys() >= _KEYS:
            missing = sorted(_KEYS - row.keys()) if isinstance(row, dict) else sorted(_KEYS)
            raise DataError(path, "a list of outcomes", f"number {place} without {', '.join(missing)}")
    return known


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["recipe"], row["preset"], _setting(row)


def _setting(row: Mapping[str, Any]) -> str:
    """Return the overrides of a row, ``hidden=2 seeds=3``."""
    return written(row.get("overrides", {}))


def render(rows: Sequence[Mapping[str, Any]], folder: str) -> str:
    """Render the page of all outcomes; the pages of recipes are in `folder`."""
    text = _TITLE
    for title, quick in _PARTS:
        chosen = [row for row in rows if (row["preset"] == "quick") == quick]
        if chosen:
            text += f"## {title}\n\n" + (_QUICK if quick else "")
            text += _table(_HEADERS, [_cells(row, folder) for row in chosen]) + "\n\n"
    return text + f"```{{toctree}}\n:hidden:\n:glob:\n\n{folder}/*\n```\n"


def _cells(row: Mapping[str, Any], folder: str) -> list[str]:
    name = f"[{row['recipe']}]({folder}/{row['recipe']}.md)" + (f" {_setting(row)}" if _setting(row) else "")
    published = "direction only" if row["effect"] else row["published"]
    if row["published_effect"] is not None:
        published = effect_text(row["ratio"], row["published_effect"])
    return [name, row["label"], published, _here(row), _state(row), f"{row['minutes']:.1f}"]


def _state(row: Mapping[str, Any]) -> str:
    """Return the state of the effect; of a quick preset what it shows."""
    learned = row.get("learned")
    if learned is not None:
        return f"learns, x{learned:.2g}" if learned < LEARNED else f"does not learn, x{learned:.2g}"
    return "sign" if row["preset"] == "quick" and row["reason"] == ONE_SEED else str(row["state"])


def _here(row: Mapping[str, Any]) -> str:
    if row["effect"]:
        return effect_text(row["ratio"], row["value"], row["low"], row["high"])
    return number(row["value"]) + ("" if row["low"] is None else f" [{row['low']:.3g}, {row['high']:.3g}]")


def render_recipe(rows: Sequence[Mapping[str, Any]], page: str = "") -> str:
    """Render the page of a recipe: effect, figures and provenance; the text of `page` before its results stays."""
    before, mark, _ = page.partition(_RESULTS)
    text = (before if mark else f"# {rows[0]['recipe']}\n\n") + _RESULTS
    text += f"\n## Results\n\nPublished: {rows[0]['published']}.\n"
    for row in rows:
        figures = list(dict.fromkeys(name for group in row["groups"].values() for name in group))
        table = _table(("group", *figures), group_rows(row["groups"], dict.fromkeys(figures, "")))
        reason = f" ({row['reason']})" if row["reason"] else ""
        reason += "" if row.get("learned") is None else f"; {_state(row)}"
        title = f"{row['preset']} {_setting(row)}".rstrip()
        text += (f"\n### {title}\n\n{row['label']}: {_here(row)}, {row['state']}{reason}.\n\n" + table
                 + f"\n\n`{row['command']}`\n\n{counted(row['seeds'], 'seed')}, {row['minutes']:.1f} minutes, "
                 f"{row['date']}, commit {row['commit'] or 'none'}, {row['machine']}\n")
    return text


def _table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in lines)
