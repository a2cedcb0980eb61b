"""Time series of several sensors in a CSV file, and the graph of the sensors in another."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.errors import DataError
from structconv.shapes import check_choice
from structconv.structures import Graph
from structconv_systems.data.sensors import read_adjacency
from structconv_systems.data.tables import finite_number, read_numbers, read_rows

__all__ = ["Part", "Series", "at_twelfths", "check_times", "checked_parts", "ends_of_parts", "gaps",
           "mean_and_deviation", "read_series"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Series:
    """Readings of S sensors at T times.

    Attributes:
        values: (T, S), float32; 0 where nothing was observed.
        observed: (T, S), bool.
        names: of the sensors.
        graph: which sensors influence which, or none.

    Example:

        >>> from structconv_systems.data.series import Series
        >>> readings = torch.tensor([[1.0, 5.0], [2.0, 0.0]])
        >>> series = Series(values=readings, observed=readings > 0, names=("north", "south"))
        >>> series.observed.sum(0).tolist()                # readings of each sensor
        [2, 1]
    """

    values: Tensor
    observed: Tensor
    names: tuple[str, ...]
    graph: Graph | None = None

    def __repr__(self) -> str:
        times, sensors = self.values.shape
        return f"Series({times} times, {sensors} sensors, {int(self.observed.sum())} readings observed)"


def read_series(path: str | Path, adjacency: str | Path | None = None, *,
                missing: Literal["nan", "zero", "none"] = "nan") -> Series:
    r"""Read a CSV file, plain or gzipped, whose first line names the sensors and whose others hold a reading of each.

    Args:
        path: the readings, one time a line, in order.
        adjacency: the file with the graph of the sensors, see `read_adjacency`, or none.
        missing: the cells that count as not observed: ``"nan"``, empty cells, NaN and NA; ``"zero"``, these and zeros,
            as in METR-LA; ``"none"``, no cells: such cells are errors.

    Raises:
        ConfigError: `missing` is unknown.
        DataError: with line and column: a cell is not a finite number, or a line has too few or too many cells; names
            are missing or duplicate; nothing is observed; the adjacency has other sensors; or `read_lines` cannot read
            a file.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.series import read_series
        >>> path = Path(folder.name, "series.csv")
        >>> _ = path.write_text("north,south\n1,5\n2,\n")  # the last reading is missing
        >>> series = read_series(path)
        >>> series.values.tolist(), series.observed.tolist()
        ([[1.0, 5.0], [2.0, 0.0]], [[True, True], [True, False]])
    """
    check_choice("read_series", "missing", missing, ("nan", "zero", "none"))
    rows = read_rows(path)
    names = _names(path, next(rows)[1])
    readings = [read_numbers(path, line, cells, names) for line, cells in rows]
    if not readings:
        raise DataError(path, "readings after the line of names", "no other line")
    values = torch.tensor(readings, dtype=torch.float32)
    observed = ~values.isnan()
    if missing == "none" and not observed.all():
        row, column = (~observed).nonzero()[0].tolist()
        raise DataError(path, f"a finite number in column {column + 1}, of the sensor {names[column]!r}", "none",
                        line=row + 2, remedy="If readings may be missing, train with missing=nan.")
    if missing == "zero":
        observed &= values != 0
    if not observed.any():
        raise DataError(path, "a reading", "missing ones alone")
    return Series(values=values.where(observed, 0.0), observed=observed, names=names,
                  graph=None if adjacency is None else read_adjacency(adjacency, names))


@dataclass(frozen=True, eq=False)
class Part:
    """The times first ... end - 1 of series. Forecasts start within them; histories may begin before.

    Args:
        values, observed: (T, S), including the horizon after the last origin.

    Example:

        >>> from structconv_systems.data.series import Part
        >>> values = torch.arange(10.0).view(5, 2)
        >>> part = Part(values, torch.ones(5, 2, dtype=torch.bool), first=1, end=4)
        >>> list(part.origins), part.known.shape
        ([1, 2], torch.Size([8]))
    """

    values: Tensor
    observed: Tensor
    first: int
    end: int

    def __len__(self) -> int:
        return len(self.origins)

    @property
    def origins(self) -> range:
        """The last times that are known."""
        return range(self.first, self.end - 1)

    @property
    def known(self) -> Tensor:
        """Return the observed readings up to its end, (n,)."""
        return self.values[:self.end][self.observed[:self.end]]


def mean_and_deviation(known: Tensor) -> tuple[float, float]:
    """Return mean and deviation of readings (n,); the deviation of constant readings is 1."""
    return float(known.mean()), (float(known.std()) if len(known) > 1 else 0.0) or 1.0


def check_times(path: object, times: int, history: int, horizon: int) -> None:
    """Raise `DataError` if a file with this number of times is too short for one forecast."""
    if times < history + horizon:
        raise DataError(path, f"history={history} times at least, and horizon={horizon} behind them", f"{times} times")


def checked_parts(path: object, parts: Mapping[str, Part], other: tuple[object, Part] | None) -> dict[str, Part]:
    """Return the parts of a file; the part of another file, if given, replaces the test part.

    Raises:
        DataError: a part has no observed reading to forecast.
    """
    files = {name: (path, part) for name, part in parts.items()} | ({} if other is None else {"test": other})
    for name, (file, part) in files.items():
        if not part.observed[part.first + 1:part.end].any():
            raise DataError(file, f"a reading to forecast in {name}", "missing ones alone")
    return {name: part for name, (_, part) in files.items()}


def ends_of_parts(count: int, train: float, valid: float) -> dict[str, int]:
    """Return the ends of ``train``, ``val`` and ``test``, in this order; the first two are shares of all samples.

    Of T samples, the first floor(train T) train, those up to floor((train + valid) T) validate, and the rest tests.

    Example:

        >>> from structconv_systems.data.series import ends_of_parts
        >>> ends_of_parts(10, train=0.7, valid=0.1)
        {'train': 7, 'val': 8, 'test': 10}
    """
    ends = {"train": train * count, "val": (train + valid) * count}
    return {**{part: int(round(end, 6)) for part, end in ends.items()}, "test": count}


def at_twelfths(name: str, errors: Tensor, twelfths: Sequence[int]) -> dict[str, float]:
    """Return the errors (horizon,) at the first steps that reach these twelfths of it, as ``NAME_3_of_12``."""
    ranks = {twelfth: -(-twelfth * len(errors) // 12) - 1 for twelfth in twelfths}
    return {f"{name}_{twelfth}_of_12": float(errors[rank]) for twelfth, rank in ranks.items()}


def gaps(shape: tuple[int, int], share: float, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Draw missing readings (B, T) as gaps of `length` at random positions; gaps may join.

    Args:
        share: mean share of missing readings, below 1.
        length: length of a gap, at least 1.
        generator: generator of the random numbers; default: torch's.

    Returns:
        (B, T) booleans.

    Example:

        >>> from structconv_systems.data.series import gaps
        >>> missing = gaps((2, 1000), share=0.2, length=10, generator=torch.Generator().manual_seed(0))
        >>> missing.shape, round(missing.float().mean().item(), 1)
        (torch.Size([2, 1000]), 0.2)
    """
    begins = torch.rand(shape[0], shape[1] + length - 1, generator=generator) < 1 - (1 - share) ** (1 / length)
    return F.max_pool1d(begins.float(), length, 1).bool()


def _names(path: str | Path, cells: list[str]) -> tuple[str, ...]:
    if "" in cells or not cells:
        raise DataError(path, "the name of a sensor in each column", f"none in column {[*cells, ''].index('') + 1}",
                        line=1, remedy="A column of numbers of lines or of times has to be left out.")
    if len(cells) == 1 and (";" in cells[0] or "\t" in cells[0]):
        raise DataError(path, "commas between the cells", repr(cells[0][:40]), line=1)
    reading = next((name for name in cells if _is_fraction(name)), None)
    if reading is not None:
        raise DataError(path, "the names of the sensors", repr(reading), line=1,
                        remedy="Is it a line of readings? The first line must hold the names.")
    twice = next((name for name in cells if cells.count(name) > 1), None)
    if twice is not None:
        raise DataError(path, "names of sensors, each once", f"{twice!r} twice", line=1,
                        remedy="Is it a line of readings? The first line must hold the names.")
    return tuple(cells)


def _is_fraction(name: str) -> bool:
    """Return True if the name is a fraction, which no sensor is called."""
    try:
        return not finite_number(name).is_integer()
    except ValueError:
        return False
