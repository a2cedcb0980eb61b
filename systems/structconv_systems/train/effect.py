"""The published effect of a recipe: a contrast between groups of trainings, with an interval over seeds; no torch."""

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from structconv.errors import ConfigError

__all__ = ["LEARNED", "NOT_SHOWN", "NO_BASELINE", "ONE_SEED", "PARTLY", "REPRODUCED", "Contrast", "Effect",
           "counted", "effect_text", "interval", "mean_and_std", "share_left", "with_spread"]

REPRODUCED, PARTLY, NOT_SHOWN = "reproduced", "partly", "not shown"
NO_BASELINE = "no baseline is trained beside it"
ONE_SEED = "one seed has no interval"
#: A model has learned if the figure of its training steps fell below this share.
LEARNED = 0.9


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """A measured effect.

    Attributes:
        value: mean over seeds, None if its groups were not trained or have no ratio. low, high: its interval, None for
            one seed.
        state: "reproduced", "partly" or "not shown". reason: why it is not shown, empty otherwise.

    Example:

        >>> from structconv_systems.train.effect import Contrast
        >>> contrast = Contrast(value=5.5, low=4.1, high=6.9, seeds=3, state="reproduced")
        >>> contrast.low > 0
        True
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    seeds: int = 0
    state: str = NOT_SHOWN
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Effect:
    """The gain of a system over a baseline according to its paper.

    For each seed the gain of a pair is the difference or the ratio of its two figures, and the effect is the least gain
    of all pairs. It is positive, or a ratio above 1, if the system is better than every baseline.

    Attributes:
        claim: the comparison and its unit, in words.
        figure: the name of the figure that `Task.test` measures.
        pairs: names of groups of trainings, (system, baseline); ``GROUP:FIGURE`` names another figure of a group.
        higher: if True, a greater figure is better.
        ratio: compare by the ratio, for errors and perplexities, which scale with the data.
        published: the effect in the paper; None if the paper gives a direction without a number.
        margin: an effect up to this counts as none. Below 0 for a paper that claims a small loss.
        share: the part of the way from margin to published that "reproduced" requires.

    Raises:
        ConfigError: no figures can miss the effect.

    Example:

        >>> from structconv_systems.train.effect import Effect
        >>> effect = Effect(claim="accuracy, graph over none", figure="test_accuracy", pairs=(("graph", "none"),))
        >>> effect.measured({"graph": [0.80, 0.81, 0.80], "none": [0.74, 0.75, 0.75]}).state
        'reproduced'
    """

    claim: str
    figure: str
    pairs: tuple[tuple[str, str], ...]
    higher: bool = True
    ratio: bool = False
    published: float | None = None
    margin: float = 0.0
    share: float = 0.5

    def __post_init__(self) -> None:
        if not self.pairs or any(system == baseline for system, baseline in self.pairs):
            raise ConfigError("Effect", "pairs must be of a system and of another group, its baseline", self.pairs)
        if not 0 < self.share <= 1:
            raise ConfigError("Effect", "share must be above 0 and at most 1", self.share)
        if self.margin > 0 or (self.margin < 0 and (self.ratio or self.published is None)):
            raise ConfigError("Effect", "margin must be 0, or below 0 for a difference with a published value",
                              self.margin)
        if self.published is not None and self._scaled(self.published) <= self.margin:
            raise ConfigError("Effect", "the published effect must be above no effect", self.published)

    def measured(self, groups: Mapping[str, Sequence[float]]) -> Contrast:
        """Return the effect from the figures of each group, one for each seed; a single figure holds for all seeds.

        The interval is Student's t over seeds, at 95 %. The effect is shown if all of the interval is above `margin`,
        and reproduced if its mean also reaches `share` of the published effect.
        """
        pairs = [pair for pair in self.pairs if set(pair) <= groups.keys()]
        if not pairs:
            return Contrast(value=None, reason="its groups were not trained")
        if self.ratio and not all(figure > 0 for pair in pairs for name in pair for figure in groups[name]):
            return Contrast(value=None, reason="a figure is 0, and has no ratio")
        seeds = max(len(groups[name]) for pair in pairs for name in pair)
        gains = [min(self._gain(*(groups[name][0 if len(groups[name]) == 1 else seed] for name in pair))
                     for pair in pairs) for seed in range(seeds)]
        mean, low, high = interval(gains)
        state, reason = self._judged(mean, low)
        value, low, high = (math.exp(end) if self.ratio and end is not None else end for end in (mean, low, high))
        return Contrast(value=value, low=low, high=high, seeds=seeds, state=state, reason=reason)

    def _judged(self, mean: float, low: float | None) -> tuple[str, str]:
        if not mean > self.margin:
            return NOT_SHOWN, "the mean is on the side of the baseline"
        if low is None:
            return NOT_SHOWN, ONE_SEED
        if not low > self.margin:
            return NOT_SHOWN, "the interval includes no effect"
        if self.published is None:
            return REPRODUCED, ""
        least = self.margin + self.share * (self._scaled(self.published) - self.margin)
        return (REPRODUCED if mean >= least else PARTLY), ""

    def _scaled(self, effect: float) -> float:
        return math.log(effect) if self.ratio else effect

    def _gain(self, system: float, baseline: float) -> float:
        gain = math.log(system) - math.log(baseline) if self.ratio else system - baseline
        return gain if self.higher else -gain


def effect_text(ratio: bool, value: float | None, low: float | None = None, high: float | None = None) -> str:
    """Return an effect as ``+1.30 [0.40, 2.20]``, or as a ratio ``x1.32 [1.10, 1.58]``."""
    if value is None:
        return "-"
    within = "" if low is None or high is None else f" [{low:.3g}, {high:.3g}]"
    return (f"x{value:.3g}" if ratio else f"{value:+.3g}") + within


def interval(values: Sequence[float]) -> tuple[float, float | None, float | None]:
    """Return the mean and Student's t interval at 95 %, `None` for one value.

    Example:

        >>> from structconv_systems.train.effect import interval
        >>> [round(number, 2) for number in interval([0.7, 0.8, 0.9])]
        [0.8, 0.55, 1.05]
        >>> interval([0.7])
        (0.7, None, None)
    """
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, None, None
    from scipy.stats import t

    half = float(t.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def mean_and_std(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the sample standard deviation (n - 1), `None` for one value."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def share_left(lines: Iterable[Mapping[str, Any]], figure: str, groups: Collection[str]) -> float | None:
    """Return the mean of a figure in the last tenth of the steps over that in the first tenth, of the training in which
    it fell least; `None` if no training logged it. A figure that is not finite, or 0 from the start, did not fall."""
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
    """Return ``81.53 ± 0.42``, or the mean alone."""
    return f"{mean:.{digits}f}" + ("" if std is None else f" ± {std:.{digits}f}")


def counted(number: int, name: str) -> str:
    """Return ``1 seed``, ``3 seeds``."""
    return f"{number} {name}" + ("" if number == 1 else "s")
