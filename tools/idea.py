"""The README's picture: the basis of one output drawn as arrows on an image, a graph and a sentence.

    python tools/idea.py

The numbers are those of the library: each arrow from input m to output n is an entry A[k, m, n] that is not zero.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor

from structconv import Adjacency, Cuboid, DotProduct, Graph, Grid

mpl.use("agg")
from matplotlib import pyplot

OUT = Path(__file__).parent.parent / "docs" / "images" / "idea.png"
INK, ARROW, TARGET = "#808080", "#3b7dd8", "#d8703b"
SENTENCE = ("the", "cat", "sat", "on", "the", "mat")


def image() -> tuple[Tensor, Tensor, int]:
    """Positions (M, 2), weights (M,) of the inputs of one output, and that output: a 3x3 convolution."""
    grid = Grid((5, 5))
    basis = Cuboid((3, 3)).basis(torch.zeros(25, 1), grid).dense()
    return torch.tensor([[column, -row] for row in range(5) for column in range(5)]).float(), basis.sum(0)[:, 12], 12


EDGES = [(0, 1), (1, 2), (2, 3), (3, 0), (1, 4), (4, 5), (2, 5), (3, 6), (6, 7)]


def graph() -> tuple[Tensor, Tensor, int]:
    """The same of a graph convolution."""
    both = torch.tensor([*EDGES, *[(target, source) for source, target in EDGES]]).mT
    basis = Adjacency(self_loops=True).basis(torch.zeros(8, 1), Graph(both, num_nodes=8)).dense()
    positions = torch.tensor([[0.3, -0.6], [1.6, 0.0], [2.4, -1.5], [0.9, -2.3], [3.1, 0.1], [3.9, -1.2], [0.2, -3.7],
                              [1.7, -4.0]])
    return positions, basis[0][:, 2], 2


def sentence() -> tuple[Tensor, Tensor, int]:
    """The same of one head of attention, with random parameters."""
    torch.manual_seed(2)
    words = torch.randn(len(SENTENCE), 16)
    attention = DotProduct(heads=1, dim=16).scaled().softmax().bound(16)
    weights = attention.basis(1.5 * words).dense()[0][:, 2].detach()
    return torch.tensor([[1.15 * place, 0.0] for place in range(len(SENTENCE))]), weights, 2


def draw(axis: Any, positions: Tensor, weights: Tensor, output: int, title: str, words: tuple[str, ...] = ()) -> None:
    """Entries as dots or words, and an arrow from each other input of the output, as wide as its weight is large."""
    others = weights.index_fill(0, torch.tensor(output), 0.0)
    for m, weight in enumerate((others / others.max()).tolist()):
        if weight > 0 and m != output:
            bend = 0.0 if not words else (-0.55 if m < output else 0.55)
            start, end = positions[m].tolist(), positions[output].tolist()
            shift = 0.28 if words else 0.0
            axis.annotate("", (end[0], end[1] + shift), (start[0], start[1] + shift), arrowprops={
                "arrowstyle": "-|>", "color": ARROW, "lw": 0.6 + 2.2 * weight, "shrinkA": 6, "shrinkB": 7,
                "alpha": 0.35 + 0.65 * weight, "connectionstyle": f"arc3,rad={bend}"})
    for m, (x, y) in enumerate(positions.tolist()):
        color = TARGET if m == output else INK
        if words:
            axis.text(x, y, words[m], ha="center", va="center", fontsize=11, color=color)
        else:
            axis.plot(x, y, "o", ms=9, color=color)
    (left, bottom), (right, top) = positions.min(0).values.tolist(), positions.max(0).values.tolist()
    axis.set_xlim(left - 0.6, right + 0.6)
    axis.set_ylim((-2.2, 2.6) if words else (bottom - 0.5, top + 0.5))
    axis.set_aspect("equal", anchor="C")
    axis.text(0.5, 1.04, title, fontsize=9, color=INK, ha="center", va="bottom", transform=axis.transAxes)
    axis.axis("off")


def main() -> None:
    """Write the picture."""
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.4), width_ratios=(1, 1.05, 1.4))
    draw(axes[0], *image(), "image: neighbors on a grid\nConv(Cuboid((3, 3)), P, Q)")
    nodes, weights, output = graph()
    for edge in EDGES:
        axes[1].plot(*nodes[list(edge)].mT.tolist(), color=INK, lw=0.8, zorder=0)
    draw(axes[1], nodes, weights, output, "graph: neighbors along edges\nConv(Adjacency(self_loops=True), P, Q)")
    draw(axes[2], *sentence(), "sentence: weights computed from the content\n"
         "Conv(DotProduct(heads=8).scaled().softmax(), P, Q)", SENTENCE)
    figure.tight_layout()
    figure.savefig(OUT, dpi=160, transparent=True)


if __name__ == "__main__":
    main()
