"""Figures over seeds, in words."""

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
    in which it fell least; None if none of them logged it. Not finite, or 0 from the start, it did not fall."""
    trainings = defaultdict(list)
    for line in lines:
        if figure in line and line["job"].partition("/")[0] in groups:
            trainings[line["job"]].append(line[figure])
    return max(map(_share, trainings.values()), default=None)


def _share(values: Sequence[float | None]) -> float:
    few = -(-len(values) // 10)
    first, last = ([value for value in tenth if value is not None] for tenth in (values[:few], values[-few:]))
    return statistics.fmean(last) / statistics.fmean(first) if first and last and any(first) else 1.0


def with_spread(mean: float, std: float | None, digits: int = 3) -> str:
    """``81.53 ± 0.42``, or the mean alone."""
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def counted(number: int, name: str) -> str:
    """``1 seed``, ``3 seeds``."""
    return f"{number} {name}" + ("" if number == 1 else "s")
