"""Options of the recipe on tours through points."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.recipes.options.base import Effect, Trained, option

__all__ = ["TSP"]

_BASELINES = ("shared", "rollout", "exponential")


@dataclass(frozen=True, kw_only=True)
class TSP(Trained, seeds=3, steps=5000, learning_rate=1e-3, schedule="cosine", warmup=100, validate_every=200,
          checkpoint_every=100):
    """Kool, van Hoof and Welling (2019)."""

    name = "tsp"
    # Table 1, from memory, unchecked.
    learning = "length"
    published = "0.34 % greedy, 0.08 % best of 1280 samples, farthest insertion 2.36 % (TSP20)"
    effect: ClassVar = Effect(claim="gap of farthest insertion over the network's, points", figure="test_gap",
                              higher=False, pairs=(("attention", "farthest-insertion"),), published=2.36 - 0.34)
    presets: ClassVar = {
        "quick": {"seeds": 1, "channels": 64, "layers": 2, "heads": 4, "hidden": 256, "batch_size": 320, "steps": 400,
                  "warmup": 20, "validate_every": 100, "checkpoint_every": 100, "instances": 200, "samples": 16},
        "paper": {"seeds": 1, "channels": 128, "layers": 3, "heads": 8, "hidden": 512, "baseline": "rollout",
                  "batch_size": 512, "steps": 250_000, "learning_rate": 1e-4, "schedule": "constant", "warmup": 0,
                  "challenge_every": 2500, "challengers": 10_000, "validate_every": 2500, "checkpoint_every": 500,
                  "instances": 10_000, "samples": 1280}}
    nodes: int = option(20, "points of a training instance, and of a generated validation or test instance", minimum=2)
    test: str = option("", "TSPLIB file for testing; its optimum is read from NAME.opt.tour if present; empty: "
                       "generated instances")
    instances: int = option(1000, "validation instances, and as many test instances", minimum=1)
    samples: int = option(64, "sampled tours of an instance; the best one counts in the column of samples", minimum=1)
    channels: int = option(128, "channels of the nodes", minimum=1)
    layers: int = option(2, "blocks of the encoder", minimum=1)
    heads: int = option(8, "attention heads of the encoder and of the glimpse; divides channels", minimum=1)
    hidden: int = option(256, "hidden channels of the feed-forward parts", minimum=1)
    logits: float = option(10.0, "greatest logit C", minimum=0.1)
    batch_size: int = option(640, "tours in a batch", minimum=2)
    baseline: str = option("shared", f"baseline of REINFORCE: {', '.join(_BASELINES)}", choices=_BASELINES)
    copies: int = option(20, "tours of an instance, for baseline=shared; divides batch_size", minimum=2)
    decay: float = option(0.8, "decay of the exponential baseline, and of rollout before its first challenge",
                          minimum=0, below=1)
    challenge_every: int = option(200, "steps between challenges of the rollout baseline's model", minimum=1)
    challengers: int = option(1000, "instances in a challenge", minimum=2)
    alpha: float = option(0.05, "significance level of the paired t-test that decides a challenge", minimum=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, whole in (("heads", "channels"), ("copies", "batch_size")):
            if getattr(self, whole) % getattr(self, name) and (name == "heads" or self.baseline == "shared"):
                raise ConfigError(self.name, f"{name} must divide {whole}={getattr(self, whole)}", getattr(self, name))

    def from_here(self, name: str) -> str:
        """Return the absolute path of a file."""
        return str(Path(name).absolute())

    def files(self, *keys: str) -> list[Path]:
        named = [Path(self.test), Path(self.test).with_suffix(".opt.tour")] if self.test else []
        return [path for path in named if path.is_file()]
