"""Files of TSPLIB (Reinelt 1991): symmetric problems of the traveling salesman, and tours."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from structconv.errors import DataError
from structconv_systems.data.text import is_natural, read_lines

__all__ = ["Problem", "read_problem", "read_tour"]

#: The radius of the earth in kilometers, and pi, as TSPLIB has them.
_RADIUS, _PI = 6378.388, 3.141592
#: Every whole number up to it, and so every distance, is a float64.
_GREATEST = 2.0**53
_COORDINATES = ("NODE_COORD_SECTION", "DISPLAY_DATA_SECTION")
_SECTIONS = (*_COORDINATES, "EDGE_WEIGHT_SECTION", "TOUR_SECTION")


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """N nodes.

    Attributes:
        name: in the file.
        points: (N, 2), float64, in the unit of the file; none where it has distances alone.
        distances: (N, N), float64: whole numbers, by the file's rule of rounding.

    Example:

        >>> from structconv_systems.data.tours import lengths
        >>> from structconv_systems.data.tsplib import Problem
        >>> square = Problem(name="square", points=None, distances=torch.tensor([[0, 1, 2], [1, 0, 1], [2, 1, 0]]))
        >>> lengths(square.distances, torch.tensor([0, 1, 2])).item()
        4
    """

    name: str
    points: Tensor | None
    distances: Tensor


def read_problem(path: str | Path) -> Problem:
    r"""Read NAME.tsp: EDGE_WEIGHT_TYPE EUC_2D, CEIL_2D, MAN_2D, MAX_2D, ATT, GEO, or EXPLICIT in any format of TSPLIB.

    Raises:
        DataError: with its line: TYPE, EDGE_WEIGHT_TYPE or EDGE_WEIGHT_FORMAT is not supported, a number is malformed
            or missing, nodes are not 1 ... N, each once; or `read_lines` cannot read the file.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.tsplib import read_problem
        >>> path = Path(folder.name, "line.tsp")
        >>> header = "NAME: line\nTYPE: TSP\nDIMENSION: 2\nEDGE_WEIGHT_TYPE: EUC_2D\n"
        >>> _ = path.write_text(header + "NODE_COORD_SECTION\n1 0 0\n2 3 4\nEOF\n")
        >>> read_problem(path).distances.tolist()
        [[0.0, 5.0], [5.0, 0.0]]
    """
    file = _File.read(path)
    file.check("TYPE", ("TSP",))
    kind = file.check("EDGE_WEIGHT_TYPE", (*_RULES, "EXPLICIT"))
    size = file.size()
    section = next((name for name in _COORDINATES if name in file.sections), None)
    points = None if section is None else _points(file, section, size)
    if kind == "EXPLICIT":
        return Problem(name=file.name(), points=points, distances=_explicit(file, size))
    if points is None or section != "NODE_COORD_SECTION":
        raise DataError(path, "NODE_COORD_SECTION", "none")
    table = _RULES[kind](points)
    return Problem(name=file.name(), points=points, distances=table.fill_diagonal_(0))


def read_tour(path: str | Path, *, nodes: int) -> Tensor:
    r"""Read NAME.opt.tour, a tour through this number of nodes: (N,), from 0 on.

    Raises:
        DataError: with its line, what is no number of a node or comes twice; there are fewer or more.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.tsplib import read_tour
        >>> path = Path(folder.name, "line.opt.tour")
        >>> _ = path.write_text("TYPE: TOUR\nDIMENSION: 3\nTOUR_SECTION\n1\n3\n2\n-1\nEOF\n")
        >>> read_tour(path, nodes=3).tolist()
        [0, 2, 1]
    """
    file = _File.read(path)
    file.check("TYPE", ("TOUR",))
    lines: dict[int, int] = {}
    for line, text in _numbers_of(file, "TOUR_SECTION"):
        if text == "-1":
            break
        node = int(text) if is_natural(text) else 0
        if not 1 <= node <= nodes or node in lines:
            raise DataError(path, f"a node of 1 ... {nodes} that has not come yet", repr(text), line=line)
        lines[node] = line
    if len(lines) != nodes:
        raise DataError(path, f"a tour through {nodes} nodes", len(lines))
    return torch.tensor(list(lines)) - 1


class _Line(NamedTuple):
    number: int
    text: str


@dataclass(frozen=True)
class _File:
    """The specifications of a file, KEY : VALUE, and the lines of its sections."""

    path: str | Path
    keys: dict[str, _Line]
    sections: dict[str, list[_Line]]

    @classmethod
    def read(cls, path: str | Path) -> Self:
        keys: dict[str, _Line] = {}
        sections: dict[str, list[_Line]] = {}
        section: list[_Line] | None = None
        for number, text in enumerate(read_lines(path), 1):
            key, colon, value = (part.strip() for part in text.partition(":"))
            if key == "EOF":
                break
            if not key:
                continue
            if key in _SECTIONS:
                section = sections.setdefault(key, [])
            elif colon:
                keys[key], section = _Line(number, value), None
            elif section is not None:
                section.append(_Line(number, text))
            else:
                raise DataError(path, f"KEY : VALUE, or a section: {', '.join(_SECTIONS)}", repr(text), line=number)
        return cls(path, keys, sections)

    def name(self) -> str:
        return self.keys["NAME"].text if "NAME" in self.keys else Path(self.path).stem

    def check(self, key: str, known: tuple[str, ...]) -> str:
        """Return the value of a key; `DataError` if it is not a known one."""
        if key not in self.keys:
            raise DataError(self.path, key, "none")
        line = self.keys[key]
        value = line.text.split()[0] if line.text else ""
        if value not in known:
            raise DataError(self.path, f"{key} to be one of {', '.join(known)}", repr(line.text), line=line.number)
        return value

    def size(self) -> int:
        if "DIMENSION" not in self.keys:
            raise DataError(self.path, "DIMENSION", "none")
        line = self.keys["DIMENSION"]
        if not (is_natural(line.text) and int(line.text) > 0):
            raise DataError(self.path, "DIMENSION to be a number of nodes", repr(line.text), line=line.number)
        return int(line.text)


def _numbers_of(file: _File, section: str) -> Iterator[tuple[int, str]]:
    """Yield the entries of a section with their lines."""
    if section not in file.sections:
        raise DataError(file.path, section, "none")
    for line in file.sections[section]:
        for text in line.text.split():
            yield line.number, text


def _points(file: _File, section: str, size: int) -> Tensor:
    """Read the coordinates (N, 2) of nodes 1 ... N, a line each: NUMBER X Y."""
    positions: dict[int, list[float]] = {}
    for line in file.sections[section]:
        cells = line.text.split()
        node = int(cells[0]) if is_natural(cells[0]) else 0
        if len(cells) != 3 or not 1 <= node <= size or node in positions:
            raise DataError(file.path, f"a node of 1 ... {size} that has not come yet, and its two coordinates",
                            repr(line.text), line=line.number)
        positions[node] = [_number(file, line.number, cell) for cell in cells[1:]]
    if len(positions) != size:
        raise DataError(file.path, f"DIMENSION={size} nodes in {section}", len(positions))
    return torch.tensor([positions[node] for node in range(1, size + 1)], dtype=torch.float64)


def _number(file: _File, line: int, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= _GREATEST or "_" in text:
        raise DataError(file.path, "a finite number, at most 2^53", repr(text), line=line)
    return number


def _euclidean(points: Tensor) -> Tensor:
    return (points.unsqueeze(1) - points).norm(dim=-1)


def _geographical(points: Tensor) -> Tensor:
    """Return distances on the sphere, from latitude and longitude written DDD.MM."""
    degrees = points.trunc()
    angles = _PI * (degrees + 5 * (points - degrees) / 3) / 180
    latitude, longitude = angles.unbind(-1)
    q1 = (longitude.unsqueeze(1) - longitude).cos()
    q2, q3 = ((latitude.unsqueeze(1) + sign * latitude).cos() for sign in (-1, 1))
    return (_RADIUS * (0.5 * ((1 + q1) * q2 - (1 - q1) * q3)).clamp(-1, 1).acos() + 1).floor()


def _pseudo_euclidean(points: Tensor) -> Tensor:
    distance = _euclidean(points) / 10 ** 0.5
    near = _nearest(distance)
    return torch.where(near < distance, near + 1, near)


def _nearest(distance: Tensor) -> Tensor:
    """Round as nint of TSPLIB."""
    return (distance + 0.5).floor()


#: The distances (N, N) of points (N, 2), by EDGE_WEIGHT_TYPE.
_RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "EUC_2D": lambda points: _nearest(_euclidean(points)),
    "CEIL_2D": lambda points: _euclidean(points).ceil(),
    "MAN_2D": lambda points: _nearest((points.unsqueeze(1) - points).abs().sum(-1)),
    "MAX_2D": lambda points: _nearest((points.unsqueeze(1) - points).abs().amax(-1)),
    "ATT": _pseudo_euclidean,
    "GEO": _geographical,
}

#: Of EDGE_WEIGHT_FORMAT: whether row i has the columns from its diagonal on or up to it, and whether with the diagonal.
_FORMATS = {"UPPER_ROW": ("upper", 1), "LOWER_ROW": ("lower", 1), "UPPER_DIAG_ROW": ("upper", 0),
            "LOWER_DIAG_ROW": ("lower", 0), "UPPER_COL": ("lower", 1), "LOWER_COL": ("upper", 1),
            "UPPER_DIAG_COL": ("lower", 0), "LOWER_DIAG_COL": ("upper", 0)}


def _explicit(file: _File, size: int) -> Tensor:
    """Read the distances (N, N) in EDGE_WEIGHT_SECTION."""
    layout = file.check("EDGE_WEIGHT_FORMAT", ("FULL_MATRIX", *_FORMATS))
    numbers = torch.tensor([_number(file, line, text) for line, text in _numbers_of(file, "EDGE_WEIGHT_SECTION")],
                         dtype=torch.float64)
    half, diagonal = _FORMATS.get(layout, ("", 0))
    expected = size * (size + 1 - 2 * diagonal) // 2 if half else size * size
    if len(numbers) != expected:
        raise DataError(file.path, f"{expected} numbers in EDGE_WEIGHT_SECTION, as {layout} has for DIMENSION={size}",
                        len(numbers))
    if not half:
        table = numbers.view(size, size)
        if not torch.equal(table, table.mT):
            raise DataError(file.path, "symmetric distances, as TYPE : TSP has", "others")
        return table.clone().fill_diagonal_(0)
    rows, columns = (torch.triu_indices(size, size, diagonal) if half == "upper"
                     else torch.tril_indices(size, size, -diagonal))
    table = torch.zeros(size, size, dtype=torch.float64)
    table[rows, columns] = numbers
    table[columns, rows] = numbers
    return table.fill_diagonal_(0)
