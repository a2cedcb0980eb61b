"""`Draw`: the dtype, the gradients, the leading dimensions and the channels of a call; `draws` crosses them."""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.errors import ShapeError, StructureError
from structconv.testing.specimens import Setup, Subject, with_dtype

__all__ = ["Draw", "Rounded", "draws"]

_MODES = (torch.float32, True), (torch.float32, False), (torch.float64, False)
_CHANNELS = (1, 3, 8)


class Rounded(NamedTuple):
    """A subject in float64, with numbers that float32 represents too, and in float32."""

    float64: Subject
    float32: Subject

    @classmethod
    def of(cls, subject: Subject) -> Rounded:
        """The subject, rounded."""
        low = with_dtype(subject, torch.float32)
        return cls(with_dtype(low, torch.float64), low)

    def like(self, draw: Draw, dtype: torch.dtype) -> Subject:
        """The subject of a call of the draw, computed in `dtype`."""
        return draw.of(self.float32 if dtype == torch.float32 else self.float64)


class Draw(NamedTuple):
    """One kind of call that a basis or a kernel must compute: the dtype of x, Theta and all tensors of the subject,
    whether gradients are wanted, the number of leading dimensions of x, and P."""

    dtype: torch.dtype
    gradients: bool
    dims: int
    channels: int

    @property
    def out_channels(self) -> int:
        """Q, another number than P."""
        return _CHANNELS[_CHANNELS.index(self.channels) - 2]

    def lead(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The leading dimensions of x, which broadcast to those that the subject has."""
        if self.dims == 0 or own in ((), (1,)):
            return (2, 3)[:self.dims]
        return own if self.dims == 1 else (3, *own)

    def of(self, subject: Subject) -> Subject:
        """The subject; a mechanism on content of these leading dimensions, unless it refuses them."""
        if not isinstance(subject, Setup):
            return subject
        z = None if subject.z is None else self._led(subject.z)
        led = dataclasses.replace(subject, x=self._led(subject.x), z=z)
        try:
            led.basis()
        except (ShapeError, StructureError):
            return subject
        return led

    def _led(self, t: Tensor) -> Tensor:
        """Return t with these leading dimensions, of other numbers in each sample."""
        own = tuple(t.shape[:-2])
        lead = self.lead(own)
        if lead == own:
            return t
        if self.dims == 0 or own == (1,):
            t, own = t.flatten(0, -3)[0], ()
        added = lead[:len(lead) - len(own)]
        scale = 0.5 ** torch.arange(math.prod(added))  # exact in each dtype
        return t * scale.to(t.dtype).view(*added, *(1 for _ in t.shape))

    def __str__(self) -> str:
        gradients = "" if self.gradients else " without gradients"
        return f"in {str(self.dtype).removeprefix('torch.')}{gradients}, {self.dims} leading dimensions, " \
               f"{self.channels} channels"


def draws(turn: int) -> list[Draw]:
    """Three draws, which have each dtype, mode, number of leading dimensions and number of channels; those of the turns
    0, 1 and 2 have all pairs of them: two orthogonal Latin squares."""
    return [Draw(*_MODES[(i + 2 * turn) % 3], i, _CHANNELS[(i + turn) % 3]) for i in range(3)]
