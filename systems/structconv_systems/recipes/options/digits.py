"""Options of the comparison on the 8x8 digits."""

from __future__ import annotations

from dataclasses import dataclass

from structconv_systems.train.config import Recipe, option

__all__ = ["DIGIT_BASES", "CompareDigits"]

DIGIT_BASES = ("identity", "shifts", "separable", "gcn", "chebyshev", "attention", "mixed")


@dataclass(frozen=True, kw_only=True)
class CompareDigits(Recipe):
    """One small network on the 8x8 digits through seven bases."""

    name = "digits"
    bases: tuple[str, ...] = option(DIGIT_BASES, "some of the seven bases, a,b,c", choices=DIGIT_BASES)
    seeds: int = option(3, "trainings of each basis, with seeds 0, 1, ...", minimum=1)
    channels: int = option(24, "channels of the hidden layers", minimum=1)
    epochs: int = option(20, "passes over the training images", minimum=1)
    batch_size: int = option(64, "images in a batch", minimum=1)
    learning_rate: float = option(0.01, "peak learning rate of Adam", minimum=0, below=1e38)
