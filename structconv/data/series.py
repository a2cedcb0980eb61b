"""Time series of several sensors in a CSV file, and the graph of the sensors in another."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.data.text import read_lines
from structconv.errors import DataError
from structconv.shapes import check_choice
from structconv.structures import Graph

__all__ = ["Series", "gaps", "read_series"]

_OPEN = ("", "nan", "na")
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Series:
    """Readings of S sensors at T times.

    Attributes:
        values: (T, S), float32; 0 where nothing was observed.
        observed: (T, S), bool.
        names: of the sensors.
        graph: which sensors influence which, or none.
    """

    values: Tensor
    observed: Tensor
    names: tuple[str, ...]
    graph: Graph | None = None

    def __repr__(self) -> str:
        times, sensors = self.values.shape
        return f"Series({times} times, {sensors} sensors, {int(self.observed.sum())} readings observed)"


def read_series(path: str | Path, adjacency: str | Path | None = None, *,
                missing: Literal["nan", "zero"] = "nan") -> Series:
    """Read a CSV file, plain or gzipped, whose first line names the sensors and whose others hold a reading of each.

    Args:
        path: the readings, one time a line, in order.
        adjacency: a CSV file of S lines of S numbers without names, or none. The number in line m and column n is the
            weight of the edge from sensor m to sensor n; where it is 0 there is no edge.
        missing: what was not observed: ``"nan"``, cells that are empty or hold NaN or NA; ``"zero"``, these and zeros,
            as in METR-LA.

    Raises:
        ConfigError: another `missing`.
        DataError: with line and column, where a cell is no finite number or a line has too few or too many; where names
            are missing or come twice, nothing is observed, or the adjacency is not S x S; or `read_lines` cannot read a
            file.
    """
    check_choice("read_series", "missing", missing, ("nan", "zero"))
    rows = _rows(path)
    names = _names(path, next(rows)[1])
    readings = [_numbers(path, line, cells, names) for line, cells in rows]
    if not readings:
        raise DataError(path, "readings after the line of names", "no other line")
    values = torch.tensor(readings, dtype=torch.float32)
    observed = ~values.isnan()
    if missing == "zero":
        observed &= values != 0
    if not observed.any():
        raise DataError(path, "a reading", "missing ones alone")
    return Series(values=values.where(observed, 0.0), observed=observed, names=names,
                  graph=None if adjacency is None else _graph(adjacency, names))


def gaps(shape: tuple[int, int], share: float, length: int, generator: torch.Generator | None = None) -> Tensor:
    """Which of (B, T) readings are missing where gaps of `length`, or several in a row, begin anywhere at random.

    Args:
        share: of the readings that are missing, on average; below 1.
        length: of a gap, at least 1.
        generator: of the random numbers; torch's own where absent.

    Returns:
        (B, T) booleans.
    """
    begins = torch.rand(shape[0], shape[1] + length - 1, generator=generator) < 1 - (1 - share) ** (1 / length)
    return F.max_pool1d(begins.float(), length, 1).bool()


def _rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """The number of each line, and its cells without white space around; blank lines at the end are left out."""
    lines = read_lines(path)
    while not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            (cells,) = csv.reader([line], strict=True)
        except csv.Error as error:
            raise DataError(path, "cells with commas between them", error, line=number) from None
        yield number, [cell.strip() for cell in cells]


def _names(path: str | Path, cells: list[str]) -> tuple[str, ...]:
    if "" in cells or not cells:
        raise DataError(path, "the name of a sensor in each column", f"none in column {[*cells, ''].index('') + 1}",
                        line=1, remedy="A column of numbers of lines or of times has to be left out.")
    twice = next((name for name in cells if cells.count(name) > 1), None)
    if twice is not None:
        raise DataError(path, "names of sensors, each once", f"{twice!r} twice", line=1,
                        remedy="Is it a line of readings? The first line must hold the names.")
    return tuple(cells)


def _numbers(path: str | Path, line: int, cells: list[str], names: tuple[str, ...]) -> list[float]:
    """The numbers of a line, NaN where the cell is open."""
    if len(cells) != len(names):
        raise DataError(path, f"{len(names)} cells, one a sensor", len(cells), line=line)
    numbers = []
    for column, cell in enumerate(cells, 1):
        try:
            numbers.append(_number(cell))
        except ValueError:
            raise DataError(path, f"a finite number in column {column}, of the sensor {names[column - 1]!r}",
                            repr(cell), line=line) from None
    return numbers


def _number(cell: str) -> float:
    """The finite number that a cell holds, or NaN; `ValueError` of any other text."""
    if cell.lower() in _OPEN:
        return math.nan
    number = float(cell)
    if not abs(number) <= _LARGEST or "_" in cell or not cell.isascii():
        raise ValueError(cell)
    return number


def _graph(path: str | Path, names: tuple[str, ...]) -> Graph:
    rows = [_numbers(path, line, cells, names) for line, cells in _rows(path)]
    if len(rows) != len(names):
        raise DataError(path, f"{len(names)} lines, one a sensor", len(rows))
    matrix = torch.tensor(rows, dtype=torch.float32)
    if matrix.isnan().any():
        row, column = matrix.isnan().nonzero()[0].tolist()
        raise DataError(path, f"a finite number in column {column + 1}", "none", line=row + 1)
    index = matrix.nonzero().T.contiguous()
    return Graph(index, num_nodes=len(names), edge_weight=matrix[index[0], index[1]])
