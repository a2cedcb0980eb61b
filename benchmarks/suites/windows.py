"""Attention within windows: the sliding window of a sequence, and the square neighborhoods of an image."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.case import Case, Comparison, Entrant, Size, leaf
from benchmarks.rates import products
from structconv import ops
from structconv.bases import scores
from structconv.bases.positions import GridLookup
from structconv.structures import Grid, Window

__all__ = ["CASES"]

HEADS, DIM = 4, 32


def _tables(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return leaf(*shape), leaf(*shape, seed=1), leaf(*shape, seed=2)


def _window(sizes: Callable[[Size], tuple[int, ...]], radius: int, size: Size) -> Comparison:
    """softmax(q k / sqrt(D)) v over the inputs within a radius of each output, on every axis."""
    grid = Grid(sizes(size))
    window, length = Window(radius, grid=grid), grid.num_entries
    pairs = window.edge_bound(length, length) or 0
    q, k, v = _tables(1, HEADS, length, DIM)

    def run() -> Tensor:
        basis = (scores.Bilinear(q, k) * DIM**-0.5).masked(keep=window)
        return ops.apply(basis.softmax(over="inputs"), v)

    return Comparison(ours=Entrant(name="ours", run=run, inputs=(q, k, v)),
                      peers=tuple(_peers(grid, radius, length)), edges=pairs,
                      size=f"{HEADS} heads of {DIM}, {' x '.join(map(str, grid.shape))}, radius {radius}",
                      least=products(4.0 * HEADS * pairs * DIM, 3.5))


def _relative(sides: tuple[int, int], radius: int | None, batch: int, size: Size) -> Comparison:
    """A learned bias for each offset on a grid, within a radius or whole; SDPA takes it materialized."""
    side = size.pick(*sides)
    grid, reach = Grid((side, side)), side - 1 if radius is None else radius
    length = grid.num_entries
    (q, k, v), peer = (_tables(batch, HEADS, length, DIM) for _ in range(2))
    table, table_peer = (leaf(HEADS, 2 * reach + 1, 2 * reach + 1, seed=3) for _ in range(2))
    offset = grid.coordinates().unsqueeze(0) - grid.coordinates().unsqueeze(1)
    near = offset.abs().amax(-1) <= reach
    index = ((offset + reach).clamp_(0, 2 * reach) * torch.tensor([2 * reach + 1, 1])).sum(-1)

    def run() -> Tensor:
        basis = scores.Bilinear(q, k) * DIM**-0.5 + GridLookup(table, grid)
        shown = basis if radius is None else basis.masked(keep=Window(radius, grid=grid))
        return ops.apply(shown.softmax(over="inputs"), v)

    def materialized() -> Tensor:
        bias = table_peer.flatten(1)[:, index]
        return F.scaled_dot_product_attention(*peer, attn_mask=bias if radius is None else
                                              bias.masked_fill(~near, -torch.inf))

    return Comparison(ours=Entrant(name="ours", run=run, inputs=(q, k, v, table)),
                      peers=(Entrant(name="torch sdpa", run=materialized, inputs=(*peer, table_peer),
                                     needs=24.0 * HEADS * length**2),),
                      size=f"{batch} x {HEADS} heads of {DIM}, {side} x {side}, "
                           f"{'all of it' if radius is None else f'radius {radius}'}")


def _peers(grid: Grid, radius: int, length: int) -> list[Entrant]:
    leaves = _tables(1, HEADS, length, DIM)
    near = (grid.coordinates().unsqueeze(0) - grid.coordinates().unsqueeze(1)).abs().amax(-1) <= radius
    result = [Entrant(name="torch sdpa", run=partial(F.scaled_dot_product_attention, *leaves, near), inputs=leaves,
                     needs=12.0 * HEADS * length**2)]
    unfolded = _tables(1, HEADS, length, DIM)
    offsets = (2 * radius + 1)**grid.ndim
    result.append(Entrant(name="torch unfold", run=partial(_unfold, grid, radius, *unfolded), inputs=unfolded,
                         needs=20.0 * HEADS * length * offsets * DIM))
    return result


def _unfold(grid: Grid, radius: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """With the neighbors of every output side by side: (..., N, D, W) tensors."""
    inside = _neighbors(grid, radius, q.new_ones(1, 1, grid.num_entries, 1))[0, 0, :, 0] > 0
    raw = (q.unsqueeze(-2) @ _neighbors(grid, radius, k)).squeeze(-2) * DIM**-0.5
    weights = raw.masked_fill(~inside, -torch.inf).softmax(-1)
    return (_neighbors(grid, radius, v) @ weights.unsqueeze(-1)).squeeze(-1)


def _neighbors(grid: Grid, radius: int, x: Tensor) -> Tensor:
    """(..., N, D) -> (..., N, D, W), zero off the grid."""
    width, axes = 2 * radius + 1, grid.ndim
    y = F.pad(x.unflatten(-2, grid.shape), (0, 0, *(radius, radius) * axes))
    for axis in range(axes):
        y = y.unfold(axis + x.dim() - 2, width, 1)
    return y.flatten(-axes).flatten(x.dim() - 2, x.dim() - 3 + axes)


def _sequence(size: Size) -> tuple[int, ...]:
    return (size.pick(1024, 4096),)


def _image(size: Size) -> tuple[int, ...]:
    side = size.pick(28, 56) if size.edges is None else math.isqrt(size.edges)
    return side, side


CASES = (
    Case(suite="windows", name="window-1d", build=partial(_window, _sequence, 32)),
    Case(suite="windows", name="window-1d-wide", build=partial(_window, _sequence, 128), headline=False),
    Case(suite="windows", name="window-2d", build=partial(_window, _image, 3)),
    Case(suite="windows", name="window-2d-bias", build=partial(_relative, (28, 56), 3, 1)),
    Case(suite="windows", name="swin", build=partial(_relative, (7, 7), None, 64), headline=False),
)
