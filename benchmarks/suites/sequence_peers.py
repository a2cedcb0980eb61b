"""Shared parts of the suites of sequence models: sentences, copied embeddings, and the loss as what is timed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import Entrant

__all__ = ["by_loss", "embedding", "step", "tokens_of"]


def tokens_of(batch: int, length: int, shortest: int, vocabulary: int, seed: int) -> Tensor:
    """Sentences of `shortest` to `length` tokens, padded."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, vocabulary, (batch, length), generator=generator)
    sizes = torch.randint(shortest, length + 1, (batch, 1), generator=generator)
    sizes[0] = length
    return tokens.masked_fill(torch.arange(length) >= sizes, 0)


def embedding(own: nn.Embedding) -> nn.Embedding:
    """One with the same numbers."""
    return nn.Embedding.from_pretrained(own.weight.detach().clone(), freeze=False, padding_idx=own.padding_idx)


def step(name: str, model: nn.Module, held: nn.Embedding, *given: Tensor,
         entropy: Callable[..., Tensor] = F.cross_entropy) -> Entrant:
    """The loss of a model, whose gradient to `held` is compared; the last that is given is what it is to tell."""
    *others, expected = given

    def loss() -> Tensor:
        return entropy(model(*others).flatten(0, 1), expected.flatten(), ignore_index=0)

    return by_loss(name, model, held, loss)


def by_loss(name: str, model: nn.Module, held: nn.Embedding, loss: Callable[[], Tensor]) -> Entrant:
    """The timed work of a model with a loss of its own."""
    rest = tuple(own for own in model.eval().parameters() if own is not held.weight)
    return Entrant(name=name, run=loss, inputs=(held.weight,), parameters=rest)
