"""The 8x8 digits bundled with scikit-learn: 1,797 images of ten handwritten digits, no network."""

from dataclasses import dataclass

import torch
from torch import Tensor

from structconv.errors import ConfigError

__all__ = ["Digits", "load_digits"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Split:
    """Images (B, 64, 1) float32 in [0, 1], pixels in row-major order as entries, and labels (B,) int64."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, kw_only=True, eq=False)
class Digits:
    """The three parts of the data set; `shape` is that of the pixel grid.

    Example:

        >>> from structconv_systems.data.digits import load_digits
        >>> digits = load_digits()
        >>> digits.shape, digits.num_classes
        ((8, 8), 10)
    """

    train: Split
    validation: Split
    test: Split
    shape: tuple[int, int] = (8, 8)
    num_classes: int = 10


def load_digits(*, validation: int = 200, test: int = 500, seed: int = 0) -> Digits:
    """Split scikit-learn's digits into train, validation and test parts, shuffled by `seed`.

    Intensities 0..16 are divided by 16. The split depends on `seed` alone, so runs with different training seeds
    share one test set.

    Raises:
        ConfigError: the parts leave no image to train on.

    Example:

        >>> from structconv_systems.data.digits import load_digits
        >>> digits = load_digits(validation=200, test=500)
        >>> digits.train.images.shape, digits.test.labels.shape
        (torch.Size([1097, 64, 1]), torch.Size([500]))
    """
    from sklearn.datasets import load_digits as bundled

    raw = bundled()
    images = torch.from_numpy(raw.data).float().div(16).unsqueeze(-1)
    labels = torch.from_numpy(raw.target).long()
    if validation < 1 or test < 1 or validation + test >= len(labels):
        raise ConfigError("load_digits", f"validation and test must leave some of {len(labels)} images to train on",
                          f"{validation} and {test}")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = order.split([len(labels) - validation - test, validation, test])
    train, held_out, final = (Split(images=images[part], labels=labels[part]) for part in parts)
    return Digits(train=train, validation=held_out, test=final)
