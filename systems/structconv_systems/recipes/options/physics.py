"""Options of the recipes on simulated physics."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from structconv.errors import ConfigError
from structconv_systems.recipes.options.base import Effect, Trained, option

__all__ = ["Interactions", "RelationalInference"]


_SYSTEMS = ("springs", "charged", "kuramoto")
#: The paper's networks, Gaussian of fixed variance, ten steps from a state.
_PAPER: dict[str, Any] = {"model": "paper", "symmetric": False, "horizon": 10, "windows": 1}


@dataclass(frozen=True, kw_only=True)
class RelationalInference(Trained, seeds=3, steps=8000, rates=("supervised=5e-3",), learning_rate=2e-3,
                          schedule="cosine", warmup=50, validate_every=250):
    """Kipf et al. (2018)."""

    name = "nri"
    # Table 1, from memory, unchecked.
    published = "springs 99.9, charged 82.1, Kuramoto 96.0; supervised 99.9, 95.0, 99.7"
    effect: ClassVar[Effect] = Effect(
        claim="edge accuracy of a more structured model over correlation, points", figure="test_accuracy",
        pairs=(("unsupervised", "correlation"),), published=99.9 - 52.4)
    further: ClassVar = (("system=charged",), ("system=kuramoto",))
    presets: ClassVar = {
        "quick": {"seeds": 1, "rates": (), "samples": 3000, "held_out": 500, "hidden": 48, "steps": 400,
                  "supervised_steps": 200, "validate_every": 100, "checkpoint_every": 100},
        "paper": {**_PAPER, "seeds": 1, "rates": (), "samples": 50_000, "held_out": 10_000, "hidden": 256,
                  "messages": 2, "windows": 5, "mirrored": False, "learning_rate": 5e-4, "schedule": "constant",
                  "batch_size": 128, "clip": 0.0, "steps": 195_000, "supervised_steps": 39_000, "validate_every": 500}}
    system: str = option("springs", f"simulated system: {', '.join(_SYSTEMS)}", choices=_SYSTEMS)
    model: str = option("structured", "structured: encoder of pairs over time, decoder of forces or phases; "
                        "paper: the paper's networks", choices=("structured", "paper"))
    encoder: str = option("mlp", "encoder of the paper's model: mlp or cnn", choices=("mlp", "cnn"))
    decoder: str = option("mlp", "decoder of the paper's model: mlp or rnn", choices=("mlp", "rnn"))
    symmetric: bool = option(True, "both directions of a pair have equal logits in the structured model")
    bodies: int = option(5, "bodies in a simulation", minimum=2)
    samples: int = option(20_000, "training simulations", minimum=1)
    held_out: int = option(2000, "validation simulations, and as many test simulations", minimum=1)
    times: int = option(49, "time steps that the encoder reads; test simulations are twice as long", minimum=5)
    horizon: int = option(1, "steps predicted from each true state in training", minimum=1)
    rollout: int = option(10, "steps predicted from each true state in validation and test", minimum=1)
    windows: int = option(16, "true states of a simulation from which a training step starts", minimum=1)
    mirrored: bool = option(True, "augment training simulations by random quarter turns and reflections")
    hidden: int = option(64, "channels of all layers; 256 in the paper", minimum=1)
    messages: int = option(1, "layers of a message in the paper's model; 2 in the paper", minimum=1)
    temperature: float = option(0.5, "temperature of the concrete distribution", minimum=1e-3)
    variance: float = option(5e-5, "variance of a predicted coordinate in the paper's model, for data within -1 .. 1",
                             minimum=1e-12)
    dropout: float = option(0.0, "share of hidden units dropped in the paper's encoder", minimum=0, below=1)
    batch_size: int = option(32, "simulations in a batch", minimum=1)
    supervised_steps: int = option(3000, "steps of the encoder that is trained on the true graphs", minimum=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("horizon", "rollout"):
            if getattr(self, name) >= self.times:
                raise ConfigError(self.name, f"{name} must be less than times", f"{getattr(self, name)} and "
                                  f"{self.times}")
        if self.model != "paper" and (self.encoder, self.decoder) != ("mlp", "mlp"):
            raise ConfigError(self.name, "encoder and decoder are options of model=paper", f"model={self.model}")

    @property
    def heavy_tails(self) -> bool:
        """True if errors follow Student's t distribution: for charges, whose velocity changes mostly in a few steps."""
        return self.model == "structured" and self.system == "charged"

    def as_paper(self) -> Self:
        """The paper's networks with the same data, batches, steps and seeds."""
        return dataclasses.replace(self, **{**_PAPER, "horizon": min(_PAPER["horizon"], self.times - 1)})

    @property
    def expected(self) -> Effect:
        """The published effect of the system."""
        published = {"springs": 99.9 - 52.4, "charged": 82.1 - 55.8, "kuramoto": 96.0 - 62.8}[self.system]
        return dataclasses.replace(self.effect, published=published)


