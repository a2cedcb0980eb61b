"""Relations of sensors: their graph, from a CSV file or DCRNN's pickle, and their positions."""

from collections.abc import Collection
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from structconv.errors import DataError
from structconv.structures import Graph
from structconv_systems.data.pickles import read_array_pickle
from structconv_systems.data.tables import read_numbers, read_rows

__all__ = ["read_adjacency", "read_locations"]

_PLACES = ("sensor_id", "longitude", "latitude")


def read_adjacency(path: str | Path, names: tuple[str, ...]) -> Graph:
    r"""Read the graph of S sensors from a matrix: the number in line m and column n is the weight of the edge m -> n,
    and 0 means that there is no edge.

    Args:
        path: a CSV file of S lines of S numbers without names; or DCRNN's pickle, NAME.pkl, with names, places and the
            matrix (S, S), which may have more sensors in any order.
        names: of the sensors.

    Raises:
        DataError: a number is negative or not finite, the number of sensors differs, or the pickle lacks a sensor.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.sensors import read_adjacency
        >>> path = Path(folder.name, "adjacency.csv")
        >>> _ = path.write_text("0,0.5\n1,0\n")
        >>> graph = read_adjacency(path, ("north", "south"))
        >>> graph.edge_index.tolist(), graph.edge_weight.tolist()
        ([[0, 1], [1, 0]], [0.5, 1.0])
    """
    matrix = _pickled(path, names) if Path(path).suffix == ".pkl" else _listed(path, names)
    index = matrix.nonzero().T.contiguous()
    return Graph(index, num_nodes=len(names), edge_weight=matrix[index[0], index[1]])


def read_locations(path: str | Path, names: tuple[str, ...]) -> Tensor:
    r"""Read longitude and latitude of the sensors, (S, 2) float32, from a CSV file with the columns ``sensor_id``,
    ``latitude`` and ``longitude``; it may have more sensors, in any order.

    Raises:
        DataError: a column or a sensor is missing, a sensor comes twice, or a cell is not a finite number.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.sensors import read_locations
        >>> path = Path(folder.name, "locations.csv")
        >>> _ = path.write_text("sensor_id,latitude,longitude\nsouth,34,-118\nnorth,35,-119\n")
        >>> read_locations(path, ("north", "south")).tolist()
        [[-119.0, 35.0], [-118.0, 34.0]]
    """
    rows = read_rows(path)
    line, head = next(rows)
    absent = next((column for column in _PLACES if column not in head), None)
    if absent is not None:
        raise DataError(path, f"the columns {', '.join(_PLACES)}", f"no {absent}", line=line)
    coordinates: dict[str, list[float]] = {}
    for line, cells in rows:
        if len(cells) != len(head):
            raise DataError(path, f"{len(head)} cells, one a column", len(cells), line=line)
        sensor, *point = (cells[head.index(column)] for column in _PLACES)
        if sensor in coordinates:
            raise DataError(path, "each sensor once", f"{sensor!r} again", line=line)
        coordinates[sensor] = read_numbers(path, line, point, _PLACES[1:])
        if not np.isfinite(coordinates[sensor]).all():
            raise DataError(path, f"longitude and latitude of the sensor {sensor!r}", "an open cell", line=line)
    _check_known(path, names, coordinates)
    return torch.tensor([coordinates[name] for name in names], dtype=torch.float32)


def _listed(path: str | Path, names: tuple[str, ...]) -> Tensor:
    rows = [read_numbers(path, line, cells, names) for line, cells in read_rows(path)]
    if len(rows) != len(names):
        raise DataError(path, f"{len(names)} lines, one a sensor", len(rows))
    matrix = torch.tensor(rows, dtype=torch.float32)
    for wrong, expected in ((~matrix.isfinite(), "a finite number"), (matrix < 0, "a weight, at least 0,")):
        if wrong.any():
            row, column = wrong.nonzero()[0].tolist()
            got = float(matrix[row, column])
            raise DataError(path, f"{expected} in column {column + 1}", "none" if got != got else got, line=row + 1)
    return matrix


def _pickled(path: str | Path, names: tuple[str, ...]) -> Tensor:
    """Return the matrix of these sensors from DCRNN's pickle, [names, {name: place}, matrix]."""
    if not Path(path).is_file():
        raise DataError(path, "a file", "no such file")
    match read_array_pickle(Path(path)):
        case [list(), dict(coordinates), np.ndarray(shape=(rows, columns), dtype=kind) as matrix] if rows == columns:
            pass
        case other:
            raise DataError(path, "[names of S sensors, the place of each, a matrix (S, S)]", type(other).__name__)
    with np.errstate(over="ignore"):
        weights = matrix.astype(np.float32) if kind.kind in "fiu" else None
    if weights is None or not (np.isfinite(weights) & (weights >= 0)).all():
        raise DataError(path, "a matrix of weights, finite in float32 and at least 0", f"others, of {kind}")
    _check_known(path, names, coordinates)
    chosen = [coordinates[name] for name in names]
    wrong = next((place for place in chosen if type(place) not in (int, np.int64) or not 0 <= place < rows), None)
    if wrong is not None:
        raise DataError(path, f"a place below {rows} of each sensor", repr(wrong))
    if len(set(chosen)) < len(chosen):
        raise DataError(path, "a place of its own for each sensor", "two at one place")
    return torch.from_numpy(weights[np.ix_(chosen, chosen)])


def _check_known(path: str | Path, names: tuple[str, ...], known: Collection[str]) -> None:
    unknown = next((name for name in names if name not in known), None)
    if unknown is not None:
        raise DataError(path, f"the sensor {unknown!r}, which the series names", f"{len(known)} other ones")
