"""Images and their labels: in two idx files like MNIST, or PNG files in a folder for each class."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from structconv.errors import DataError
from structconv_systems.data.idx import read_idx
from structconv_systems.data.image_files import IMAGES, LABELS, class_folders, files_of, stem_files

__all__ = ["Images", "read_images", "side_by_side"]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Images:
    """Gray images with one label each.

    Attributes:
        inputs: (S, H, W), float32 between 0 and 1.
        labels: (S,), int64, below the number of names.
        names: names of the classes.

    Example:

        >>> from structconv_systems.data.images import Images
        >>> images = Images(inputs=torch.zeros(3, 28, 28), labels=torch.tensor([0, 1, 1]), names=("shirt", "shoe"))
        >>> images.names[images.labels[2]]
        'shoe'
    """

    inputs: Tensor
    labels: Tensor
    names: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, chosen: slice) -> Images:
        return Images(inputs=self.inputs[chosen], labels=self.labels[chosen], names=self.names)

    def __repr__(self) -> str:
        return f"Images({len(self)} of {' x '.join(map(str, self.inputs.shape[1:]))}, {len(self.names)} classes)"


def side_by_side(images: Images, count: int, seed: int) -> Images:
    """Join pairs of images side by side, (count, H, 2 W), with the label 1 if both show the same class, else 0. Images
    and labels are drawn uniformly; an image may be in several pairs.

    Raises:
        DataError: all images show one class.

    Example:

        >>> from structconv_systems.data.images import Images, side_by_side
        >>> images = Images(inputs=torch.rand(10, 8, 8), labels=torch.arange(10) % 2, names=("zero", "one"))
        >>> pairs = side_by_side(images, count=6, seed=0)
        >>> pairs.inputs.shape
        torch.Size([6, 8, 16])
    """
    classes = images.labels.unique()
    if len(classes) < 2:
        raise DataError("pairs of images", "two classes at least", len(classes))
    random = torch.Generator().manual_seed(seed)
    first = torch.randint(len(images), (count,), generator=random)
    same = torch.randint(2, (count,), generator=random)
    second = torch.empty_like(first)
    for label in classes:
        own = images.labels == label
        for kind, others in ((1, own), (0, ~own)):
            chosen = (own[first] & (same == kind)).nonzero().squeeze(-1)
            among = others.nonzero().squeeze(-1)
            second[chosen] = among[torch.randint(len(among), (len(chosen),), generator=random)]
    return Images(inputs=torch.cat([images.inputs[first], images.inputs[second]], -1), labels=same,
                  names=("different", "same"))


def read_images(path: str | Path) -> Images:
    """Read images and labels of a stem or of a folder.

    Args:
        path: STEM of ``STEM-images-idx3-ubyte`` (S, H, W) and ``STEM-labels-idx1-ubyte`` (S,), of bytes, each plain or
            with ``.gz``; or a folder with one folder for each class, in the order of their names, which hold PNGs of
            one size; colors become greys. Pillow, which comes with matplotlib, reads them. The classes are mixed
            evenly, so that the first or the last images are of all classes.

    Raises:
        DataError: a file is missing or malformed, or files do not match.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.images import read_images
        >>> images = bytes([0, 0, 8, 3, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 2, 0, 255, 255, 0])        # one, 2 x 2
        >>> _ = Path(folder.name, "two-images-idx3-ubyte").write_bytes(images)
        >>> _ = Path(folder.name, "two-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 1, 4]))
        >>> read_images(Path(folder.name, "two")).inputs.tolist()
        [[[0.0, 1.0], [1.0, 0.0]]]
    """
    path = Path(path)
    return _of_folder(path) if path.is_dir() else _of_stem(path)


def _of_stem(path: Path) -> Images:
    images, labels = _array(path, IMAGES, 3), _array(path, LABELS, 1)
    if len(images) != len(labels):
        raise DataError(path, f"a label for each of {len(images)} images", f"{len(labels)} labels")
    names = tuple(map(str, range(int(labels.max()) + 1)))
    return Images(inputs=images / 255, labels=labels.long(), names=names)


def _array(stem: Path, part: str, axes: int) -> Tensor:
    files = stem_files(stem, part)
    file = next((file for file in files if file.is_file()), files[0])
    array = read_idx(file)
    if array.dim() != axes or array.dtype != torch.uint8:
        raise DataError(file, f"an array of bytes with {axes} axes", f"{array.dtype} {tuple(array.shape)}")
    return array


def _of_folder(path: Path) -> Images:
    folders, files = class_folders(path), files_of(path)
    if not files:
        raise DataError(path, "a folder for each class with PNGs in it", f"no PNG in {len(folders)} folders")
    rows = [_pixels(file) for file in files]
    for file, row in zip(files, rows, strict=True):
        if row.shape != rows[0].shape:
            raise DataError(file, f"an image of {_size(rows[0])} pixels, as the first", _size(row))
    names = tuple(folder.name for folder in folders)
    labels = torch.tensor([names.index(file.parent.name) for file in files])
    counts = labels.bincount()
    rank = torch.cat([torch.arange(count) for count in counts.tolist()])  # within the class: files are sorted by it
    mixed = ((rank + 0.5) / counts[labels]).argsort(stable=True)
    return Images(inputs=torch.stack(rows)[mixed] / 255, labels=labels[mixed], names=names)


def _size(image: Tensor) -> str:
    return " x ".join(map(str, image.shape))


def _pixels(path: Path) -> Tensor:
    """Read an image as (H, W), uint8."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            if not image.mode.startswith("I"):
                return torch.from_numpy(np.array(image.convert("L")))
            wide = np.array(image).astype(np.int64).clip(0, 65535)  # 16 bits, which convert() would cut off at 255
            return torch.from_numpy(((wide + 128) // 257).astype(np.uint8))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(path, "a whole PNG", error) from None
