"""idx files, and images with labels: what is whole is read, what is not is named."""

import gzip
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from structconv.errors import DataError
from structconv_systems.data.idx import read_idx
from structconv_systems.data.image_files import files_of
from structconv_systems.data.images import read_images

TYPES = [(0x08, "u1", torch.uint8), (0x09, "i1", torch.int8), (0x0B, ">i2", torch.int16), (0x0C, ">i4", torch.int32),
         (0x0D, ">f4", torch.float32), (0x0E, ">f8", torch.float64)]


def idx(array, kind=0x08, sizes=None):
    """The bytes of an idx file."""
    sizes = array.shape if sizes is None else sizes
    return struct.pack(f">BBBB{len(sizes)}I", 0, 0, kind, len(sizes), *sizes) + array.tobytes()


def write_mnist(folder, stem, images, labels, packed=False):
    """Two idx files of uint8 arrays."""
    for part, array in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
        content = idx(np.asarray(array, dtype="u1"))
        (folder / f"{stem}-{part}{'.gz' if packed else ''}").write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize(("kind", "numbers", "dtype"), TYPES)
def test_every_type_is_read(kind, numbers, dtype, written):
    array = np.arange(-3, 9).reshape(3, 4).clip(0 if numbers == "u1" else -3, None).astype(numbers)
    for content in (idx(array, kind), gzip.compress(idx(array, kind))):
        actual = read_idx(written("file", content))
        assert actual.dtype == dtype
        assert actual.tolist() == array.tolist()


@pytest.mark.parametrize(("content", "said"), [
    (b"", "got an empty file"), (b"\0\0\x08", "begins with 0, 0"), (b"\x89PNG....", "got 137, 80, 78, 71"),
    (b"\0\0\x07\x01\0\0\0\x01a", "begins with 0, 0"), (b"\0\0\x08\0a", "begins with 0, 0"),
    (b"\0\0\x08\x02\0\0\0\x01\0", "2 sizes above 0"), (b"\0\0\x08\x01\0\0\0\0", "1 sizes above 0"),
    (b"\0\0\x08\x01\0\0\0\x03ab", "expected 3 bytes of numbers, for 3 of 1 each; got 2"),
    (b"\0\0\x0c\x01\0\0\0\x01abcde", "expected 4 bytes of numbers, for 1 of 4 each; got 5"),
    (b"\0\0\x08\x03" + b"\xff" * 12 + b"a", "bytes of numbers")])
def test_what_is_no_idx_file_is_named(content, said, written):
    with pytest.raises(DataError, match=rf"/file\b.*{said}"):
        read_idx(written("file", content))


@pytest.mark.parametrize("packed", [False, True])
def test_images_and_labels_of_a_stem(packed, tmp_path):
    pixels = np.arange(24).reshape(2, 3, 4) * 10
    write_mnist(tmp_path, "some", pixels, [1, 3], packed)
    actual = read_images(tmp_path / "some")
    torch.testing.assert_close(actual.inputs, torch.from_numpy(pixels).float() / 255)
    assert (actual.labels.tolist(), actual.names) == ([1, 3], ("0", "1", "2", "3"))
    assert repr(actual[1:]) == "Images(1 of 3 x 4, 4 classes)"
    assert len(files_of(tmp_path / "some")) == 2


def test_files_that_do_not_fit_each_other(tmp_path):
    with pytest.raises(DataError, match="a-images-idx3-ubyte: expected a file"):
        read_images(tmp_path / "a")
    write_mnist(tmp_path, "a", np.zeros((2, 3, 3)), [0])
    with pytest.raises(DataError, match="a label for each of 2 images; got 1 labels"):
        read_images(tmp_path / "a")
    write_mnist(tmp_path, "b", np.zeros((2, 3)), [0, 1])
    with pytest.raises(DataError, match="b-images-idx3-ubyte: expected an array of bytes with 3 axes"):
        read_images(tmp_path / "b")


def write_folder(path, sizes):
    """A folder for each class, with PNGs of these sizes, each of one color."""
    for place, (name, shapes) in enumerate(sizes.items()):
        (path / name).mkdir(parents=True)
        for number, size in enumerate(shapes):
            Image.new("RGB", size, (place * 50,) * 3).save(path / name / f"{number}.png")


def test_a_folder_of_classes(tmp_path):
    write_folder(tmp_path, {"cat": [(4, 3)], "ant": [(4, 3), (4, 3)]})
    (tmp_path / "ant" / "notes.txt").write_text("no image")
    actual = read_images(tmp_path)
    assert actual.inputs.shape == (3, 3, 4)
    assert (actual.names, actual.labels.tolist()) == (("ant", "cat"), [0, 1, 0])
    torch.testing.assert_close(actual.inputs[:, 0, 0] * 255, torch.tensor([50.0, 0.0, 50.0]))
    assert len(files_of(tmp_path)) == 3


def test_the_first_and_the_last_images_of_a_folder_are_of_all_classes(tmp_path):
    write_folder(tmp_path, {"a": [(2, 2)] * 12, "b": [(2, 2)] * 6, "c": [(2, 2)] * 6})
    labels = read_images(tmp_path).labels
    for part in (labels[:8], labels[8:16], labels[-8:]):
        assert part.bincount().tolist() == [4, 2, 2]


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match="no PNG in 0 folders"):
        read_images(tmp_path)
    write_folder(tmp_path, {"a": [(4, 3)], "b": [(3, 4)]})
    with pytest.raises(DataError, match=r"an image of 3 x 4 pixels, as the first; got 4 x 3"):
        read_images(tmp_path)
    content = (tmp_path / "a" / "0.png").read_bytes()
    for torn in (content[:-30], b"no image"):
        (tmp_path / "b" / "0.png").write_bytes(torn)
        with pytest.raises(DataError, match="a whole PNG"):
            read_images(tmp_path)


def test_mnist(real):
    actual = read_images(real("mnist") / "t10k")
    assert actual.inputs.shape == (10_000, 28, 28)
    assert actual.labels[:5].tolist() == [7, 2, 1, 0, 4]
    assert actual.labels.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_grey_of_16_bits_is_that_of_8(tmp_path):
    grey = np.arange(0, 256, 4, dtype=np.uint8).reshape(8, 8)
    for name, pixels in (("wide", grey.astype(np.uint16) * 257), ("narrow", grey)):
        (tmp_path / name / "a").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / name / "a" / "0.png")
    wide, narrow = (read_images(tmp_path / name).inputs for name in ("wide", "narrow"))
    assert torch.equal(wide, narrow)
