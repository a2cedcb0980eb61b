"""Options of the recipes on simulated physics."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.train.config import option
from structconv_systems.train.effect import Effect
from structconv_systems.train.options import Trained

__all__ = ["RelationalInference"]

_SYSTEMS = ("springs", "charged", "kuramoto")


@dataclass(frozen=True, kw_only=True)
class RelationalInference(Trained):
    """Kipf et al. (2018)."""

    name = "nri"
    published = "springs 99.9, charged 82.1, Kuramoto 96.0; supervised 99.9, 95.0, 99.7"
    effect: ClassVar[Effect] = Effect(
        claim="edge accuracy over correlation, points", figure="test_accuracy",
        pairs=(("unsupervised", "correlation"),), published=99.9 - 52.4)
    presets: ClassVar = {
        "quick": {"seeds": 1, "samples": 3000, "held_out": 500, "hidden": 96, "windows": 2, "steps": 400,
                  "supervised_steps": 200, "validate_every": 100, "checkpoint_every": 100, "learning_rate": 2e-3},
        "paper": {"seeds": 1, "samples": 50_000, "held_out": 10_000, "hidden": 256, "messages": 2, "windows": 5,
                  "mirrored": False, "learning_rate": 5e-4, "schedule": "constant", "steps": 195_000,
                  "supervised_steps": 39_000}}
    system: str = option("springs", f"what is simulated: {', '.join(_SYSTEMS)}", choices=_SYSTEMS)
    bodies: int = option(5, "in a simulation", minimum=2)
    samples: int = option(20_000, "simulations to train on", minimum=1)
    held_out: int = option(2000, "simulations to validate with, and as many to test", minimum=1)
    times: int = option(49, "that the encoder sees; the simulations that test are twice as long", minimum=2)
    horizon: int = option(10, "steps that the decoder is asked for from each true state", minimum=1)
    windows: int = option(2, "of so many steps that are predicted of a simulation in a training step; 5 in the paper",
                          minimum=1)
    mirrored: bool = option(True, "training simulations come turned by quarters and mirrored, as the box allows")
    hidden: int = option(128, "channels of all layers; 256 in the paper", minimum=1)
    messages: int = option(1, "layers of a message; 2 in the paper", minimum=1)
    temperature: float = option(0.5, "of the concrete distribution", minimum=1e-3)
    variance: float = option(5e-5, "of a predicted coordinate, those of the data being within 1", minimum=1e-12)
    dropout: float = option(0.0, "share of the encoder's hidden units dropped", minimum=0, below=1)
    batch_size: int = option(128, "simulations in a batch", minimum=1)
    supervised_steps: int = option(2000, "of the encoder that is told the graphs", minimum=1)
    threads: int = 1
    seeds: int = 3
    steps: int = 10_000
    learning_rate: float = 2e-3
    schedule: str = "cosine"
    warmup: int = 50
    clip: float = 0.0
    validate_every: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.horizon >= self.times:
            raise ConfigError(self.name, "horizon must be less than times", f"{self.horizon} and {self.times}")

    @property
    def expected(self) -> Effect:
        """That of the system."""
        published = {"springs": 99.9 - 52.4, "charged": 82.1 - 55.8, "kuramoto": 96.0 - 62.8}[self.system]
        return dataclasses.replace(self.effect, published=published)
