"""Run every named layer under the tools that use parameter names, print the table, and write it into the docs.

`python tools/compatibility.py` runs the tests of the matrix in `tests/test_tools.py` (`make ecosystem`). A number is
how many layers of the class, with other options and masks, pass; "k of n" if some fail, "-" if the tool is missing.
`--write` puts the table into docs/modules.md, which a test compares with the matrix.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "modules.md"


def table(matrix: Mapping[str, Sequence[str]], failed: Mapping[str, Collection[str]] | None = None,
          missing: Collection[str] = ()) -> str:
    """The table in Markdown: a row for each class of layers, a column for each tool.

    Args:
        matrix: tool -> the names of the layers that it is tried with.
        failed: tool -> those that failed. missing: tools that were not run.
    """
    from tests.support.layers import LAYERS

    kinds = {name: type(LAYERS[name]().layer).__name__ if name in LAYERS else name.replace("_", ".")
             for name in set().union(*matrix.values())}
    lines = ["| layer | " + " | ".join(matrix) + " |", "|---" * (1 + len(matrix)) + "|"]
    for kind in sorted(set(kinds.values())):
        cells = []
        for tool, names in matrix.items():
            own = [name for name in names if kinds[name] == kind]
            good = [name for name in own if name not in (failed or {}).get(tool, ())]
            cells.append("" if not own else "-" if tool in missing else
                         str(len(own)) if len(own) == len(good) else f"{len(good)} of {len(own)}")
        lines.append(f"| `{kind}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


class Outcomes:
    """A plugin of pytest that notes what became of each test."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Note the call, or what went before it instead."""
        if report.when == "call" or report.outcome != "passed":
            self.of[report.nodeid.partition("::")[2]] = report.outcome


def run(matrix: Mapping[str, Sequence[str]], tests: Mapping[str, str]) -> int:
    """Run the tests of all tools, print the table, and return how many tools failed somewhere."""
    import pytest

    plugin = Outcomes()
    nodes = [f"{ROOT / 'tests' / 'test_tools.py'}::{test}" for test in dict.fromkeys(tests.values())]
    pytest.main(["-q", "-W", "ignore", "-p", "no:cacheprovider", "--rootdir", str(ROOT), *nodes], plugins=[plugin])
    failed: dict[str, list[str]] = {}
    missing = []
    for tool, names in matrix.items():
        of_all = plugin.of.get(tests[tool], "not run")
        result = {name: plugin.of.get(f"{tests[tool]}[{name}]", of_all) for name in names}
        if set(result.values()) == {"skipped"}:
            missing.append(tool)
        failed[tool] = [name for name, outcome in result.items() if outcome not in ("passed", "skipped")]
    print("\n" + table(matrix, failed, missing))
    bad = {tool: names for tool, names in failed.items() if names}
    for tool, names in bad.items():
        print(f"{tool}: {', '.join(names)} failed")
    return len(bad)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "systems")]
    os.environ["STRUCTCONV_EVERY_TEST"] = "1"  # of all layers, not of those that `make test` draws
    from tests.test_tools import MATRIX, TESTS
    from tools.pages import write_table

    if "--write" in sys.argv:
        write_table(PAGE, "compatibility.py", table(MATRIX))
    else:
        sys.exit(run(MATRIX, TESTS))