_BODIES = ("gravity", "balls", "string")


@dataclass(frozen=True, kw_only=True)
class Interactions(Trained, seeds=3, steps=12_000, learning_rate=2e-3, schedule="cosine", warmup=50,
                   validate_every=1000, checkpoint_every=500):
    """Battaglia et al. (2016)."""

    name = "interactions"
    published = "mean squared error of velocities, of constant ones and of the network: gravity 82 and 0.25, balls " \
                "0.074 and 0.0020, string 0.018 and 0.0011"
    effect: ClassVar = Effect(
        claim="squared error, the best of constant velocity and an MLP of each body over the network, the least of "
              "gravity and balls", figure="test_loss", higher=False, ratio=True, published=0.074 / 0.0020,
        pairs=tuple((name, baseline) for name in ("gravity", "balls")
                    for baseline in (f"{name}:test_constant", f"{name}-independent")))
    presets: ClassVar = {
        "quick": {"seeds": 1, "systems": ("gravity", "balls"), "samples": 96, "held_out": 32, "times": 300,
                  "rollouts": 3, "hidden": 64, "effects": 32, "steps": 1300, "validate_every": 650,
                  "checkpoint_every": 650},
        "paper": {"seeds": 1, "samples": 2000, "held_out": 200, "times": 1000, "collision_weight": 1, "hidden": 150,
                  "effects": 50, "layers": 4, "batch_size": 100, "learning_rate": 1e-3, "steps": 1_000_000,
                  "validate_every": 10_000, "checkpoint_every": 5000}}
    systems: tuple[str, ...] = option(_BODIES, f"simulated systems, each with its own network: {', '.join(_BODIES)}",
                                      choices=_BODIES)
    samples: int = option(500, "training simulations", minimum=1)
    held_out: int = option(32, "validation simulations, and as many test simulations", minimum=1)
    times: int = option(1000, "time steps of a simulation", minimum=2)
    test: int = option(0, "bodies in a test simulation; 0: as many as in training", minimum=0)
    rollouts: int = option(16, "test simulations that are rolled out", minimum=1)
    horizon: int = option(1000, "steps of a rollout", minimum=1)
    softening: float = option(5.0, "softening length of gravity, in m: bodies that are closer attract less", minimum=0)
    collision_weight: int = option(8, "how many times as often training draws steps near a collision", minimum=1)
    penalty: float = option(0.03, "weight of the mean squared effect in the loss", minimum=0)
    hidden: int = option(96, "width of the layers; 150 in the paper", minimum=1)
    effects: int = option(48, "channels of an effect; 50 in the paper", minimum=1)
    layers: int = option(2, "hidden layers of the network of effects; 4 in the paper", minimum=1)
    batch_size: int = option(64, "steps of simulations in a batch", minimum=1)

    @staticmethod
    def from_here(name: str) -> str:
        """Return the number of bodies that `evaluate --test` names."""
        return name
