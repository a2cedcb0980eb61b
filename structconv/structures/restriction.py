"""`Restriction`: select the entries of some samples from tensors that cover a whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.structures.masks import Support, joined_by_and
from structconv.structures.samples import Samples, same_samples

__all__ = ["Pieces", "Restriction"]


#: Tensors of a batch cut at the borders of its samples, each once: its gradient is put together once too. A tensor is
#: held so that its id, which with the axis and the side finds the pieces, is not reused.
Pieces = dict[tuple[int, int, bool], tuple[Tensor, tuple[Tensor, ...]]]


class Restriction:
    """The entries of one sample, or of several of equal sizes along a new leading dimension before `lead` others.
    `pieces` are those of the batch's tensors that were cut so far."""

    def __init__(self, samples: Samples, numbers: tuple[int, ...], lead: int, pieces: Pieces) -> None:
        self.samples, self.numbers, self._pieces = samples, numbers, pieces
        self.lead = lead if len(numbers) > 1 else None
        self.sizes = samples.sizes()
        self.inputs, self.outputs = (side[numbers[0]] for side in self.sizes)
        self._turned = False

    @property
    def number(self) -> int | None:
        """The number of the sample; `None` for several."""
        return self.numbers[0] if self.lead is None else None

    @property
    def aligned(self) -> bool:
        """True if the first input and output of each sample have equal numbers, so that m - n is unchanged."""
        return self.samples.square

    def turned(self) -> Restriction:
        """Return the restriction with inputs and outputs exchanged."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, inputs=self.outputs, outputs=self.inputs, _turned=not self._turned)
        return other

    def of_inputs(self, t: Any, axis: int, own: int) -> Any:
        """The rows of these samples of t, whose `own` last axes are no leading dimensions and `axis` its inputs."""
        return self._select(t, axis, own, self._turned)

    def of_outputs(self, t: Any, axis: int, own: int) -> Any:
        """Cut t along `axis`, the axis of outputs."""
        return self._select(t, axis, own, not self._turned)

    def from_first_input(self, t: Any) -> Any:
        """Numbers of inputs, (..., n) as these samples have them, as places in their own samples."""
        return t - self.first()[0].to(device=t.device, dtype=t.dtype).unsqueeze(-1)

    def first(self) -> tuple[Any, Any]:
        """The number of the first input, and of the first output: (), or of several (G, 1, ..., 1), to lead."""
        at: Any = self.numbers[0] if self.lead is None else torch.tensor(self.numbers).view(-1, *(1,) * self.lead)
        starts = self.samples.input_starts[at], self.samples.output_starts[at]
        return starts[::-1] if self._turned else starts

    @property
    def total_outputs(self) -> int:
        """The outputs of all samples."""
        return self.samples.num_inputs if self._turned else self.samples.num_outputs

    def same(self, samples: Any) -> bool:
        """Return True if `samples` are the samples of the batch."""
        return same_samples(samples.turned() if self._turned else samples, self.samples)

    def within(self, support: Support | None) -> bool:
        """Return True if no pair of the support joins two samples."""
        return any(isinstance(term, Samples) for term in joined_by_and(support))

    def _select(self, t: Tensor, axis: int, own: int, side: bool) -> Tensor:
        sizes, count = self.sizes[side], len(self.numbers)
        if self.lead is not None and count == len(sizes):
            stacked = t.unflatten(axis, (count, sizes[0])).movedim(axis - 1, 0)
        else:
            key = id(t), axis, side
            if key not in self._pieces:
                self._pieces[key] = t, t.split(sizes, axis)
            pieces = self._pieces[key][1]
            if self.lead is None:
                return pieces[self.numbers[0]]
            stacked = torch.stack([pieces[number] for number in self.numbers])
        return stacked[(slice(None), *(None,) * (self.lead - (t.dim() - own)))]
