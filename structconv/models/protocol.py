"""What each model offers that writes token by token: its `begin` gives a `Decoding`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from structconv.errors import ConfigError

__all__ = ["Decoding", "next_logits"]


class Decoding(Protocol):
    """One batch as it is decoded: what a model prepared for its sources, and what came so far."""

    def step(self, tokens: Tensor) -> Tensor:
        """The newest tokens (B,) -> the logits (B, V) of the next ones."""

    def reorder(self, samples: Tensor) -> None:
        """Sample b goes on as sample samples[b], integers (B',); B' may be another number than B."""


def next_logits(decoding: Decoding, tokens: Tensor) -> Tensor:
    """Those of a step, of which tokens can be chosen.

    Raises:
        ConfigError: the largest of a sample is no number.
    """
    logits = decoding.step(tokens)
    if not logits.amax(-1).isfinite().all():
        raise ConfigError("decoding", "the largest logit of each sample must be a finite number", "another",
                          "The model's weights, or its inputs, hold NaN or infinity.")
    return logits
