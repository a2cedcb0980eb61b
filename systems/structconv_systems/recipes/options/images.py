"""Options of the recipes on images and videos."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.data.image_files import files_of
from structconv_systems.recipes.options.base import Effect, OnFiles, Recipe, option

__all__ = ["DIGIT_BASES", "CompareDigits", "MnistCheb", "MovingDigits", "NonLocal", "OnImages"]

_BLOCKS = ("embedded-gaussian", "gaussian", "dot-product", "concatenation")


@dataclass(frozen=True, kw_only=True)
class OnImages(OnFiles, schedule="cosine", warmup=100, clip=5.0):
    """Options of the recipes that classify images."""

    folder = "mnist"
    where = "MNIST is at yann.lecun.com/exdb/mnist; idx files or folders of PNG of other images go as well."
    reads = ("train", "test")
    train: str = option("train", "stem of two idx files, STEM-images-idx3-ubyte and STEM-labels-idx1-ubyte, plain or "
                        "gzipped; or a folder with a folder of PNGs for each class")
    test: str = option("t10k", "stem or folder of the test images")
    held_out: int = option(5000, "validation images: the last of the training images", minimum=1)
    samples: int = option(0, "number of training images, the first ones; 0: all", minimum=0)
    batch_size: int = option(100, "images in a batch", minimum=1)

    def _files_at(self, path: Path) -> list[Path]:
        return files_of(path)

    def from_here(self, name: str) -> str:
        path = Path(name).absolute()
        return str(path) if path.is_dir() or files_of(path) else name


@dataclass(frozen=True, kw_only=True)
class MnistCheb(OnImages, seeds=3, steps=2750, weight_decay=1e-4, optimizer="adamw", validate_every=550,
                checkpoint_every=110):
    """Defferrard, Bresson and Vandergheynst (2016), section 5.1."""

    name = "mnist-cheb"
    learning = "loss"
    published = "99.14 on MNIST (CNN: 99.33)"
    effect: ClassVar = Effect(claim="accuracy of the graph network over the CNN, points; 0.5 less counts as none",
                              figure="test_accuracy", pairs=(("graph", "cnn"),), published=99.14 - 99.33, margin=-0.5)
    presets: ClassVar = {
        "quick": {"seeds": 1, "samples": 10_000, "order": 9, "channels": (16, 32), "hidden": 128, "steps": 500,
                  "validate_every": 250, "checkpoint_every": 125, "learning_rate": 2e-3},
        "paper": {"steps": 11_000, "seeds": 3}}
    neighbors: int = option(8, "nearest pixels that a pixel is connected to", minimum=1)
    order: int = option(25, "K of a graph filter: polynomials of degrees 0 to K - 1", minimum=1)
    kernel: int = option(5, "kernel size of the CNN", minimum=1)
    channels: tuple[int, ...] = option((32, 64), "channels of each level; after each, four pixels are pooled to one",
                                       minimum=1)
    hidden: int = option(512, "channels of the layer before the logits", minimum=1)
    dropout: float = option(0.5, "share of these channels dropped", minimum=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.channels:
            raise ConfigError(self.name, "channels must be given for one level at least", "none")
        if not self.kernel % 2:
            raise ConfigError(self.name, "kernel must be odd", self.kernel)


@dataclass(frozen=True, kw_only=True)
class NonLocal(OnImages, seeds=3, steps=1100, learning_rate=1e-2, warmup=20, validate_every=275, checkpoint_every=110):
    """Wang, Girshick, Gupta and He (2018), section 4.1 and table 2a."""

    name = "nonlocal"
    published = "72.7 on Kinetics, without a block 71.8"
    effect: ClassVar = Effect(claim="least accuracy with a block over none, points", figure="test_accuracy",
                              pairs=tuple((name, "none") for name in _BLOCKS), published=72.5 - 71.8)
    presets: ClassVar = {
        "quick": {"blocks": ("gaussian",), "samples": 10_000, "steps": 200, "validate_every": 100,
                  "checkpoint_every": 100, "seeds": 1, "longest": 56, "rounds": 3},
        "paper": {"steps": 11_000, "seeds": 5}}
    blocks: tuple[str, ...] = option(_BLOCKS, "functions of the blocks that are trained, a,b,c", choices=_BLOCKS)
    channels: int = option(32, "channels of the layers; the first has half as many", minimum=2)
    inner: int = option(16, "channels within a block", minimum=1)
    pairs: int = option(20_000, "training pairs of images side by side; the label says whether both show one class; "
                        "0: single images and their classes", minimum=0)
    longest: int = option(112, "pixels on a side of the largest timed image; the others are 1/2, 1/4, ... of it, "
                          "down to 14", minimum=28)
    rounds: int = option(5, "rounds of timing; each times every block once", minimum=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels % 2:
            raise ConfigError(self.name, "channels must be even", self.channels)


@dataclass(frozen=True, kw_only=True)
class MovingDigits(OnFiles, seeds=3, steps=800, learning_rate=3e-3, schedule="cosine", warmup=50, clip=0.0,
                   validate_every=250, checkpoint_every=100):
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

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size % self.patch:
            raise ConfigError(self.name, f"patch must divide size={self.size}", self.patch)
        if self.side >= self.size:
            raise ConfigError(self.name, f"side must be below size={self.size}", self.side)


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
