"""A checker knows the public names and what a call takes: it refuses others, and completes what follows a dot."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import structconv

ROOT = Path(structconv.__file__).parent.parent
HEAD = """
import torch
import structconv
from structconv import Adjacency, Conv, DotProduct, GCNConv, Graph, Grid, Identity, Samples, Window
x, graph, grid = torch.ones(3, 4), Graph.complete(3), Grid(3)
layer = Conv(DotProduct().softmax() | Identity(), 4, 4)
"""
RIGHT = """
layer.forward(x, structure=grid)
layer.forward(x, Samples([1, 2]), z=x)
layer.plan(x, structure={"bonds": graph, "line": grid, "near": Window(1)})
GCNConv(4, 4).forward(x, graph)
reveal_type((DotProduct() @ Adjacency()).softmax())
reveal_type(layer.basis(x, structure=structconv.batch([grid, grid])))
"""
WRONG = """
structconv.nope
DotProduct().sofmax()
layer.forward(x, structure="bonds")
layer.forward(x, x)
layer.plan(x, structure=[graph])
layer.basis(x, structure={"bonds": 3})
GCNConv(4, 4).forward(x, structure=3)
Conv("adjacency", 4, 4)
"""


@pytest.mark.slow
def test_mypy_refuses_what_is_wrong_and_nothing_else(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(HEAD + RIGHT + WRONG)
    done = subprocess.run([sys.executable, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", tmp_path / "use.py"],
                          capture_output=True, text=True, check=False, cwd=ROOT)
    first = (HEAD + RIGHT).count("\n") + 2
    refused = {int(line) for line in re.findall(r"use\.py:(\d+): error", done.stdout)}
    assert refused == set(range(first, first + WRONG.strip().count("\n") + 1)), done.stdout
    assert re.findall(r'Revealed type is "(.+)"', done.stdout) == [
        "structconv.mechanisms.expression.Mechanism", "structconv.bases.base.Basis"]
