"""Options of the recipes on sequences."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from structconv.errors import ConfigError
from structconv.train.config import option
from structconv.train.options import Trained

__all__ = ["Characters", "OnFiles", "RNNSearch", "Transformer", "Translation"]


@dataclass(frozen=True, kw_only=True)
class OnFiles(Trained):
    """A recipe that reads files in a folder.

    Attributes:
        folder: where the files are below a folder with the data of all recipes.
        where: a user gets them; a sentence.
    """

    folder: ClassVar[str]
    where: ClassVar[str]
    data: str = option(".", "the folder with the files")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not Path(self.data).is_dir():
            raise ConfigError(self.name, "data must be a folder", repr(self.data),
                              f"Give it with --data DIR. {self.where}")
        object.__setattr__(self, "data", str(Path(self.data).resolve()))

    def path(self, name: str) -> Path:
        """A file in the folder, or elsewhere if `name` is a whole path."""
        return Path(self.data) / name


@dataclass(frozen=True, kw_only=True)
class Translation(OnFiles):
    """What the recipes share that translate."""

    folder = "multi30k"
    where = "Multi30k is at github.com/multi30k/dataset, in data/task1/raw; other parallel text goes as well."
    train: str = option("train", "stem of the training files: STEM.SOURCE and STEM.TARGET, plain or gzipped")
    valid: str = option("val", "stem of the validation files")
    test: str = option("test_2016_flickr", "stem of the test files")
    from_language: str = option("en", "ending of the files that are translated")
    to_language: str = option("de", "ending of the files that they are translated to")
    sentences: int = option(0, "training pairs used, the first ones; 0: all", minimum=0)
    vocabulary: int = option(8000, "subwords, of both languages together", minimum=300)
    longest: int = option(100, "subwords of a training sentence; longer ones are left out", minimum=2)
    batch_tokens: int = option(2048, "in a batch, padding included, on the longer side", minimum=1)
    label_smoothing: float = option(0.1, "share of the target spread over all subwords", minimum=0, below=1)
    beam: int = option(5, "hypotheses kept in decoding; 1: greedy", minimum=1)
    length_penalty: float = option(1.0, "power of the length that scores are divided by", minimum=0)
    channels: int = option(256, "of the hidden layers", minimum=1)
    dropout: float = option(0.1, "share of hidden units dropped", minimum=0, below=1)


@dataclass(frozen=True, kw_only=True)
class Transformer(Translation):
    """Vaswani et al. (2017)."""

    name = "transformer"
    published = "small models 36-41"
    goals: ClassVar = {"quick": 3.0, "default": 33.0}
    presets: ClassVar = {
        "quick": {"sentences": 4000, "vocabulary": 2000, "channels": 128, "hidden": 256, "layers": 2, "steps": 400,
                  "warmup": 100, "validate_every": 200, "checkpoint_every": 50, "beam": 1, "learning_rate": 3e-3},
        "paper": {"channels": 512, "hidden": 2048, "layers": 6, "heads": 8, "steps": 100_000, "warmup": 4000,
                  "batch_tokens": 25_000, "learning_rate": 7e-4, "beam": 4, "length_penalty": 0.6}}
    layers: int = option(3, "of the encoder and of the decoder", minimum=1)
    heads: int = option(4, "of attention", minimum=1)
    hidden: int = option(1024, "channels within the feed-forward parts", minimum=1)
    norm: str = option("pre", "where layer norm stands: pre or post")
    positions: str = option("sinusoidal", "encoding of positions: sinusoidal or learnt")
    recompute: bool = option(False, "compute a block's activations again in the backward pass, to save memory")
    dropout: float = option(0.2, "share of hidden units dropped", minimum=0, below=1)
    steps: int = option(4000, "of the optimiser, at most", minimum=1)
    optimizer: str = option("adamw", "adam or adamw")
    learning_rate: float = option(1.5e-3, "at its peak", minimum=0)
    schedule: str = option("inverse_root", "of the learning rate: constant, inverse_root, cosine or plateau")
    warmup: int = option(500, "steps in which the learning rate rises", minimum=0)


@dataclass(frozen=True, kw_only=True)
class RNNSearch(Translation):
    """Bahdanau, Cho and Bengio (2015), with and without attention."""

    name = "rnnsearch"
    published = "26.75 vs 17.82"
    goals: ClassVar = {"quick": 0.3, "default": 6.0}
    presets: ClassVar = {
        "quick": {"sentences": 4000, "vocabulary": 2000, "channels": 128, "steps": 300, "validate_every": 150,
                  "checkpoint_every": 50, "beam": 1, "learning_rate": 3e-3}}
    steps: int = option(4000, "of the optimiser, at most", minimum=1)
    label_smoothing: float = option(0.0, "share of the target spread over all subwords", minimum=0, below=1)
    dropout: float = option(0.2, "share of hidden units dropped", minimum=0, below=1)
    schedule: str = option("cosine", "of the learning rate: constant, inverse_root, cosine or plateau")
    warmup: int = option(200, "steps in which the learning rate rises", minimum=0)
    channels: int = option(256, "of the recurrent layers and of embeddings", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Characters(OnFiles):
    """A causal Transformer on characters, with rotary positions (Su et al. 2021)."""

    name = "characters"
    folder = "text"
    where = "Tiny Shakespeare is at github.com/karpathy/char-rnn, data/tinyshakespeare/input.txt; any text goes."
    published = "1.47"
    higher = False
    goals: ClassVar = {"quick": 2.6, "default": 1.55}
    presets: ClassVar = {
        "quick": {"channels": 96, "layers": 2, "heads": 3, "length": 64, "batch_size": 16, "steps": 300, "warmup": 50,
                  "validate_every": 150, "checkpoint_every": 50, "dropout": 0.0, "learning_rate": 3e-3},
        "paper": {"channels": 384, "layers": 6, "heads": 6, "batch_size": 64, "steps": 5000}}
    text: str = option("tinyshakespeare.txt", "the file, plain or gzipped")
    length: int = option(256, "characters of a sample", minimum=2)
    batch_size: int = option(24, "samples in a batch", minimum=1)
    channels: int = option(192, "of the hidden layers", minimum=2)
    layers: int = option(5, "of the Transformer", minimum=1)
    heads: int = option(6, "of attention", minimum=1)
    dropout: float = option(0.15, "share of hidden units dropped", minimum=0, below=1)
    sample: int = option(300, "characters sampled in the end", minimum=0)
    steps: int = option(3000, "of the optimiser, at most", minimum=1)
    optimizer: str = option("adamw", "adam or adamw")
    learning_rate: float = option(2e-3, "at its peak", minimum=0)
    schedule: str = option("cosine", "of the learning rate: constant, inverse_root, cosine or plateau")
    warmup: int = option(100, "steps in which the learning rate rises", minimum=0)
    weight_decay: float = option(0.05, "of the optimiser", minimum=0)
    validate_every: int = option(250, "steps", minimum=1)
