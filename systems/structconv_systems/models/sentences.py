"""A batch of sentences as layers take it: side by side, without the padding, or padded and masked."""

from __future__ import annotations

from typing import NamedTuple, Self

from torch import Tensor
from torch.compiler import is_compiling

from structconv.structures import Padding, Samples, Support
from structconv_systems.models.tokens import PAD

__all__ = ["Sentences"]


class Sentences(NamedTuple):
    """Tokens (B, L) of B sentences, padded behind their ends.

    Side by side they are the entries of one `Samples`: no layer computes anything of the padding, and each mechanism
    gives a sentence what it gives it alone. Padded they are B rows with a mask, as they are without any sentence and
    under `torch.export` and `torch.compile`, where no size may depend on the tokens; a mechanism that knows no mask
    (`Shifts`) refuses them.

    Args:
        tokens: (T,) side by side, else (B, L).
        keep: which tokens exist, (B, L).
        rows: where the T tokens stand among the B L.
        samples: which of them are of one sentence.
    """

    tokens: Tensor
    keep: Tensor
    rows: Tensor | None = None
    samples: Samples | None = None

    @classmethod
    def of(cls, tokens: Tensor, *, packed: bool) -> Self:
        """Those of integers (B, L), side by side if `packed` and if they may be."""
        keep = tokens != PAD
        if not packed or is_compiling() or not len(tokens):
            return cls(tokens, keep)
        rows = keep.flatten().nonzero().squeeze(-1)
        return cls(tokens.flatten()[rows], keep, rows, Samples(keep.sum(-1)))

    def placed(self, table: Tensor | None) -> Tensor | None:
        """Of each token the row of its place in a table (at least L, C): (T, C), or (L, C) of the padded."""
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
        """The same where nothing sees what comes later: what stands behind the end is unseen as it is."""
        return self.samples

    def seen_from(self, others: Sentences) -> Support:
        """For attention of other sentences, one of each, to these."""
        if self.samples is None or others.samples is None:
            return Padding(self.keep)
        return self.samples.leading_to(others.samples)

    def padded(self, entries: Tensor) -> Tensor:
        """Entries (T, C), or (B, L, C), of the tokens -> (B, L, C), zeros for the padding."""
        if self.rows is None:
            return entries.masked_fill(~self.keep.unsqueeze(-1), 0)
        whole = entries.new_zeros(self.keep.numel(), entries.shape[-1])
        return whole.index_copy(0, self.rows, entries).unflatten(0, self.keep.shape)
