"""Write the table of layers and tools that `tests/test_tools.py` tries into the docs: `python tools/compatibility.py`.

A number is how many layers of the class, with other options and masks, the tool is tried with; all of them pass, as the
test that runs them and the test that compares the table with this page are part of `make test`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "modules.md"
BEGIN, END = "<!-- tools/compatibility.py writes this table -->", "<!-- end of the table -->"


def table(matrix: Mapping[str, Sequence[str]]) -> str:
    """The table in Markdown: a row for each class of layers, a column for each tool."""
    from tests.support.layers import LAYERS

    kinds = {name: type(LAYERS[name]().layer).__name__ for names in matrix.values() for name in names}
    lines = ["| layer | " + " | ".join(matrix) + " |", "|---" * (1 + len(matrix)) + "|"]
    for kind in sorted(set(kinds.values())):
        counts = [sum(kinds[name] == kind for name in names) for names in matrix.values()]
        lines.append(f"| `{kind}` | " + " | ".join(str(count) if count else "" for count in counts) + " |")
    return "\n".join(lines)


def write() -> None:
    """Put the table into the page."""
    from tests.test_tools import MATRIX

    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(MATRIX)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "systems")]
    write()
