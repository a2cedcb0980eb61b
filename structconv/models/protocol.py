"""What each model offers that writes token by token: its `begin` gives a `Decoding`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["Decoding"]


class Decoding(Protocol):
    """One batch as it is decoded: what a model prepared for its sources, and what came so far."""

    def step(self, tokens: Tensor) -> Tensor:
        """The newest tokens (B,) -> the logits (B, V) of the next ones."""

    def reorder(self, samples: Tensor) -> None:
        """Sample b goes on as sample samples[b], integers (B',); B' may be another number than B."""
