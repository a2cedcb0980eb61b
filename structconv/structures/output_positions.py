"""`OutputPositions`: the positions of a call's outputs among its inputs, as in step-by-step decoding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.derived import values_known
from structconv.errors import StructureError, text_of
from structconv.structures.masks import And, Device, Not, Or, Support
from structconv.structures.supports import Causal, Window
from structconv.structures.values import Structure, altered, key_of, structure

__all__ = ["At", "OutputPositions", "at_positions"]


@structure()
class OutputPositions(Structure):
    """Output n has the position of input `first` + n, or `positions[..., n]`."""

    first: int = 0
    positions: Tensor | None = None

    def _static(self) -> Any:
        """One plan serves all values of `first`."""
        return type(self), key_of(self.positions)

    @classmethod
    def of(cls, positions: int | Tensor | None) -> OutputPositions | None:
        """Convert the argument `positions` of a call; `None` if output n has the position of input n."""
        if positions is None or (type(positions) is int and positions == 0):
            return None
        if isinstance(positions, Tensor):
            known = values_known(positions) and positions.is_cpu and positions.numel() > 0
            whole = positions.dtype in (torch.int64, torch.int32) and positions.dim() > 0
            if whole and not (known and int(positions.min()) < 0):
                return cls(0, positions)
        elif (type(positions) is int and positions > 0) or isinstance(positions, torch.SymInt):
            return cls(positions)
        received = f"{positions.dtype} {text_of(positions.shape)}" if isinstance(positions, Tensor) else repr(positions)
        raise StructureError("positions", "positions must be that of the first output, an integer >= 0, or those of "
                             "all, an integer tensor (..., N)", received)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions of the positions."""
        return () if self.positions is None else tuple(self.positions.shape[:-1])

    def check(self, outputs: int) -> None:
        """Raise `StructureError` where there are not as many positions as outputs."""
        if self.positions is not None and self.positions.shape[-1] != outputs:
            raise StructureError("positions", f"positions must have shape (..., N={outputs})",
                                 tuple(self.positions.shape))

    def of_outputs(self, outputs: int, device: Device = None) -> Tensor:
        """Return the position of each output, (..., N)."""
        if self.positions is None:
            return torch.arange(self.first, self.first + outputs, device=device)
        return self.positions.to(device)

    def least(self) -> int:
        """Return the lowest position of an output."""
        return self.first if self.positions is None else int(self.positions.min())

    def moved(self, by: int) -> OutputPositions:
        """Return the positions after the first `by` inputs were removed."""
        if self.positions is None:
            return OutputPositions(self.first - by)
        return OutputPositions(0, self.positions - by) if by else self


@structure()
class At(Support):
    """The pairs (m, n) for which (m, position of output n) is in `support`."""

    support: Support
    output_positions: OutputPositions

    @property
    def num_inputs(self) -> int | None:
        return self.support.num_inputs

    @property
    def num_outputs(self) -> int | None:
        return None if self.output_positions.positions is None else self.output_positions.positions.shape[-1]

    @property
    def batch_shape(self) -> tuple[int, ...]:
        return self.output_positions.batch_shape

    def _contains(self, m: Tensor, n: Tensor) -> Tensor:
        positions = self.output_positions.positions
        at = n + self.output_positions.first if positions is None else positions.to(n.device)[..., n]
        return self.support._contains(m, at)

    def __repr__(self) -> str:
        first, positions = self.output_positions.first, self.output_positions.positions
        return f"{self.support!r} at {first if positions is None else 'positions'}"


def at_positions(mask: Any, output_positions: OutputPositions, inputs: int, outputs: int, or_none: bool = True) -> Any:
    """Return the mask for outputs at these positions; `None` if it keeps all pairs and `or_none`. A mask that was made
    for this number of outputs is returned unchanged."""
    result = _at(mask, output_positions, inputs, outputs)
    return At(mask, output_positions) if result is None and mask is not None and not or_none else result


def _at(mask: Any, output_positions: OutputPositions, inputs: int, outputs: int) -> Any:
    if isinstance(mask, And):
        first, second = (_at(side, output_positions, inputs, outputs) for side in (mask.first, mask.second))
        return altered(mask, first=first, second=second) if None not in (first, second) else (
            second if first is None else first)
    if isinstance(mask, Or):
        first, second = (_at(side, output_positions, inputs, outputs) for side in (mask.first, mask.second))
        return None if first is None or second is None else altered(mask, first=first, second=second)
    if isinstance(mask, Not):
        return altered(mask, kept=at_positions(mask.kept, output_positions, inputs, outputs, or_none=False))
    if not isinstance(mask, Support) or mask.num_inputs is not None or mask.num_outputs is not None:
        return mask
    return None if _keeps_all(mask, output_positions, inputs, outputs) else At(mask, output_positions)


def _keeps_all(mask: Support, output_positions: OutputPositions, inputs: int, outputs: int) -> bool:
    """Return True if all outputs are known to read all inputs; `StructureError` for a window that lacks its grid."""
    first, listed = output_positions.first, output_positions.positions is not None
    if isinstance(mask, Causal):
        return not listed and first >= inputs - 1
    if not isinstance(mask, Window):
        return False
    (radius, dilation), *others = mask.axes()
    if listed or others or dilation != 1:
        return False
    return first + outputs - 1 <= radius and inputs - 1 - first <= radius
