"""Check that the tree is what a tag releases: `python tools/release.py v1.2.3` lists what is wrong, exit status 1.

The versions are the tag's, and the first entries of CHANGELOG.md are in a section with its version and date.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def complaints(tag: str, root: Path) -> list[str]:
    """What contradicts the tag in the tree at `root`, a line each."""
    version = tag.removeprefix("v")
    return [*_versions(version, root), *_changelog(version, (root / "CHANGELOG.md").read_text(encoding="utf-8"))]


def _versions(version: str, root: Path) -> Iterator[str]:
    for path in ("pyproject.toml", "systems/pyproject.toml", "CITATION.cff"):
        text = (root / path).read_text(encoding="utf-8")
        if (versions := re.findall(r'(?m)^version(?: = |: )"?([^"\n]+)"?$', text)) != [version]:
            yield f"{path} has version {', '.join(versions)}, the tag {version}"


def _changelog(version: str, text: str) -> Iterator[str]:
    sections = dict(re.findall(r"(?ms)^## (.+?)$(.*?)(?=^## |\Z)", text))
    if sections.get("[Unreleased]", "").strip():
        yield f"CHANGELOG.md has entries in [Unreleased]: move them to a section [{version}] - date"
    heading = next((heading for heading in sections if heading.startswith(f"[{version}] - ")), None)
    if heading is None:
        yield f"CHANGELOG.md has no section [{version}] - date"
        return
    if not sections[heading].strip():
        yield f"CHANGELOG.md: the section {heading} is empty"
    try:
        date.fromisoformat(day := heading.removeprefix(f"[{version}] - "))
    except ValueError:
        yield f"CHANGELOG.md: {day} is not a date, YYYY-MM-DD"


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python tools/release.py TAG")
    sys.exit("\n".join(complaints(sys.argv[1], ROOT)) or 0)
