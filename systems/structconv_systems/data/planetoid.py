"""The Planetoid citation graphs (Yang, Cohen and Salakhutdinov 2016), read from their raw files."""

from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse import csr_matrix, vstack
from torch import Tensor

from structconv.errors import DataError
from structconv_systems.data.pickles import read_array_pickle
from structconv_systems.data.text import read_text, sha256_of

__all__ = ["Planetoid", "read_planetoid"]

_PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
_VALIDATION = 500
_MOST_DIGITS = 18

_SHA256 = {
    "ind.cora.allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
    "ind.cora.ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
    "ind.cora.graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
    "ind.cora.test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
    "ind.cora.tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
    "ind.cora.ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
    "ind.cora.x": "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
    "ind.cora.y": "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Planetoid:
    """A citation graph with the public split: nodes are papers, features the words that they contain.

    Attributes:
        name: the data set, ``"cora"``.
        features: scipy CSR, float32, (num_nodes, num_features), as published: not normalized.
        labels: int64 (num_nodes,).
        train, validation, test: int64 indices of the public split.
        edge_index: int64 (2, 2 x undirected edges): both directions, no duplicates, no self-loops, sorted by row 0
            then row 1.
        num_classes: number of labels.

    Example:

        >>> from scipy.sparse import csr_matrix
        >>> from structconv_systems.data.planetoid import Planetoid
        >>> first, second, third = torch.arange(3).split(1)
        >>> words, edges = csr_matrix([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]), torch.tensor([[0, 1], [1, 0]])
        >>> labels = torch.tensor([0, 1, 0])
        >>> data = Planetoid(name="tiny", features=words, labels=labels, edge_index=edges, num_classes=2, train=first,
        ...                  validation=second, test=third)
        >>> data.num_nodes, data.num_features, data.num_undirected_edges
        (3, 2, 1)
    """

    name: str
    features: csr_matrix
    labels: Tensor
    train: Tensor
    validation: Tensor
    test: Tensor
    edge_index: Tensor
    num_classes: int

    @property
    def num_nodes(self) -> int:
        return int(self.features.shape[0])

    @property
    def num_features(self) -> int:
        return int(self.features.shape[1])

    @property
    def num_undirected_edges(self) -> int:
        return self.edge_index.shape[1] // 2

    def __repr__(self) -> str:
        return (f"Planetoid({self.name!r}, {self.num_nodes} nodes, {self.num_undirected_edges} undirected edges, "
                f"{self.num_features} features, {self.num_classes} classes)")


def read_planetoid(folder: str | Path, name: str = "cora", *, verify: bool = True) -> Planetoid:
    """Read the eight files ``ind.<name>.*`` of a Planetoid data set and its public split.

    The rows of ``x`` train, the 500 nodes after them validate, those listed in ``test.index`` test. Rows of ``tx`` are
    put in the places that ``test.index`` gives them; numbers missing from its range (CiteSeer has some) become nodes
    without features in no split. Pickles are read by `structconv_systems.data.pickles.read_array_pickle`, which runs
    nothing. No network.

    Args:
        folder: the folder ``data`` of github.com/kimiyoung/planetoid, or a copy.
        name: ``"cora"``, or another data set in the same format.
        verify: compare each file with its published SHA-256 (known for Cora).

    Raises:
        DataError: a file is missing, has another hash, names a forbidden type, or does not fit the others.

    Example:

        >>> from structconv_systems.data.planetoid import read_planetoid
        >>> read_planetoid("no/such/folder", "cora")
        Traceback (most recent call last):
        structconv.errors.DataError: no/such/folder/ind.cora.x: expected this file; got no such file....
    """
    paths = _find(Path(folder), name, verify)
    x, tx, allx = (_matrix(paths[part]) for part in ("x", "tx", "allx"))
    y, ty, ally = (_one_hot(paths[part]) for part in ("y", "ty", "ally"))
    test = _test_index(paths["test.index"])
    _check_fit(paths, (x, tx, allx), (y, ty, ally), test)
    features, one_hot = _placed(allx, tx, ally, ty, test)
    labels = torch.from_numpy(one_hot.argmax(1).astype("int64"))
    first = y.shape[0]
    return Planetoid(name=name, features=features, labels=labels, num_classes=int(one_hot.shape[1]),
                     train=torch.arange(first), validation=torch.arange(first, min(first + _VALIDATION, allx.shape[0])),
                     test=test.sort().values, edge_index=_edges(paths["graph"], features.shape[0]))


def _find(folder: Path, name: str, verify: bool) -> dict[str, Path]:
    paths = {part: folder / f"ind.{name}.{part}" for part in _PARTS}
    for path in paths.values():
        if not path.is_file():
            raise DataError(path, "this file", "no such file",
                            remedy="The files are in the folder data of github.com/kimiyoung/planetoid.")
        expected = _SHA256.get(path.name) if verify else None
        if expected and (actual := sha256_of(path)) != expected:
            raise DataError(path, f"SHA-256 {expected}", actual,
                            remedy="Fetch it again, or read it as it is with --no-verify (verify=False).")
    return paths


def _matrix(path: Path) -> csr_matrix:
    raw: Any = read_array_pickle(path)
    if not isinstance(raw, csr_matrix):
        raise DataError(path, "a scipy CSR matrix", type(raw).__name__)
    try:
        matrix = csr_matrix((raw.data, raw.indices, raw.indptr), shape=raw.shape, dtype="float32")
        matrix.check_format(full_check=True)
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(path, "a sound CSR matrix", error) from error
    return matrix


def _one_hot(path: Path) -> Any:
    raw = read_array_pickle(path)
    if not isinstance(raw, np.ndarray) or raw.ndim != 2 or raw.dtype.kind not in "iuf":
        raise DataError(path, "a numeric array (nodes, classes)", type(raw).__name__)
    return raw


def _test_index(path: Path) -> Tensor:
    words = read_text(path).split()
    wrong = next((word for word in words or [""] if not (word.isdecimal() and len(word) < _MOST_DIGITS)), None)
    if wrong is not None:
        raise DataError(path, "one node number a line", repr(wrong))
    return torch.tensor([int(word) for word in words])


def _check_fit(paths: dict[str, Path], features: tuple[Any, ...], labels: tuple[Any, ...], test: Tensor) -> None:
    for part, rows, targets in zip(("", "t", "all"), features, labels, strict=True):
        if rows.shape[0] != targets.shape[0]:
            raise DataError(paths[f"{part}y"], f"as many rows as {paths[f'{part}x'].name} has, {rows.shape[0]}",
                            targets.shape[0])
    tx, allx = features[1:]
    path, first, last = paths["test.index"], int(test.min()), int(test.max())
    if len(test) != tx.shape[0] or len(test.unique()) != len(test) or first != allx.shape[0]:
        raise DataError(path, f"numbers of the {tx.shape[0]} rows of tx, each once, from {allx.shape[0]} up",
                        f"{len(test)} numbers from {first}")
    span = last + 1 - allx.shape[0]
    if span > 2 * len(test):
        raise DataError(path, f"at most half of the numbers from {allx.shape[0]} to its highest left out",
                        f"{len(test)} of {span}, the highest {last}",
                        remedy="Each number left out becomes a node without features.")


def _placed(allx: Any, tx: Any, ally: Any, ty: Any, test: Tensor) -> tuple[csr_matrix, Any]:
    """Return features and labels of all nodes, with the rows of tx and ty where test.index puts them."""
    rows = int(test.max()) + 1 - allx.shape[0]
    place = test.numpy() - allx.shape[0]
    scatter = csr_matrix((np.ones(len(place), "float32"), (place, np.arange(len(place)))), shape=(rows, len(place)))
    labels = np.zeros((rows, ty.shape[1]), ty.dtype)
    labels[place] = ty
    features = csr_matrix(vstack([allx, scatter @ tx], format="csr"))
    features.sort_indices()
    return features, np.concatenate([ally, labels])


def _edges(path: Path, num_nodes: int) -> Tensor:
    raw = read_array_pickle(path)
    if not isinstance(raw, dict) or not all(isinstance(neighbors, list) for neighbors in raw.values()):
        raise DataError(path, "a dictionary of lists", type(raw).__name__)
    wrong = [n for m, neighbors in raw.items() for n in (m, *neighbors)
             if not isinstance(n, Integral) or isinstance(n, bool) or abs(int(n)) >= 2 ** 63]
    if wrong:
        raise DataError(path, f"nodes from 0 to {num_nodes - 1}", repr(wrong[0]))
    pairs = torch.tensor([(m, n) for m, neighbors in raw.items() for n in neighbors if m != n], dtype=torch.int64)
    if pairs.numel() == 0:
        return pairs.new_zeros(2, 0)
    if int(pairs.min()) < 0 or int(pairs.max()) >= num_nodes:
        raise DataError(path, f"nodes from 0 to {num_nodes - 1}", f"{int(pairs.min())} to {int(pairs.max())}")
    both = torch.cat([pairs, pairs.flip(1)])
    return both.unique(dim=0).T.contiguous()
