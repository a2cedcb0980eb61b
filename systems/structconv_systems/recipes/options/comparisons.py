"""Options of the recipes that compare layers on sequences generated from a seed."""

from dataclasses import dataclass
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.recipes.options.base import Effect, Trained, option

__all__ = ["Architectures", "Generated", "Pooling"]


@dataclass(frozen=True, kw_only=True)
class Generated(Trained, schedule="cosine", warmup=50):
    """Options of the recipes with generated data, the same for all trainings."""

    samples: int = option(8000, "training sequences", minimum=1)
    held_out: int = option(2000, "validation sequences, and as many test sequences", minimum=1)
    batch_size: int = option(32, "sequences in a batch", minimum=1)


@dataclass(frozen=True, kw_only=True)
class Architectures(Generated, steps=500, seeds=3, learning_rate=3e-3):
    """Zhang et al., Dive into Deep Learning, section 10.6; Vaswani et al. (2017), table 1."""

    name = "architectures"
    published = "path O(1) of attention, O(n/k) of convolution"
    effect: ClassVar = Effect(
        claim="accuracy of attention over the best other layer where marks are far, points", figure="test_accuracy",
        pairs=tuple(("attention-far", f"{other}-far") for other in ("convolution", "dilated", "recurrence")))
    presets: ClassVar = {
        "quick": {"length": 64, "channels": 32, "steps": 300, "validate_every": 150, "checkpoint_every": 100,
                  "seeds": 1, "longest": 1024, "rounds": 5}}
    length: int = option(96, "entries of a training sequence", minimum=8)
    near: int = option(8, "both marks are among this many last entries, in the task of neighbors", minimum=2)
    kernel: int = option(5, "kernel size k of the convolution: an entry and the k - 1 before it", minimum=2)
    layers: int = option(2, "layers of each model", minimum=1)
    channels: int = option(64, "channels d of the trained and of the timed layers", minimum=1)
    heads: int = option(2, "attention heads", minimum=1)
    longest: int = option(4096, "entries of the longest timed sequence; the others are 1/2, 1/4, ... of it, down to 64",
                          minimum=128)
    rounds: int = option(9, "rounds of timing; each times every layer once", minimum=3)

    def __post_init__(self) -> None:
        super().__post_init__()
        reach = self.layers * (self.kernel - 1)
        if not self.near <= reach + 1 <= self.length // 2:
            raise ConfigError(self.name, f"layers (kernel - 1) + 1 = {reach + 1} entries, which convolutions see, must "
                              "be at least near and at most length // 2", f"near={self.near}, length={self.length}")
        if self.channels % self.heads:
            raise ConfigError(self.name, "heads must divide channels", f"{self.heads} and {self.channels}")


#: The poolings and questions that are predicted to fit, and not to fit.
_WINS = ("spatial-place", "context-content", "self-attention-content", "self-attention-relation")
_FAILS = ("spatial-content", "spatial-relation", "context-place", "context-relation", "self-attention-place")


@dataclass(frozen=True, kw_only=True)
class Pooling(Generated, batch_size=64, steps=2000, seeds=5, learning_rate=5e-3):
    """Fleuret, EE-559, lecture 13.1."""

    name = "pooling"
    published = "each wins where it is predicted to"
    effect: ClassVar = Effect(claim="worst pooling that should win over best that should fail, points",
                              figure="test_accuracy", pairs=tuple((win, fail) for win in _WINS for fail in _FAILS))
    presets: ClassVar = {"quick": {"steps": 1000, "validate_every": 250, "checkpoint_every": 250, "seeds": 1}}
    length: int = option(16, "entries of a sequence", minimum=4)
    classes: int = option(8, "classes of entries", minimum=2)
    dim: int = option(32, "channels of queries and keys in self-attention", minimum=1)
    channels: int = option(64, "channels before pooling", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.held_out < self.length:
            raise ConfigError(self.name, f"held_out must be at least length={self.length}, since that many are drawn",
                              self.held_out)
