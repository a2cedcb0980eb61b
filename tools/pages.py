"""Tables of the docs that a tool writes: between two comments, so that the text around them stays."""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_table"]


def write_table(page: Path, tool: str, table: str) -> None:
    """Replace the table of `tools/<tool>` in a page."""
    begin, end = f"<!-- tools/{tool} writes this table -->", "<!-- end of the table -->"
    before, rest = page.read_text(encoding="utf-8").split(begin)
    page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}", encoding="utf-8")
