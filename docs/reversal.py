"""A basis of one's own, the example of `your-own-kernel.md`."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv import Basis
from structconv.bases import value


@value
class Reversal(Basis):
    """A_k reverses the order within consecutive blocks of widths[k] entries."""

    n: int
    widths: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.widths)

    @property
    def num_inputs(self) -> int:
        return self.n

    @property
    def num_outputs(self) -> int:
        return self.n

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        n = torch.arange(self.n)
        reads = torch.stack([n // w * w + (w - 1 - n % w) for w in self.widths]).unsqueeze(1)
        return (n.unsqueeze(1) == reads).to(dtype or torch.get_default_dtype())
