"""What each model offers that writes token by token: its `begin` gives a `Decoding`."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from structconv.errors import ConfigError

__all__ = ["Decoding", "next_logits"]


class Decoding(Protocol):
    """One batch as it is decoded: what a model prepared for its sources, and what came so far.

    No base class: any object with the two methods will do. It has a state, and is used up by one search. A step should
    give the logits that the full pass has at that place.
    """

    def step(self, tokens: Tensor) -> Tensor:
        """The newest tokens (B,), int64 -> the logits (B, V), of any floating dtype, of the next ones.

        Called once for each place, from the first token on, those of a prompt included, without gradients. A logit of
        -inf is of a token that must not come.
        """

    def reorder(self, samples: Tensor) -> None:
        """Sample b goes on as sample samples[b], integers (B',); B' may be another number than B.

        All that depends on the sample moves: states, caches, what is kept of its source. The next `step` is of B'
        tokens. A sample may be left out, and may come several times.
        """


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
