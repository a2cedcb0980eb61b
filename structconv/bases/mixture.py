"""`Mixture`: concatenated heads whose parts have inputs of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.bases.base import Basis, value
from structconv.bases.sizes import OverParts
from structconv.errors import ShapeError
from structconv.shapes import concatenate, total

__all__ = ["Mixture"]


@value
class Mixture(OverParts):
    """The K matrices of each part, in order, over the concatenated inputs of all parts: M = M_1 + M_2 + ...

    A matrix of a part is zero at the inputs of the others. The parts share their outputs.

    Raises:
        ShapeError: the parts differ in their number of outputs, or there is no part.

    Example:

        >>> from structconv import Dense
        >>> from structconv.bases import Mixture
        >>> Mixture((Dense(torch.ones(1, 2, 3)), Dense(torch.ones(1, 4, 3)))).num_inputs
        6
    """

    parts: tuple[Basis, ...]

    def __post_init__(self) -> None:
        counts = [part.num_outputs for part in self.parts]
        if not counts or any(count != counts[0] for count in counts):
            raise ShapeError("Mixture", "all parts of a | must have the same outputs N",
                             " and ".join(f"N={count}" for count in counts) or "none")

    @property
    def num_inputs(self) -> int:
        return sum(part.num_inputs for part in self.parts)

    def apply(self, r: Tensor) -> Tensor:
        return concatenate([part.apply(own) for part, own in self._own(r)], -3)

    def analysis(self, x: Tensor) -> Tensor:
        own = x.split([part.num_inputs for part in self.parts], -2)
        return concatenate([part.analysis(rows) for part, rows in zip(self.parts, own, strict=True)], -3)

    def synthesis(self, r: Tensor) -> Tensor:
        return total([part.synthesis(own) for part, own in self._own(r)])

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        blocks, before = [], 0
        for part in self.parts:
            after = self.num_inputs - before - part.num_inputs
            blocks.append(F.pad(part.dense(dtype or self.dtype), (0, 0, before, after)))
            before += part.num_inputs
        return concatenate(blocks, -3)

    def _own(self, r: Tensor) -> list[tuple[Basis, Tensor]]:
        """Each part with what its heads take at its inputs."""
        heads = r.split([part.size for part in self.parts], -3)
        sizes = [part.num_inputs for part in self.parts]
        return [(part, own.split(sizes, -2)[i]) for i, (part, own) in enumerate(zip(self.parts, heads, strict=True))]

    def __repr__(self) -> str:
        return f"({' | '.join(map(repr, self.parts))})"
