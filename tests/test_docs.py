"""The README's example runs, its table is made of expressions that build, and the reference names what users call."""

import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

from structconv import bases, data, errors, mechanisms, nn, ops, structures, weights
from structconv.primitives import memory

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
#: Names of types, and of what users write as operators.
UNDOCUMENTED = {"structconv.bases": {"Algebra", "operator"}, "structconv.mechanisms": {"Operation"}}
EXPRESSIONS = re.findall(r"(?m)^\| ([^|`]+) \| `(Conv.*)` \|$", README)


def test_example_of_readme(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"(?s)```python\n(.*?)```", README)
    exec(compile(code, "README.md", "exec"), {})
    assert "cheapest" in capsys.readouterr().out


@pytest.mark.parametrize("system, expression", EXPRESSIONS, ids=[system for system, _ in EXPRESSIONS])
def test_expression_of_readme(system: str, expression: str) -> None:
    names = {name: getattr(home, name) for home in (bases, structures, mechanisms, weights, nn)
             for name in home.__all__}
    names |= {"P": 16, "Q": 16, "D": 4, "R": 3, "p": mechanisms.PredictedPosition()}
    layer = eval(expression.replace(r"\|", "|"), names)
    assert isinstance(layer, torch.nn.Module)


def test_readme_links_exist() -> None:
    missing = [link for link in re.findall(r"\]\((?!https?:)([^)#]+)", README) if not (ROOT / link).exists()]
    assert not missing


@pytest.mark.parametrize("home", [bases, data, errors, mechanisms, memory, nn, ops, structures, weights])
def test_reference_has_every_public_name(home) -> None:
    """By its module, or by itself."""
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    modules = re.findall(r"automodule:: (structconv\.[\w.]+)$", pages, re.MULTILINE)
    documented = set(re.findall(rf"auto(?:class|function|data):: {home.__name__}\.(\w+)$", pages, re.MULTILINE))
    documented.update(*[import_module(module).__all__ for module in modules
                        if f"{module}.".startswith(f"{home.__name__}.")])
    assert set(home.__all__) - documented == UNDOCUMENTED.get(home.__name__, set())


#: What models, loaders and the loop are made of, and nobody else calls.
INNER = {"models.tokens", "data.image_files", "data.pickles", "data.tables"}


def test_reference_has_every_module_of_models_data_and_training() -> None:
    pages = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "reference").glob("*.md"))
    documented = set(re.findall(r"automodule:: structconv_systems\.((?:models|data|train)\.\w+)$", pages, re.MULTILINE))
    there = {f"{folder}.{path.stem}" for folder in ("models", "data", "train")
             for path in (ROOT / "systems" / "structconv_systems" / folder).glob("*.py") if path.stem != "__init__"}
    assert there - INNER == documented
