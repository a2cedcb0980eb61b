"""Tensors in the idx format, in which MNIST is published."""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from structconv.data.text import read_bytes
from structconv.errors import DataError

__all__ = ["read_idx"]

#: The type of the numbers by the third byte; all are written with the greatest byte first.
_TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_AXES = 8


def read_idx(path: str | Path) -> Tensor:
    """The tensor in an idx file, plain or gzipped, in the dtype that it is written in: uint8 of MNIST.

    The file has two zero bytes, one for the type of the numbers, one for the number of axes, four for the size of each
    axis, and the numbers, the last axis running fastest (LeCun, Cortes and Burges, "The MNIST database").

    Raises:
        DataError: the file cannot be read, it does not begin so, or has no numbers, or more or fewer than it says.
    """
    content = read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _TYPES:
        raise DataError(path, "an idx file, which begins with two zero bytes and one of "
                        f"{', '.join(f'0x{kind:02x}' for kind in _TYPES)}", f"the bytes {content[:4].hex(' ')!r}")
    kind, begin = np.dtype(_TYPES[content[2]]), 4 + 4 * content[3]
    if content[3] > _MOST_AXES or len(content) < begin:
        raise DataError(path, f"at most {_MOST_AXES} axes, and a size of each", f"{content[3]} axes in {len(content)} "
                        "bytes")
    shape = struct.unpack(f">{content[3]}I", content[4:begin])
    if 0 in shape:
        raise DataError(path, "numbers", f"axes {shape}")
    size = begin + kind.itemsize * math.prod(shape)
    if len(content) != size:
        raise DataError(path, f"{size} bytes for numbers {shape}", f"{len(content)} bytes",
                        remedy="Fetch it again.")
    numbers = np.frombuffer(content, kind, offset=begin).reshape(shape)
    return torch.from_numpy(numbers.astype(kind.newbyteorder("=")))
