"""Figures over seeds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["mean_and_std", "percent"]


def mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Mean and sample standard deviation (n - 1); the latter is 0 for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def percent(values: Sequence[float]) -> str:
    """Shares as ``81.53 ± 0.42``, in percent."""
    mean, std = mean_and_std([100 * value for value in values])
    return f"{mean:.2f} ± {std:.2f}"
