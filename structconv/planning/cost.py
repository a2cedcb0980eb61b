"""`Cost`: what a path does, in operations and bytes, and how long a machine takes for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from structconv.planning.machine import Machine


@dataclass(frozen=True)
class Cost:
    """A prediction from shapes, nonzero counts and factorisation; values never enter.

    Args:
        flops: floating-point operations; a multiplication and an addition are two.
        bytes: bytes streamed to and from memory.
        gathered: bytes read row by row at indices, which is slower.
        peak_bytes: bytes held beside the arguments and the result.
    """

    flops: float = 0.0
    bytes: float = 0.0
    gathered: float = 0.0
    peak_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.gathered + other.gathered,
                    self.peak_bytes + other.peak_bytes)

    def repeated(self, times: float) -> Cost:
        """The same work `times` times, in the same memory."""
        return Cost(times * self.flops, times * self.bytes, times * self.gathered, self.peak_bytes)

    def seconds(self, machine: Machine, itemsize: int = 4) -> float:
        """Predicted time: operations and bytes one after the other, at the machine's rates.

        `itemsize` is that of the dtype: a float64 product runs at half the rate of a float32 one.
        """
        rate = machine.gflops * min(1.0, 4 / itemsize)
        return (self.flops / rate + self.bytes / machine.copy_gbs + self.gathered / machine.gather_gbs) * 1e-9
