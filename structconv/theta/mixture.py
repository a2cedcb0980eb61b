"""`MixtureTheta`: Theta of a basis whose parts read inputs of their own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.bases.base import value
from structconv.errors import ShapeError
from structconv.theta.base import Theta, sum_tensors
from structconv.theta.whole import FullTheta

__all__ = ["MixtureTheta"]


@value
class MixtureTheta(Theta):
    """Weights side by side, one for each part of a mixture, over the channels of all parts: P = P_1 + P_2 + ...

    The matrices of a part are zero at the channels of the others. The parts share their outputs.
    """

    parts: tuple[Theta, ...]

    def check(self) -> None:
        for part in self.parts:
            part.check()
        channels = {part.out_channels for part in self.parts}
        if len(channels) > 1:
            raise ShapeError("MixtureTheta", "parts must share their output channels Q", sorted(channels))

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def in_channels(self) -> int:
        return sum(part.in_channels for part in self.parts)

    @property
    def out_channels(self) -> int:
        return self.parts[0].out_channels

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for part in self.parts for t in part.tensors)

    def dense(self) -> Tensor:
        blocks, before = [], 0
        for part in self.parts:
            after = self.in_channels - before - part.in_channels
            blocks.append(F.pad(part.dense().to(dtype=self.dtype, device=self.device), (0, 0, before, after)))
            before += part.in_channels
        return torch.cat(blocks)

    def expand(self, x: Tensor) -> Tensor:
        own = x.split([part.in_channels for part in self.parts], dim=-1)
        return torch.cat([part.expand(channels) for part, channels in zip(self.parts, own, strict=True)], dim=-3)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        heads = r.split([part.size for part in self.parts], dim=-3)
        channels = [part.in_channels for part in self.parts]
        own = [head.split(channels, dim=-1)[i] for i, head in enumerate(heads)]
        terms = [part.contract(piece) for part, piece in zip(self.parts[:-1], own[:-1], strict=True)]
        return sum_tensors([*terms, self.parts[-1].contract(own[-1], bias)])

    def slice(self, start: int, stop: int) -> Theta:
        return FullTheta(self.dense()[start:stop])

    def expand_flops(self) -> int:
        return sum(part.expand_flops() for part in self.parts)

    def contract_flops(self) -> int:
        return sum(part.contract_flops() for part in self.parts)
