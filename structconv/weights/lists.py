"""One weight for each part of a basis `a | b`, or of a mixture whose parts have separate inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv.errors import ConfigError, ShapeError, class_remedy
from structconv.shapes import sum_tensors
from structconv.torch_compat import called
from structconv.weights.base import BoundWeight, Device, Energy, Weight
from structconv.weights.whole import Full

__all__ = ["BoundWeights", "MixtureWeights", "WeightList"]


class WeightList(Weight):
    """One weight for each part of a basis `a | b`, in order; the variance is shared in proportion to their K.

    A layer names their parameters by their numbers, `weight.0.theta`, `weight.1.theta`, ...

    Example:

        >>> from structconv import Conv, Full, Identity, Separable, Shifts
        >>> layer = Conv(Shifts([-1, 1]) | Identity(), 4, 8, weight=[Separable(rank=1), Full()])
        >>> layer.weight
        WeightList([Separable(1, K=2, P=4, Q=8), Full(K=1, P=4, Q=8)])
    """

    parts: tuple[Weight, ...]

    def __init__(self, weights: Sequence[Weight]) -> None:
        if not weights or not all(isinstance(weight, Weight) for weight in weights):
            raise ConfigError("WeightList", "weights must be one or more Weight objects", repr(weights),
                              next(filter(None, map(class_remedy, weights)), ""))
        self.parts = tuple(weights)

    def _module(self, sizes: tuple[int, ...], in_channels: int, out_channels: int, dtype: torch.dtype | None,
                device: Device) -> BoundWeight:
        if len(sizes) != len(self.parts):
            raise ConfigError("WeightList", f"weights must be {len(sizes)}, one for each part of the basis",
                              len(self.parts), "The parts are those that | joins; a single Weight serves all of them.")
        parts = [part.bound(size, channels, out_channels, dtype=dtype, device=device)
                 for part, size, channels in zip(self.parts, sizes, self._channels(in_channels), strict=True)]
        return BoundWeights(self, sum(sizes), in_channels, out_channels, parts)

    def _channels(self, in_channels: int) -> Sequence[int]:
        """P of each part."""
        return (in_channels,) * len(self.parts)

    @property
    def is_value(self) -> bool:
        return all(part.is_value for part in self.parts)

    @property
    def orders(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("per_part",) if any(part.orders for part in self.parts) else ()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple([tensor for part in self.parts for tensor in part.tensors])

    @property
    def size(self) -> int:
        return sum([part.size for part in self.parts])

    @property
    def in_channels(self) -> int:
        return self.parts[0].in_channels

    @property
    def out_channels(self) -> int:
        return self.parts[0].out_channels

    def check(self) -> None:
        for part in self.parts:
            part.check()
        channels = {(part.in_channels, part.out_channels) for part in self.parts}
        if len(channels) > 1:
            raise ShapeError("WeightList", "parts must share their channels (P, Q)", sorted(channels))

    def dense(self) -> Tensor:
        return torch.cat([part.dense().to(dtype=self.dtype, device=self.device) for part in self.parts])

    def expand(self, x: Tensor) -> Tensor:
        return torch.cat([part.expand(x) for part in self.parts], dim=-3)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        pieces = r.split([part.size for part in self.parts], dim=-3)
        terms = [part.contract(piece) for part, piece in zip(self.parts[:-1], pieces[:-1], strict=True)]
        return sum_tensors([*terms, self.parts[-1].contract(pieces[-1], bias)])

    def slice(self, start: int, stop: int) -> Weight:
        pieces, at = [], 0
        for part in self.parts:
            size = part.size
            low, high = max(start - at, 0), min(stop - at, size)
            if low < high:
                pieces.append(part if high - low == size else part.slice(low, high))
            at += size
            if at >= stop:
                break
        return pieces[0] if len(pieces) == 1 else WeightList.of(tuple(pieces))

    def expand_flops(self) -> int:
        return sum([part.expand_flops() for part in self.parts])

    def contract_flops(self) -> int:
        return sum([part.contract_flops() for part in self.parts])

    def __repr__(self) -> str:
        return super().__repr__() if self.is_value else f"{type(self).__name__}([{', '.join(map(repr, self.parts))}])"


class MixtureWeights(WeightList):
    """One weight for each part of a mixture, with the P of that part's x; P in all is their sum.

    The matrices of a part are zero at the channels of the others. The parts share their outputs.

    Args:
        weights: one for each part, or one for all.
        channels: the P of each part.

    Example:

        >>> from structconv import Conv, Identity
        >>> layer = Conv(Identity().of("words") | Identity().of("tags"), {"words": 4, "tags": 2}, 8)
        >>> layer({"words": torch.randn(5, 4), "tags": torch.randn(5, 2)}).shape
        torch.Size([5, 8])
    """

    def __init__(self, weights: Weight | Sequence[Weight], channels: Sequence[int]) -> None:
        super().__init__([weights] * len(channels) if isinstance(weights, Weight) else weights)
        self.channels = tuple(channels)

    def _channels(self, in_channels: int) -> Sequence[int]:
        return self.channels

    @property
    def in_channels(self) -> int:
        return sum([part.in_channels for part in self.parts])

    def check(self) -> None:
        for part in self.parts:
            part.check()
        channels = {part.out_channels for part in self.parts}
        if len(channels) > 1:
            raise ShapeError("MixtureWeights", "parts must share their output channels Q", sorted(channels))

    def dense(self) -> Tensor:
        blocks, before = [], 0
        for part in self.parts:
            after = self.in_channels - before - part.in_channels
            blocks.append(F.pad(part.dense().to(dtype=self.dtype, device=self.device), (0, 0, before, after)))
            before += part.in_channels
        return torch.cat(blocks)

    def expand(self, x: Tensor) -> Tensor:  # a plan multiplies each part with its own x instead
        return Full.of(self.dense()).expand(x)

    def contract(self, r: Tensor, bias: Tensor | None = None) -> Tensor:
        return Full.of(self.dense()).contract(r, bias)

    def slice(self, start: int, stop: int) -> Weight:
        return Full.of(self.dense()[start:stop])

    def __repr__(self) -> str:
        return super().__repr__() if self.is_value else f"{super().__repr__()[:-1]}, channels={self.channels})"


class BoundWeights(BoundWeight):
    """The modules of a list of weights, each a child by its number.

    Example:

        >>> from structconv import Full
        >>> from structconv.weights import WeightList
        >>> [name for name, _ in WeightList([Full(), Full()]).bound([1, 2], 4, 8).named_parameters()]
        ['0.theta', '1.theta']
    """

    def __init__(self, kind: WeightList, size: int, in_channels: int, out_channels: int,
                 parts: Sequence[BoundWeight]) -> None:
        super().__init__(kind, size, in_channels, out_channels, {}, {})
        for number, part in enumerate(parts):
            self.add_module(str(number), part)

    @property
    def weights(self) -> list[BoundWeight]:
        """The modules, in order."""
        return cast("list[BoundWeight]", list(self._modules.values()))

    def forward(self, derived: bool = True) -> Weight:
        parts = tuple([called(part) for part in self._modules.values()])  # type: ignore[arg-type]
        return parts[0] if type(self.kind) is WeightList and len(parts) == 1 else self.kind._over({"parts": parts})

    def reset_parameters(self, energy: Energy = None, variance: float = 1.0) -> None:
        at = 0
        for weight in self.weights:
            span = slice(at, at + weight.size)
            at += weight.size
            own = energy[(span,) * energy.dim()] if isinstance(energy, Tensor) and energy.dim() else energy
            weight.reset_parameters(own, variance * weight.size / self.size)

    def scale_(self, factor: float | Tensor) -> None:
        for weight in self.weights:
            weight.scale_(factor)

    def __repr__(self) -> str:
        return f"{type(self.kind).__name__}([{', '.join(map(repr, self.weights))}])"
