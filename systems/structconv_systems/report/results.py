"""The table of what recipes reached, beside what was published, from a file of JSON that holds the latest of each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from structconv.commands.output import json_text
from structconv.commands.table import number
from structconv.errors import DataError
from structconv.files import write_atomically
from structconv_systems.data.text import read_json
from structconv_systems.train.config import written

__all__ = ["outcome", "record", "render"]

_TITLE = """# Results

What the recipes reached, each by the command beside it, and what was published. The sizes of data and model are those
of the preset, mostly smaller than the paper's; a figure that missed the recipe's goal stands here as well.

"""
_HEADERS = ("recipe", "preset", "figure", "ours", "goal", "met", "published", "minutes", "machine", "commit", "date")


def outcome(summary: Mapping[str, Any], environment: Mapping[str, Any], overrides: Mapping[str, Any],
            command: str) -> dict[str, Any]:
    """What is to be kept of a run: its headline, what it cost, and where, when and by what it was had.

    Args:
        overrides: options by which it differs from its preset.
    """
    machine = f"{environment['processor']}, {environment['threads']} threads, torch {environment['torch']}"
    return {"recipe": summary["recipe"], "preset": summary["preset"], "overrides": dict(overrides),
            **summary["headline"], "groups": summary["groups"], "minutes": summary["seconds"] / 60, "machine": machine,
            "commit": environment["commit"], "date": environment["started"][:10], "command": command}


def record(path: Path, found: dict[str, Any]) -> None:
    """Put an outcome into a file of JSON, in the place of the one before it, and write the table beside the file.

    An outcome replaces another of the same recipe, preset and overrides.

    Raises:
        DataError: the file holds anything else.
    """
    known = read_json(path) if path.is_file() else []
    if not isinstance(known, list) or not all(isinstance(row, dict) and "recipe" in row for row in known):
        raise DataError(path, "a list of outcomes", type(known).__name__)
    rows = sorted([*(row for row in known if _key(row) != _key(found)), found], key=_key)
    write_atomically(path, json_text(rows, indent=1) + "\n")
    write_atomically(path.with_suffix(".md"), render(rows))


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["recipe"], row["preset"], _setting(row)


def _setting(row: Mapping[str, Any]) -> str:
    """The overrides of a row in words, ``hidden=2 seeds=3``."""
    return written(row.get("overrides", {}))


def render(rows: list[dict[str, Any]]) -> str:
    """The page of outcomes."""
    lines = [_line(_HEADERS), _line(["---"] * len(_HEADERS)), *(_line(_cells(row)) for row in rows)]
    commands = [f"- `{row['recipe']}`, {_preset(row)}: `{row['command']}`" for row in rows]
    return _TITLE + "\n".join(lines) + "\n\n## Commands\n\n" + "\n".join(commands) + "\n"


def _cells(row: Mapping[str, Any]) -> list[str]:
    met = {None: "", True: "yes", False: "no"}[row["met"]]
    goal = "" if row["goal"] is None else f"{row['goal']:g}"
    return [row["recipe"], _preset(row), row["label"], number(row["value"]), goal, met, row["published"],
            f"{row['minutes']:.1f}", row["machine"], str(row["commit"] or ""), row["date"]]


def _preset(row: Mapping[str, Any]) -> str:
    return " ".join([row["preset"], *([_setting(row)] if _setting(row) else [])])


def _line(cells: Any) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
