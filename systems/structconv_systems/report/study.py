"""The page of a study: what each group reached, and every picture of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from structconv.commands.table import number
from structconv_systems.report.html import figure, page, paragraph, section, table

__all__ = ["study_page"]

_KINDS = {".png": "png", ".gif": "gif"}


def study_page(title: str, headline: dict[str, Any], head: Sequence[str], rows: Sequence[Sequence[str]], folder: Path
               ) -> str:
    """HTML with everything in it; pictures are those of ``pictures/`` in the run's folder, named after their files."""
    goal = "" if headline["goal"] is None else (f" The goal is {headline['goal']}: "
                                                f"{'met' if headline['met'] else 'not met'}.")
    said = f"{headline['label']}: {number(headline['value'])}. Published: {headline['published']}.{goal}"
    files = sorted(path for path in (folder / "pictures").glob("*") if path.suffix in _KINDS)
    shown = [figure(path.read_bytes(), path.stem.replace("-", " "), _KINDS[path.suffix]) for path in files]
    return page(title, [paragraph(said), section("Figures", [table(head, rows)]),
                        *([section("Pictures", shown)] if shown else [])])
