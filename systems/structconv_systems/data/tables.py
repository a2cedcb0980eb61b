"""Read tables of numbers in CSV: the functions that all readers share."""

import csv
import math
from collections.abc import Iterator
from pathlib import Path

import torch

from structconv.errors import DataError
from structconv_systems.data.text import read_lines

__all__ = ["finite_number", "read_numbers", "read_rows"]

_OPEN = ("", "nan", "na")
_LARGEST = torch.finfo(torch.float32).max


def read_rows(path: str | Path) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of each line and its stripped cells, without blank lines at the end.

    Raises:
        DataError: a line is not CSV, or an error of `read_text`.
    """
    lines = read_lines(path)
    while not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            (cells,) = csv.reader([line], strict=True)
        except csv.Error as error:
            raise DataError(path, "cells with commas between them", error, line=number) from None
        yield number, [cell.strip() for cell in cells]


def read_numbers(path: str | Path, line: int, cells: list[str], names: tuple[str, ...]) -> list[float]:
    """Return the numbers of a line, one for each sensor; NaN if the cell is empty or holds NaN or NA.

    Raises:
        DataError: the numbers of cells and names differ, or a cell holds anything else.
    """
    if len(cells) != len(names):
        raise DataError(path, f"{len(names)} cells, one a sensor", len(cells), line=line)
    numbers = []
    for column, cell in enumerate(cells, 1):
        try:
            numbers.append(math.nan if cell.lower() in _OPEN else finite_number(cell))
        except ValueError:
            raise DataError(path, f"a finite number in column {column}, of the sensor {names[column - 1]!r}",
                            repr(cell), line=line,
                            remedy="A column of times has to be left out." if column == 1 else "") from None
    return numbers


def finite_number(cell: str) -> float:
    """Return the finite number in a cell; `ValueError` for any other text."""
    number = float(cell)
    if not abs(number) <= _LARGEST or "_" in cell or not cell.isascii():
        raise ValueError(cell)
    return number
