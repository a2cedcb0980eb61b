"""The protocol of models that write token by token: their `begin` returns a `Decoding`."""

from typing import Protocol

from torch import Tensor

from structconv.errors import ConfigError

__all__ = ["Decoding", "next_logits"]


class Decoding(Protocol):
    """The decoding of one batch: the prepared sources and the tokens so far.

    There is no base class: any object with the two methods works. It has a state, and serves one search. A step must
    return the logits that the full pass has at that position.

    Example:

        >>> from structconv_systems.models.decoding import greedy
        >>> class Counting:                                # any object with these methods
        ...     def __init__(self, last):
        ...         self.last = last
        ...     def step(self, tokens):                    # the next number is the likeliest, up to the last
        ...         return torch.eye(10)[(tokens + 1).where(tokens + 1 < self.last, 0)]
        ...     def reorder(self, samples):
        ...         self.last = self.last[samples]
        >>> greedy(Counting(torch.tensor([4, 6])), 2, begin=1, end=0, most=8)
        [[2, 3], [2, 3, 4, 5]]
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
    """Return the logits of a step, checked so that tokens can be chosen.

    Raises:
        ConfigError: the largest logit of a sample is NaN.
    """
    logits = decoding.step(tokens)
    if not logits.amax(-1).isfinite().all():
        raise ConfigError("decoding", "the largest logit of each sample must be a finite number", "another",
                          "The model's weights, or its inputs, hold NaN or infinity.")
    return logits
