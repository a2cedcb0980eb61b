"""Options of the recipe on videos of moving digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.recipes.options.sequences import OnFiles
from structconv_systems.train.config import option
from structconv_systems.train.effect import Effect

__all__ = ["MovingDigits"]


@dataclass(frozen=True, kw_only=True)
class MovingDigits(OnFiles):
    """Shi et al. (2015)."""

    name = "convlstm"
    folder = "mnist"
    where = "MNIST is at yann.lecun.com/exdb/mnist; any idx file of images goes."
    published = "cross-entropy of 10 frames of Moving MNIST, 64 x 64: ConvLSTM 3670.85, LSTM 4832.49"
    reads = ("images", "test")
    effect: ClassVar = Effect(
        claim="cross-entropy of a frame, the best baseline over ConvLSTM", figure="test_entropy", higher=False,
        ratio=True, pairs=(("convlstm", "lstm"), ("convlstm", "lstm-wide"), ("convlstm", "mean-frame")),
        published=4832.49 / 3670.85)
    further: ClassVar = (("wide=0", "steps=300", "validate_every=100"),)
    presets: ClassVar = {
        "quick": {"seeds": 1, "hidden": 24, "wide": 256, "layers": 1, "steps": 160, "validate_every": 80,
                  "checkpoint_every": 80, "held_out": 100, "learning_rate": 1e-2, "warmup": 10},
        "paper": {"seeds": 1, "wide": 0, "size": 64, "side": 28, "patch": 4, "kernel": 5, "hidden": 128,
                  "held_out": 2000, "steps": 100000, "validate_every": 1000, "checkpoint_every": 1000}}
    images: str = option("train-images-idx3-ubyte.gz", "idx file of images, plain or gzipped; the last tenth is for "
                         "validation")
    test: str = option("t10k-images-idx3-ubyte.gz", "idx file of the test images")
    size: int = option(32, "rows and columns of a frame", minimum=2)
    side: int = option(14, "resize images to this many rows and columns; below size", minimum=1)
    digits: int = option(2, "digits in a video", minimum=1)
    speed: float = option(0.1, "distance that a digit moves in a frame, as a share of its free space", minimum=0)
    history: int = option(10, "input frames of a forecast", minimum=1)
    horizon: int = option(10, "forecast frames", minimum=1)
    samples: int = option(10000, "training videos", minimum=1)
    held_out: int = option(500, "validation videos, and as many test videos", minimum=2)
    patch: int = option(4, "rows and columns of the patch of a frame that is one entry; divides size", minimum=1)
    kernel: int = option(3, "kernel size of the convolutions", minimum=1)
    hidden: int = option(32, "channels of a state", minimum=1)
    layers: int = option(2, "layers of cells in the encoder and in the decoder", minimum=1)
    wide: int = option(512, "hidden units of the wide LSTM; 0: a state of as many numbers as the ConvLSTM's", minimum=0)
    batch_size: int = option(16, "videos in a batch", minimum=1)
    seeds: int = 3
    steps: int = 800
    learning_rate: float = 3e-3
    schedule: str = "cosine"
    warmup: int = 50
    clip: float = 0.0
    validate_every: int = 250
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % self.patch:
            raise ConfigError(self.name, f"patch must divide size={self.size}", self.patch)
        if self.side >= self.size:
            raise ConfigError(self.name, f"side must be below size={self.size}", self.side)
