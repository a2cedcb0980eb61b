"""How costs grow with the number of entries: the exponent of a fitted power, and times beside what was predicted."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from structconv_systems.plots import curves_png

__all__ = ["exponent", "growth_png", "halves"]


def halves(longest: int, shortest: int) -> list[int]:
    """`longest` and its halves, none below `shortest`, the least first."""
    return [longest >> power for power in range(longest.bit_length()) if longest >> power >= shortest][::-1]


def exponent(lengths: Sequence[float], costs: Sequence[float]) -> float:
    """a of the line log cost = a log n + b of least squares."""
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(cost) for cost in costs]).slope


def growth_png(sizes: Sequence[int], rows: Mapping[str, Mapping[str, Any]], predicted: str, *, x_label: str,
               y_label: str) -> bytes:
    """Measured times, ``seconds`` of each row, over the sizes; dashed beside them what `predicted` of it says if the
    largest takes what it took."""
    curves, dashed = {}, {}
    for name, row in rows.items():
        scale = 1e3 * row["seconds"][-1] / row[predicted][-1]
        curves[name] = sizes, [1e3 * seconds for seconds in row["seconds"]]
        dashed[name] = sizes, [scale * number for number in row[predicted]]
    return curves_png(curves, x_label=x_label, y_label=y_label, logarithmic=True, dashed=dashed)
