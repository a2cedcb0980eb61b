"""The notebooks run as scripts: their cells in one namespace, without a kernel. `make docs` executes them with one."""

import ast
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch

from tests.support.layers import drawn

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
DATA = Path(os.environ.get("STRUCTCONV_DATA", ROOT.parent / "shared" / "data"))


def shown(code: str, names: dict[str, Any]) -> Any:
    """Run a cell, and return the value of its last line if that is an expression, as a notebook shows it."""
    body = ast.parse(code).body
    last = body.pop() if isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), "<cell>", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)


@pytest.mark.parametrize("path", drawn(NOTEBOOKS[::-1], 2), ids=lambda path: path.stem)
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebook = json.loads(path.read_text(encoding="utf-8"))
    needs = notebook["metadata"].get("structconv", {})
    if "module" in needs and importlib.util.find_spec(needs["module"]) is None:
        pytest.skip(f"{needs['module']} is not installed")
    if "data" in needs and not (DATA / needs["data"]).exists():
        pytest.skip(f"there is no {needs['data']} in the data folder (STRUCTCONV_DATA)")
    monkeypatch.setenv("STRUCTCONV_DATA", str(DATA))
    plt.switch_backend("agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    with torch.random.fork_rng():
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                value = shown("".join(cell["source"]), names)
                if hasattr(value, "_repr_png_"):
                    assert value._repr_png_().startswith(b"\x89PNG")
    plt.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert cells[0]["cell_type"] == "markdown" and "".join(cells[0]["source"]).startswith("# ")
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
