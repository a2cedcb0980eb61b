"""Public names have an example in their docstring, which runs."""

from __future__ import annotations

import doctest

import pytest
import torch

import structconv
from structconv import bases, mechanisms, nn, ops, structures, weights

HOMES = (structconv, bases, mechanisms, nn, ops, structures, weights)
NAMES = {f"{home.__name__}.{name}": getattr(home, name) for home in HOMES for name in home.__all__}
EXAMPLES = {name: held for name, held in NAMES.items() if ">>>" in (held.__doc__ or "")}
#: Constants, types of annotations, and a setting of the whole process.
NO_EXAMPLE = {"STRUCTURE", "STRUCTURE_IF_GIVEN", "AnyStructure", "Structure", "keep_memory"}
#: To do: what an expression or a layer creates, or a mechanism derives from.
TO_DO = {
    "structconv.bases": {"Algebra", "CuboidSpec", "Pairs", "operator"},
    "structconv.mechanisms": {"GridMechanism", "Mixture", "Operation", "Position", "Score", "Term"},
}


def test_public_names_have_an_example() -> None:
    without = {home.__name__: {name for name in home.__all__ if f"{home.__name__}.{name}" not in EXAMPLES} - NO_EXAMPLE
               for home in HOMES}
    assert {home: names for home, names in without.items() if names} == TO_DO


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name: str) -> None:
    example = doctest.DocTestParser().get_doctest(EXAMPLES[name].__doc__, {"torch": torch}, name, None, None)
    output: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(example, out=output.append)
    assert not output, "".join(output)
