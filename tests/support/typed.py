"""What a type checker refuses of the public names, and what it takes: `make lint` checks this file, nothing runs it.

An unused `type: ignore` is an error, so each line that has one must be wrong.
"""

from typing import assert_type

import torch

import structconv
from structconv import Adjacency, Basis, Conv, DotProduct, GCNConv, Graph, Grid, Identity, Mechanism, Samples, Window


def calls() -> None:
    """Right ones first."""
    x, graph, grid = torch.ones(3, 4), Graph.complete(3), Grid(3)
    layer = Conv(DotProduct().softmax() | Identity(), 4, 4)
    layer.forward(x, structure=grid)
    layer.forward(x, Samples([1, 2]), z=x)
    layer.plan(x, structure={"bonds": graph, "line": grid, "near": Window(1)})
    GCNConv(4, 4).forward(x, graph)
    assert_type((DotProduct() @ Adjacency()).softmax(), Mechanism)
    assert_type(layer.basis(x, structure=structconv.batch([grid, grid])), Basis)
    print(structconv.nope)  # type: ignore
    DotProduct().sofmax()  # type: ignore
    layer.forward(x, structure="bonds")  # type: ignore
    layer.forward(x, x)  # type: ignore
    layer.plan(x, structure=[graph])  # type: ignore
    layer.basis(x, structure={"bonds": 3})  # type: ignore
    GCNConv(4, 4).forward(x, structure=3)  # type: ignore
    Conv("adjacency", 4, 4)  # type: ignore
