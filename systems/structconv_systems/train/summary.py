"""Figures over seeds, in words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["counted", "mean_and_std", "with_spread"]


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1), which one value has none of."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def with_spread(mean: float, std: float | None, digits: int = 3) -> str:
    """``81.53 ± 0.42``, or the mean alone."""
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def counted(number: int, name: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number} {name}" + ("" if number == 1 else "s")
