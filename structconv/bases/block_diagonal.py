"""`BlockDiagonal`: the bases of several samples, each over its own entries."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.sizes import OverParts
from structconv.errors import ShapeError
from structconv.shapes import concatenate
from structconv.structures.restriction import Restriction
from structconv.structures.samples import EachWithin, Samples
from structconv.structures.supports import Support

__all__ = ["BlockDiagonal"]


@value
class BlockDiagonal(OverParts):
    """A_k = diag(A_k^(1), ..., A_k^(B)): the matrices of sample b over its own inputs and outputs, zero elsewhere; all
    parts have one size K."""

    parts: tuple[Basis, ...]

    def __post_init__(self) -> None:
        if len({part.size for part in self.parts}) != 1:
            raise ShapeError("BlockDiagonal", "all parts must have the same size K", [part.size for part in self.parts])

    @property
    def size(self) -> int:
        return self.parts[0].size

    @property
    def num_inputs(self) -> int:
        return sum(part.num_inputs for part in self.parts)

    @property
    def num_outputs(self) -> int:
        return sum(part.num_outputs for part in self.parts)

    @property
    def has_scores(self) -> bool:
        return any(part.has_scores for part in self.parts)

    def support(self) -> Support | None:
        supports = tuple(part.support() for part in self.parts)
        sizes = ([part.num_inputs for part in self.parts], [part.num_outputs for part in self.parts])
        return None if not any(supports) else EachWithin(supports, Samples(*sizes))

    def restricted(self, to: Restriction) -> Basis | None:
        return None if to.number is None else self.parts[to.number]

    def apply(self, r: Tensor) -> Tensor:
        return concatenate([part.apply(own) for part, own in self._rows(r)], -2)

    def analysis(self, x: Tensor) -> Tensor:
        return concatenate([part.analysis(own) for part, own in self._rows(x)], -2)

    def synthesis(self, r: Tensor) -> Tensor:
        return concatenate([part.synthesis(own) for part, own in self._rows(r)], -2)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        blocks = [part.dense(dtype) for part in self.parts]
        rows, before = [], 0
        for block in blocks:
            rows.append(F.pad(block, (before, self.num_outputs - before - block.shape[-1])))
            before += block.shape[-1]
        return concatenate(rows, -2)

    def _rows(self, x: Tensor) -> list[tuple[Basis, Tensor]]:
        own = x.split([part.num_inputs for part in self.parts], -2)
        return list(zip(self.parts, own, strict=True))
