"""What mechanisms are told: channel counts when they are bound, and their inputs in each call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.primitives.segments import segment_sum
from structconv.structures.places import Places
from structconv.structures.samples import Samples

__all__ = ["Channels", "Inputs"]


@dataclass(frozen=True)
class Channels:
    """Channel counts that a layer gives to its mechanism: P of x, P' of z, Q of y."""

    inputs: int
    others: int
    outputs: int


class Inputs(NamedTuple):
    """What a mechanism is told of its call: x (..., M, P), z (..., N, P'), its structure, and x and z after Theta.

    `projected` holds x Theta_k (..., K, M, Q) and z Theta_k (..., K, N, Q) where some mechanism asks for them,
    `sibling` the other operand of a sum or a product for one that reads it, `kept` (..., M) which inputs some output
    sees, where a mask leaves any out, `places` where the outputs stand among the inputs, where output n does not stand
    at input n, and `prepared` what was made of x before. A mechanism that reads no entries may get images (..., P, *S)
    for x and z.
    """

    x: Tensor
    z: Tensor
    structure: Any = None
    projected: tuple[Tensor, Tensor] | None = None
    sibling: Any = None
    kept: Tensor | None = None
    places: Places | None = None
    prepared: Any = None

    @property
    def samples(self) -> Samples | None:
        """Which entries are of one sample, where the structure is a batch."""
        return getattr(self.structure, "samples", None)

    @property
    def dtype(self) -> torch.dtype:
        """That of x."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """That of x."""
        return self.x.device

    @property
    def num_inputs(self) -> int:
        """M."""
        return self.x.shape[-2]

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.z.shape[-2]

    def of_x(self, function: Callable[[Tensor, int], Any], unread: bool = False) -> Any:
        """function(x, 0), one of a mechanism's `sources`; of a prepared x it is made already.

        With `unread` it may be that of the last entries it is still to be made: for what is a leaf as it is.
        """
        return function(self.x, 0) if self.prepared is None else self.prepared.of(function, unread)

    @property
    def start(self) -> int:
        """The place of the first input: 0 unless x is prepared and what came before is gone."""
        return 0 if self.prepared is None else self.prepared.dropped

    def output_positions(self) -> Tensor:
        """The place of each output among the inputs that are there, (..., N) integers."""
        if self.places is None:
            return torch.arange(self.num_outputs, device=self.device)
        return self.places.of_outputs(self.num_outputs, self.device)

    def existing(self) -> int | Tensor:
        """How many inputs there are, M, or without those that are masked out (..., 1); of a batch of samples, those of
        the sample of each output, (..., N)."""
        samples, kept = self.samples, self.kept
        if samples is None:
            return self.num_inputs if kept is None else kept.sum(-1, keepdim=True)
        of_inputs, of_outputs = samples.members(self.device)
        kept = torch.ones_like(of_inputs, dtype=torch.bool) if kept is None else kept
        return segment_sum(kept.to(self.dtype), of_inputs, samples.num_samples)[..., of_outputs]
