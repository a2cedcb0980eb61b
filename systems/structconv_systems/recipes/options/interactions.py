"""Options of the recipe of interaction networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from structconv_systems.train.config import option
from structconv_systems.train.effect import Effect
from structconv_systems.train.options import Trained

__all__ = ["Interactions"]

_SYSTEMS = ("gravity", "balls", "string")


@dataclass(frozen=True, kw_only=True)
class Interactions(Trained):
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
    systems: tuple[str, ...] = option(_SYSTEMS, f"simulated systems, each with its own network: {', '.join(_SYSTEMS)}",
                                      choices=_SYSTEMS)
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
    seeds: int = 3
    steps: int = 12_000
    learning_rate: float = 2e-3
    schedule: str = "cosine"
    warmup: int = 50
    validate_every: int = 1000
    checkpoint_every: int = 500

    @staticmethod
    def from_here(name: str) -> str:
        """What `evaluate --test` is given: a number of bodies."""
        return name
