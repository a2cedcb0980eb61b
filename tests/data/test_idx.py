"""The idx format: MNIST as it is published, all types of numbers, and files that are no such."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch

from structconv.data.idx import read_idx
from structconv.errors import DataError


def idx(numbers, kind):
    """The bytes of a file."""
    return struct.pack(f">HBB{numbers.ndim}I", 0, kind, numbers.ndim, *numbers.shape) + numbers.astype(
        numbers.dtype.newbyteorder(">")).tobytes()


def test_mnist_has_its_published_counts(data_dir):
    folder = data_dir / "mnist"
    if not folder.is_dir():
        pytest.skip("no MNIST in the folder of data sets")
    images, labels = (read_idx(folder / f"t10k-{name}-ubyte.gz") for name in ("images-idx3", "labels-idx1"))
    assert images.shape == (10000, 28, 28) and images.dtype == torch.uint8
    assert labels[:5].tolist() == [7, 2, 1, 0, 4] and labels.bincount().tolist()[:2] == [980, 1135]


@pytest.mark.parametrize(("kind", "dtype"), [(8, "uint8"), (9, "int8"), (11, "int16"), (12, "int32"), (13, "float32"),
                                             (14, "float64")])
@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_all_types_come_back(tmp_path, kind, dtype, pack):
    numbers = np.arange(-6, 18).reshape(2, 3, 4).astype(dtype)
    (tmp_path / "a").write_bytes(pack(idx(numbers, kind)))
    found = read_idx(tmp_path / "a")
    assert found.dtype == getattr(torch, dtype) and np.array_equal(found.numpy(), numbers)


WHOLE = idx(np.zeros((2, 3), np.uint8), 8)


@pytest.mark.parametrize("content, message", [
    (b"", "expected an idx file, which begins with two zero bytes"), (b"\0\0\x08", "expected an idx file"),
    (b"\x89PNG" + WHOLE, "expected an idx file"), (b"\0\0\x0a\x01" + WHOLE, "expected an idx file"),
    (WHOLE[:7], "expected at most 8 axes, and a size of each; got 2 axes in 7 bytes"),
    (b"\0\0\x08\x09" + 9 * b"\0\0\0\1" + b"x", "expected at most 8 axes, and a size of each; got 9 axes"),
    (idx(np.zeros((2, 0), np.uint8), 8), r"expected numbers; got axes \(2, 0\)"),
    (WHOLE[:-1], r"expected 18 bytes for numbers \(2, 3\); got 17 bytes\. Fetch it again"),
    (WHOLE + b"\0", "got 19 bytes"), (gzip.compress(WHOLE)[:-9], "expected a whole gzip file")])
def test_another_file_is_named(tmp_path, content, message):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / "a")
    with pytest.raises(DataError, match="no such file"):
        read_idx(tmp_path / "b")
