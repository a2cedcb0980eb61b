"""The table of docs/seven-structures.md, written from the run that measured them.

    python tools/results.py RUN    records a finished run of `structconv compare digits`, and writes the table
    python tools/results.py        writes the table of the run that is recorded
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from structconv_systems.report.comparison import table_rows

__all__ = ["PAGE", "RECORDED", "block", "record", "written"]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGE, RECORDED, IMAGES = DOCS / "seven-structures.md", DOCS / "results" / "digits.json", DOCS / "images"
BEGIN, END = "<!-- results: written by tools/results.py -->\n", "<!-- end of results -->\n"
#: Pictures of a run that the pages show.
PICTURES = ("accuracy.png", "basis-mixed.png")
HEADERS = ("basis", "test accuracy, %", "parameters", "Mflop", "receptive field, pixels")
#: Of the columns of a run's table the one that depends on the machine is left out.
SECONDS = 4


def record(run: Path) -> None:
    """Keep the numbers of a run, what they were measured with, and its pictures."""
    summary, environment = (json.loads((run / name).read_text(encoding="utf-8"))
                            for name in ("summary.json", "environment.json"))
    kept = {"recipe": summary["recipe"], "seeds": summary["seeds"], "bases": summary["bases"],
            **{name: environment[name] for name in ("structconv", "torch", "python", "threads")}}
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    for name in PICTURES:
        shutil.copyfile(run / "pictures" / name, IMAGES / name)


def block(recorded: dict[str, Any]) -> str:
    """The table of a recorded run, and what was measured, in Markdown."""
    rows = [[cell.replace("|", r"\|") for i, cell in enumerate(row) if i != SECONDS] for row in table_rows(recorded)]
    lines = [HEADERS, ("---", *["---:"] * (len(HEADERS) - 1)), *rows]
    threads = "one thread" if recorded["threads"] == 1 else f"{recorded['threads']} threads"
    words = (f"One run of {recorded['seeds']} seeds on {threads}, PyTorch {recorded['torch']}: accuracy with its\n"
             "standard deviation over the seeds, flops of one image.")
    return "\n".join([words, "", *(f"| {' | '.join(line)} |" for line in lines)]) + "\n"


def written(text: str, recorded: dict[str, Any]) -> str:
    """A page with the table between its two marks."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block(recorded)}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> None:
    """Record the run that is given, if one is, and write the table."""
    for run in arguments:
        record(Path(run))
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), recorded), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
