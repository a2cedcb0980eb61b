"""Figures over seeds, in words."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

__all__ = ["counted", "mean_and_std", "share_left", "with_spread"]


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation (n - 1), which one value has none of."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def share_left(lines: Iterable[Mapping[str, Any]], figure: str, groups: Collection[str]) -> float | None:
    """The mean of a figure in the last tenth of the steps over that in the first tenth, of the training of these groups
    in which it fell least; None if none of them logged it.

    Example:

        >>> from structconv_systems.train.summary import share_left
        >>> share_left([{"job": "graph/seed-0", "step": n, "loss": 8 / n} for n in (1, 2, 4)], "loss", {"graph"})
        0.25
    """
    trainings = defaultdict(list)
    for line in lines:
        if figure in line and line["job"].partition("/")[0] in groups:
            trainings[line["job"]].append(line[figure])
    tenths = [(values[-few:], values[:few]) for values in trainings.values() for few in (-(-len(values) // 10),)]
    return max((statistics.fmean(last) / statistics.fmean(first) for last, first in tenths), default=None)


def with_spread(mean: float, std: float | None, digits: int = 3) -> str:
    """``81.53 ± 0.42``, or the mean alone."""
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def counted(number: int, name: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number} {name}" + ("" if number == 1 else "s")
