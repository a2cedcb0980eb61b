"""Bases whose outputs have positions among the inputs that differ from their numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.entrywise import OverChild
from structconv.bases.pairs import Block, Edges, Pairs
from structconv.bases.pairwise import Pairwise
from structconv.derived import Owner, values_known
from structconv.errors import StructureError
from structconv.shapes import broadcast
from structconv.structures.output_positions import OutputPositions

__all__ = ["Moved", "Selected", "placed"]


def placed(basis: Basis, output_positions: OutputPositions, outputs: int) -> Basis:
    """Return the basis for outputs at these positions, by offsets from there or by selecting its outputs; a
    `StructureError` where entries are absent, or the outputs are not the inputs."""
    if isinstance(basis, Pairwise):
        if basis.support() is not None:
            raise StructureError("positions", "positions must be left out where a mechanism masks what it makes",
                                 repr(basis), "Mask it in the expression: mechanism.masked(keep=...).")
        return Moved(basis, output_positions, outputs)
    if basis.num_inputs != basis.num_outputs:
        raise StructureError("positions", "positions must be left out where outputs are other entries than inputs",
                             f"M={basis.num_inputs}, N={basis.num_outputs} of {basis!r}", "A mechanism of one's own "
                             "may compute the outputs at inputs.positions_of_outputs(), and name \"positions\" in "
                             "reads.")
    return Selected(basis, output_positions, outputs)


class _PairsAtPositions(Pairs):
    """Pairs whose outputs have positions."""

    output_positions: OutputPositions

    def target_index(self) -> Tensor:
        """The position of each pair's output, with an axis for heads if positions have leading dimensions."""
        if self.output_positions.positions is None:
            return super().target_index() + self.output_positions.first  # type: ignore[safe-super]
        positions = self.output_positions.positions.to(self.device)
        return self.target(positions.unsqueeze(-2) if positions.dim() > 1 else positions)


@dataclass(frozen=True, eq=False)
class _BlockAtPositions(_PairsAtPositions, Block):
    output_positions: OutputPositions


@dataclass(frozen=True, eq=False)
class _EdgesAtPositions(_PairsAtPositions, Edges):
    output_positions: OutputPositions


def _at_positions(pairs: Pairs, output_positions: OutputPositions) -> Pairs:
    if isinstance(pairs, Edges):
        return _EdgesAtPositions(pairs.graph, pairs.dtype, output_positions)
    assert isinstance(pairs, Block)
    return _BlockAtPositions(pairs.num_inputs, pairs.num_outputs, pairs.rows, pairs.columns, pairs.dtype, pairs.device,
                             output_positions)


@value
class _Placed(OverChild):
    """The matrices of the child at the positions of the outputs."""

    ENTRY_COUNTS = ("outputs",)

    child: Basis
    output_positions: OutputPositions
    outputs: int

    @property
    def num_outputs(self) -> int:
        return self.outputs

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return broadcast(self.child.batch_shape, self.output_positions.batch_shape)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the child, which x must share."""
        return getattr(self.child, "dtype", None)


@value
class Moved(_Placed, Pairwise):
    """a_kmn of `child`, which depends only on positions, with n the position of the output."""

    def evaluate(self, pairs: Pairs) -> Tensor:
        return cast(Pairwise, self.child).evaluate(_at_positions(pairs, self.output_positions))

    def by_outputs(self, inputs: int, outputs: int, dtype: torch.dtype, owner: Owner) -> Tensor:
        """The entries of all pairs, (..., 1 or B, K, N, M)."""
        entries = self.dense(dtype).mT
        return entries if entries.dim() > 3 else entries.unsqueeze(0)


@value
class Selected(_Placed):
    """The outputs of `child` at the given positions, in their order; computes all of them first."""

    def apply(self, r: Tensor) -> Tensor:
        return self._select(self.child.apply(r), -2, heads=True)

    def analysis(self, x: Tensor) -> Tensor:
        return self._select(self.child.analysis(x), -2, heads=True)

    def synthesis(self, r: Tensor) -> Tensor:
        return self._select(self.child.synthesis(r), -2, heads=False)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        return self._select(self.child.dense(dtype), -1, heads=True)

    def _select(self, y: Tensor, axis: int, heads: bool) -> Tensor:
        """The outputs at the positions, of all along an axis."""
        first, positions, all_outputs = self.output_positions.first, self.output_positions.positions, y.shape[axis]
        if positions is None:
            if first + self.outputs > all_outputs:
                raise _beyond(all_outputs, f"{first} to {first + self.outputs - 1}")
            return y.narrow(axis, first, self.outputs)
        # torch.take_along_dim counts from 0 again where an index is too large
        if positions.is_cpu and values_known(positions) and positions.numel() and int(positions.max()) >= all_outputs:
            raise _beyond(all_outputs, int(positions.max()))
        index = positions.to(y.device, torch.int64).unsqueeze(-3 - axis)
        index = index.unsqueeze(-3) if heads else index
        axes = max(y.dim(), index.dim())
        y, index = y[(None,) * (axes - y.dim())], index[(None,) * (axes - index.dim())]
        return torch.take_along_dim(y, index, axis)


def _beyond(all_outputs: int, got: int | str) -> StructureError:
    return StructureError("positions", f"positions must be below the number of outputs, {all_outputs}", got,
                          "Without z there are as many outputs as inputs: for fewer call layer(x, z=z, positions=...).")
