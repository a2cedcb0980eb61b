"""A batch of sentences for layers: concatenated without padding, or padded and masked."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor
from torch.compiler import is_compiling

from structconv.structures import Padding, Samples, Support
from structconv_systems.models.tokens import PAD

__all__ = ["Sentences"]


class Sentences(NamedTuple):
    """Tokens (B, L) of B sentences, padded at their ends.

    Concatenated they are the entries of one `Samples`: layers compute nothing for padding, and each sentence gets the
    result that it gets alone. Padded they are B rows with a mask, also for an empty batch and under `torch.export` and
    `torch.compile`, where sizes must not depend on tokens; a mechanism without masks (`Shifts`) raises an error.

    Args:
        tokens: (T,) if concatenated, else (B, L).
        keep: booleans (B, L), True for tokens that exist.
        rows: positions of the T tokens among the B L.
        samples: the sentences as samples.

    Example:

        >>> from structconv_systems.models.sentences import Sentences
        >>> sentences = Sentences.of(torch.tensor([[5, 6, 2], [7, 2, 0]]), packed=True)
        >>> sentences.tokens.tolist(), sentences.samples.num_samples
        ([5, 6, 2, 7, 2], 2)
    """

    tokens: Tensor
    keep: Tensor
    rows: Tensor | None = None
    samples: Samples | None = None

    @classmethod
    def of(cls, tokens: Tensor, *, packed: bool) -> Self:
        """Build sentences from integers (B, L), concatenated if `packed` and if possible."""
        keep = tokens != PAD
        if not packed or is_compiling() or not len(tokens):
            return cls(tokens, keep)
        rows = keep.flatten().nonzero().squeeze(-1)
        return cls(tokens.flatten()[rows], keep, rows, Samples(keep.sum(-1)))

    def placed(self, table: Tensor | None) -> Tensor | None:
        """Return for each token the row of its position in a table (at least L, C): (T, C), or (L, C) if padded."""
        if table is None:
            return None
        if self.samples is None:
            return table[:self.keep.shape[-1]]
        return table[self.samples.positions(self.tokens.device)[0]]

    @property
    def structure(self) -> Support:
        """For attention within each sentence."""
        return Padding(self.keep) if self.samples is None else self.samples

    @property
    def causal(self) -> Support | None:
        """Return the mask for causal attention, which needs no padding mask."""
        return self.samples

    def mask_for(self, others: Sentences) -> Support:
        """Return the mask for attention from other sentences to these, pair by pair."""
        if self.samples is None or others.samples is None:
            return Padding(self.keep)
        return self.samples.leading_to(others.samples)

    def padded(self, entries: Tensor) -> Tensor:
        """Entries (T, C), or (B, L, C), of the tokens -> (B, L, C), zeros for the padding."""
        if self.rows is None:
            return entries.masked_fill(~self.keep.unsqueeze(-1), 0)
        whole = entries.new_zeros(self.keep.numel(), entries.shape[-1])
        return whole.index_copy(0, self.rows, entries).unflatten(0, self.keep.shape)
