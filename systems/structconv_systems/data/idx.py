"""idx files: arrays of numbers after their type and sizes, the format of MNIST."""

import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from structconv.errors import DataError
from structconv_systems.data.text import read_bytes

__all__ = ["read_idx"]

_MOST_AXES = 8
#: The type of the numbers in NumPy's names, by the third byte of a file; big-endian.
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


def read_idx(path: str | Path) -> Tensor:
    """Read the array in an idx file, plain or gzipped (LeCun, Cortes and Burges, "The MNIST database").

    The file has 0, 0, a byte for the type and one for the number of axes; their sizes, four bytes each; then the
    numbers, last axis fastest. Images of MNIST are uint8 (S, 28, 28), labels uint8 (S,).

    Raises:
        DataError: the header is wrong, a size is 0 or missing, the number of values does not match the sizes, or
            `read_bytes` cannot read the file.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.idx import read_idx
        >>> path = Path(folder.name, "labels-idx1-ubyte")
        >>> _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))     # bytes, one axis, of size 3
        >>> read_idx(path)
        tensor([7, 2, 1], dtype=torch.uint8)
    """
    content = read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES or (
            not 0 < content[3] <= _MOST_AXES):
        raise DataError(path, "an idx file, which begins with 0, 0, a type (8, 9, 11 to 14) and the number of axes",
                        ", ".join(map(str, content[:4])) or "an empty file")
    axes, start = content[3], 4 + 4 * content[3]
    sizes = [int.from_bytes(content[place:place + 4], "big") for place in range(4, min(start, len(content)), 4)]
    if len(content) < start or 0 in sizes:
        raise DataError(path, f"{axes} sizes above 0, four bytes each", f"{len(content) - 4} bytes, {sizes}")
    kind = np.dtype(_TYPES[content[2]])
    expected = math.prod(sizes) * kind.itemsize
    if len(content) - start != expected:
        raise DataError(path, f"{expected} bytes of numbers, for {' x '.join(map(str, sizes))} of {kind.itemsize} each",
                        len(content) - start, remedy="Fetch it again.")
    numbers = np.frombuffer(content, kind, offset=start).astype(kind.newbyteorder("="))
    return torch.from_numpy(numbers.reshape(sizes))
