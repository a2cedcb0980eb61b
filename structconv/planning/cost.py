"""`Cost`: the operations and bytes of a path, and the predicted time on a machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from structconv.planning.fitted import FEW_COLUMNS, FEW_TAKEN, FULL_COLUMNS, NARROW_TAKEN

__all__ = ["Cost", "lost_flops"]

if TYPE_CHECKING:
    from structconv.planning.machine import Machine


@dataclass(frozen=True)
class Cost:
    """A prediction from shapes, nonzero counts and factorization; values never enter.

    Args:
        flops: floating-point operations; a multiplication and an addition are two.
        bytes: bytes streamed to and from memory.
        gathered: bytes read row by row at indices, which is slower.
        peak_bytes: bytes held beside the arguments and the result.
        wasted: flops that could have been done in the time that skinny products lose.
        calls: operators called; their fixed cost dominates on small inputs.

    Example:

        >>> from structconv.planning import Cost, Machine
        >>> product = Cost(flops=2e9, bytes=1e6, calls=1)
        >>> (product + product).flops
        4000000000.0
        >>> round(product.seconds(Machine(gflops=100, copy_gbs=20, gather_gbs=10)), 4)
        0.0201
    """

    flops: float = 0.0
    bytes: float = 0.0
    gathered: float = 0.0
    peak_bytes: float = 0.0
    wasted: float = 0.0
    calls: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.gathered + other.gathered,
                    self.peak_bytes + other.peak_bytes, self.wasted + other.wasted, self.calls + other.calls)

    def repeated(self, times: float) -> Cost:
        """Return the cost of `times` repetitions in the same memory."""
        return Cost(times * self.flops, times * self.bytes, times * self.gathered, self.peak_bytes,
                    times * self.wasted, times * self.calls)

    def seconds(self, machine: Machine, itemsize: int = 4) -> float:
        """Predicted time: calls, operations and bytes one after the other, at the machine's rates.

        `itemsize` is that of the dtype: a float64 product runs at half the rate of a float32 one.
        """
        rate = machine.gflops * min(1.0, 4 / itemsize)
        moving = self.bytes / machine.copy_gbs + self.gathered / machine.gather_gbs
        return ((self.flops + self.wasted) / rate + moving) * 1e-9 + self.calls * machine.call_us * 1e-6


def lost_flops(flops: float, columns: int, filled: bool = False) -> float:
    """Flops lost by a product with these columns, beside those that it needs, from timings in float32: full rate at
    multiples of `FULL_COLUMNS`; fewer take the time of `NARROW_TAKEN`, the fewest that of `FEW_TAKEN`, one is a product
    with a vector. With `filled` a narrow matrix costs as much as one of `FULL_COLUMNS`, as it does where
    `primitives.products` computes it."""
    if columns < 2:
        return 0.0
    equivalent = -(-columns // FULL_COLUMNS) * FULL_COLUMNS
    if columns < FULL_COLUMNS and not filled:
        equivalent = FEW_TAKEN if columns <= FEW_COLUMNS else NARROW_TAKEN
    return flops * (equivalent / columns - 1)
