"""The pages of the systems: what the recorded outcomes render to, in one form."""

import importlib
import json
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from structconv.cli import _parser
from structconv_systems.recipes.register import RECIPES
from structconv_systems.report.results import render, render_recipe
from structconv_systems.train.options import Measured

DOCS = Path(__file__).parents[3] / "docs"
OUTCOMES = json.loads((DOCS / "systems.json").read_text(encoding="utf-8"))
SYSTEMS = [name for name, entry in RECIPES.items() if issubclass(entry.recipe, Measured)]


def test_the_table_is_that_of_the_outcomes() -> None:
    assert (DOCS / "systems.md").read_text(encoding="utf-8") == render(OUTCOMES, "systems")


def test_the_readme_counts_the_states_of_the_default_presets() -> None:
    default = [row for row in OUTCOMES if row["preset"] == "default" and not row["overrides"]]
    states = Counter(row["state"] for row in default)
    readme = " ".join((DOCS.parent / "README.md").read_text(encoding="utf-8").split())
    assert states.keys() == {"reproduced", "partly", "not shown"}  # none waits for a new run
    counted = (f"At default size {states['reproduced']} show the effect of their paper, {states['partly']} in part, "
               f"and {states['not shown']} do not show it")
    assert f"{len(SYSTEMS)} recipes [train](docs/training.md) published systems" in readme and counted in readme


COMMANDS = sorted({line for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md") if "_build" not in page.parts
                   for line in re.findall(r"(?m)^    (structconv [a-z]+ .*)$", page.read_text(encoding="utf-8"))})


def test_the_parser_takes_the_commands_of_the_pages() -> None:
    assert len(COMMANDS) > 50
    benchmarks = importlib.import_module("benchmarks.__main__").parser()  # which the verb calls
    for line in COMMANDS:
        verb, *words = shlex.split(line)[1:]
        parsed = benchmarks.parse_known_args(words) if verb == "bench" else _parser().parse_known_args([verb, *words])
        assert not parsed[1], line


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_system_has_a_page_in_the_form_of_all_with_its_outcomes(name: str) -> None:
    page = (DOCS / "systems" / f"{name}.md").read_text(encoding="utf-8")
    assert page == render_recipe([row for row in OUTCOMES if row["recipe"] == name], page)
    form = ("# ", "\n| paper |", "\n| here |", "\n| baseline |", f"\n    structconv train {name}",
            "\nDifferences from the paper:\n\n- ", "\n## Results\n", "\n### default\n")
    parts = [page.find(part) for part in form]
    assert parts[0] == 0 and -1 not in parts and parts == sorted(parts)
    if "![" in page:
        after = page[page.rindex("](../images/"):].split("\n\n")[1]
        assert after[0].isalnum(), "a picture has a caption"
