"""Options of the recipes on images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.data.image_files import files_of
from structconv_systems.recipes.options.sequences import OnFiles
from structconv_systems.train.config import option
from structconv_systems.train.effect import Effect

__all__ = ["MnistCheb", "NonLocal", "OnImages"]


_BLOCKS = ("embedded-gaussian", "gaussian", "dot-product", "concatenation")


@dataclass(frozen=True, kw_only=True)
class OnImages(OnFiles):
    """Options of the recipes that classify images."""

    folder = "mnist"
    where = "MNIST is at yann.lecun.com/exdb/mnist; idx files or folders of PNG of other images go as well."
    reads = ("train", "test")
    train: str = option("train", "stem of two idx files, STEM-images-idx3-ubyte and STEM-labels-idx1-ubyte, plain or "
                        "gzipped; or a folder with a folder of PNGs for each class")
    test: str = option("t10k", "stem or folder of the test images")
    held_out: int = option(5000, "validation images: the last of the training images", minimum=1)
    samples: int = option(0, "use the first so many training images; 0: all", minimum=0)
    batch_size: int = option(100, "images in a batch", minimum=1)
    schedule: str = "cosine"
    warmup: int = 100
    clip: float = 5.0

    def _files_at(self, path: Path) -> list[Path]:
        return files_of(path)

    def from_here(self, name: str) -> str:
        path = Path(name).absolute()
        return str(path) if path.is_dir() or files_of(path) else name


@dataclass(frozen=True, kw_only=True)
class MnistCheb(OnImages):
    """Defferrard, Bresson and Vandergheynst (2016), section 5.1."""

    name = "mnist-cheb"
    learning = "loss"
    published = "99.14 on MNIST (CNN: 99.33)"
    effect: ClassVar = Effect(
        claim="accuracy of the graph network over the CNN, points; 0.5 less counts as none",
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
    seeds: int = 3
    steps: int = 2750
    weight_decay: float = 1e-4
    optimizer: str = "adamw"
    validate_every: int = 550
    checkpoint_every: int = 110

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.channels:
            raise ConfigError(self.name, "channels must be given for one level at least", "none")
        if not self.kernel % 2:
            raise ConfigError(self.name, "kernel must be odd", self.kernel)


@dataclass(frozen=True, kw_only=True)
class NonLocal(OnImages):
    """Wang, Girshick, Gupta and He (2018), section 4.1 and table 2a."""

    name = "nonlocal"
    published = "72.7 on Kinetics, without a block 71.8"
    effect: ClassVar = Effect(
        claim="least accuracy with a block over none, points", figure="test_accuracy",
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
    seeds: int = 3
    steps: int = 1100
    learning_rate: float = 1e-2
    warmup: int = 20
    validate_every: int = 275
    checkpoint_every: int = 110

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.channels % 2:
            raise ConfigError(self.name, "channels must be even", self.channels)
