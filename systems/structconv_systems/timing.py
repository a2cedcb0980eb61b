"""Time functions in turns, with a guard against other load on the machine; and how times grow with sizes."""

import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Times", "alternate", "clock", "exponent", "halves"]

#: The least duration of a sample, of several calls.
_SAMPLE_SECONDS = 0.004
#: The duration of a first call that is not repeated to see how long a warm one takes.
_LONG_SECONDS = 2.0
#: The least duration that shows the load of other processes.
_LOAD_SECONDS = 0.5
#: A spread, (q3 - q1) / median, above which rounds are repeated.
SPREAD = 0.15

Work = Callable[[], object]


@dataclass(frozen=True)
class Times:
    """Seconds of one call: median and quartiles of the samples kept.

    Args:
        samples: seconds of a call, one a round.
        repeated: rounds that were thrown away and taken again.
        other_load: cores that other processes kept busy meanwhile.
    """

    samples: tuple[float, ...]
    repeated: int = 0
    other_load: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        return quartiles(self.samples)

    @property
    def spread(self) -> float:
        """(q3 - q1) / median."""
        low, high = self.quartiles
        return (high - low) / self.median if self.median else 0.0


def quartiles(samples: tuple[float, ...]) -> tuple[float, float]:
    """Return the first and the third quartile, between order statistics."""
    if len(samples) < 2:
        return samples[0], samples[0]
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return low, high


def clock(work: Work, calls: int = 1, now: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of one call by `now`, the mean of `calls`, without garbage collection."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        start = now()
        for _ in range(calls):
            work()
        return (now() - start) / calls
    finally:
        if collecting:
            gc.enable()


def alternate(works: Mapping[str, Work], *, repeats: int = 7, seconds: float = 10.0,
              known: Mapping[str, float] | None = None,
              timer: Callable[[Work, int], float] = clock) -> dict[str, Times]:
    """Time each work once a round, in rotating order, for `repeats` rounds.

    All functions are measured under the same conditions. While a spread exceeds `SPREAD`, the round furthest from the
    medians is replaced by a new one for all functions, at most `repeats` times. After `seconds` rounds end early, but
    there are at least three.

    Args:
        works: the functions to time, by name.
        repeats: number of rounds, at least one.
        seconds: approximate time for all rounds.
        known: seconds of the first call of each function, if it is warm already; otherwise each is called once before.
        timer: seconds of one call from a work and how many calls make a sample.
    """
    end = time.perf_counter() + seconds
    calls = {name: _calls((known or {}).get(name) or timer(work, 1), work, timer) for name, work in works.items()}
    load = _Load()
    rounds = [_round(works, calls, timer, number) for number in range(min(repeats, 3))]
    while len(rounds) < repeats and time.perf_counter() < end:
        rounds.append(_round(works, calls, timer, len(rounds)))
    repeated = 0
    while repeated < repeats and time.perf_counter() < end and any(
            Times(tuple(one_round[name] for one_round in rounds)).spread > SPREAD for name in works):
        rounds[_furthest(rounds)] = _round(works, calls, timer, len(rounds) + repeated)
        repeated += 1
    other = load.other_cores()
    return {name: Times(tuple(one_round[name] for one_round in rounds), repeated, other) for name in works}


def _calls(first: float, work: Work, timer: Callable[[Work, int], float]) -> int:
    """Return the number of calls of a sample. A slow first call may have been cold: the least of later ones counts, and
    of a fast function those of a loop."""
    warm = first if first > _LONG_SECONDS else min(timer(work, 1) for _ in range(3))
    if warm < _SAMPLE_SECONDS / 4:
        warm = timer(work, math.ceil(_SAMPLE_SECONDS / (4 * max(warm, 1e-7))))
    return max(1, math.ceil(_SAMPLE_SECONDS / max(warm, 1e-7)))


def _round(works: Mapping[str, Work], calls: dict[str, int], timer: Callable[[Work, int], float],
           number: int) -> dict[str, float]:
    names = list(works)
    turn = number % len(names)
    return {name: timer(works[name], calls[name]) for name in names[turn:] + names[:turn]}


def _furthest(rounds: list[dict[str, float]]) -> int:
    """Return the round with the sample furthest above or below the median of its function."""
    medians = {name: statistics.median(one_round[name] for one_round in rounds) for name in rounds[0]}

    def distance(one_round: dict[str, float]) -> float:
        return max(abs(math.log(max(one_round[name], 1e-12) / max(medians[name], 1e-12))) for name in one_round)

    return max(range(len(rounds)), key=lambda index: distance(rounds[index]))


def halves(longest: int, shortest: int) -> list[int]:
    """Return `longest` and its halves down to `shortest`, the least first."""
    return [longest >> power for power in range(longest.bit_length()) if longest >> power >= shortest][::-1]


def exponent(lengths: Sequence[float], costs: Sequence[float]) -> float:
    """Fit log cost = a log n + b by least squares and return a."""
    return statistics.linear_regression([math.log(n) for n in lengths], [math.log(cost) for cost in costs]).slope


class _Load:
    """The cores that other processes use, by the system's counters; `None` without them."""

    def __init__(self) -> None:
        self.start, self.busy, self.own = time.perf_counter(), self._busy(), self._own()

    def other_cores(self) -> float | None:
        """Return the mean since the object was made, if that is long enough for counters of 10 ms."""
        busy, wall = self._busy(), time.perf_counter() - self.start
        if busy is None or self.busy is None or wall < _LOAD_SECONDS:
            return None
        return max(busy - self.busy - (self._own() - self.own), 0.0) / wall

    @staticmethod
    def _own() -> float:
        times = os.times()
        return times.user + times.system

    @staticmethod
    def _busy() -> float | None:
        try:
            fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
            return (sum(fields[:8]) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")
        except (OSError, ValueError, IndexError):
            return None
