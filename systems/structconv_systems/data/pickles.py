"""Read old pickles of arrays without running code in them."""

import collections
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from structconv.errors import DataError

__all__ = ["read_array_pickle"]


def _admitted() -> dict[tuple[str, str], Callable[..., object]]:
    """Return the globals that a pickle of arrays may name, under all module paths of numpy and scipy."""
    reconstruct: Any = np.empty(0).__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    from_buffer: Any = np.zeros(1).__reduce_ex__(5)[0]
    table: dict[tuple[str, str], Callable[..., object]] = {
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
        ("scipy.sparse.csr", "csr_matrix"): csr_matrix,
        ("scipy.sparse._csr", "csr_matrix"): csr_matrix,
        ("collections", "defaultdict"): collections.defaultdict,
        ("_codecs", "encode"): _latin1,
        ("numpy.core.numeric", "_frombuffer"): from_buffer,
        ("numpy._core.numeric", "_frombuffer"): from_buffer,
    }
    for module in ("numpy.core.multiarray", "numpy._core.multiarray"):
        table[module, "_reconstruct"] = reconstruct
        table[module, "scalar"] = scalar
    for module in ("__builtin__", "builtins"):
        table[module, "list"] = list
        table[module, "int"] = int
    return table


def _latin1(text: str, encoding: str) -> bytes:
    """Return bytes as protocols below 3 write them."""
    if encoding != "latin1":
        raise ValueError(f"bytes as latin1 alone, not as {encoding!r}")
    return text.encode("latin1")


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that resolves the globals of `_admitted` and refuses all others."""

    def __init__(self, content: bytes, path: Path) -> None:
        super().__init__(io.BytesIO(content), encoding="latin1")
        self._path = path
        self._table = _admitted()

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        try:
            return self._table[module, name]
        except KeyError:
            raise DataError(self._path, "numpy and scipy arrays only", f"the forbidden global {module}.{name}",
                            remedy="Nothing of it was run; fetch the file again from its publisher.") from None


def read_array_pickle(path: Path) -> object:
    """The object in a pickle of numpy arrays, scipy CSR matrices, lists and dictionaries, and of nothing else.

    Strings of Python 2 are read as latin1. Cost: one read of the file.

    Raises:
        DataError: the pickle names any other global (the file and the global are named, nothing is called),
            or it is damaged.
    """
    content = Path(path).read_bytes()
    try:
        return _ArrayUnpickler(content, Path(path)).load()
    except DataError:
        raise
    except Exception as error:
        raise DataError(path, "a pickle of arrays", f"{type(error).__name__}: {error}",
                        remedy="Fetch the file again from its publisher.") from error
