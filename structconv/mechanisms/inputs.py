"""`Channels` and `Inputs`: the arguments of `Mechanism.bind` and of `Mechanism.forward`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.primitives.segments import segment_sum
from structconv.structures.output_positions import OutputPositions
from structconv.structures.samples import Samples

__all__ = ["Channels", "Inputs"]


@dataclass(frozen=True)
class Channels:
    """The channel counts of a layer, for `Mechanism.bind`: P of x, P' of z, Q of y.

    Example:

        >>> from structconv import Conv, Mechanism
        >>> class Scaling(Mechanism):
        ...     def bind(self, channels):
        ...         self.scale = torch.nn.Parameter(torch.ones(channels.inputs))
        ...     def forward(self, inputs):
        ...         return torch.diag((inputs.x * self.scale).mean(-1))[None]
        >>> Conv(Scaling(), 8, 4)(torch.randn(5, 8)).shape
        torch.Size([5, 4])
    """

    inputs: int
    others: int
    outputs: int


class Inputs(NamedTuple):
    """The arguments of one call of a mechanism. Most mechanisms read x, z, the structure and the sizes only.

    Args:
        x: (..., M, P). z: (..., N, P'), x itself if the call has no z. For a mechanism that reads no entries
            (`Given`, grids and graphs) both may be images (..., P, *S).
        structure: the structure of the call, or `None`.
        projected: x Theta_k (..., K, M, Q) and z Theta_k (..., K, N, Q), if a mechanism reads them.
        sibling: the other operand of a sum or a product, for a mechanism that reads it.
        visible: (..., M) booleans, the inputs that some output reads; `None` if masks hide none.
        output_positions: the positions of the outputs among the inputs; `None` if output n is at input n.
        cache: results computed from x in an earlier call.

    Example:

        >>> from structconv import Conv, Mechanism
        >>> class Ones(Mechanism):
        ...     def forward(self, inputs):
        ...         return torch.ones(1, inputs.num_inputs, inputs.num_outputs, dtype=inputs.dtype)
        >>> Conv(Ones(), 8, 4)(torch.randn(5, 8)).shape
        torch.Size([5, 4])
    """

    x: Tensor
    z: Tensor
    structure: Any = None
    projected: tuple[Tensor, Tensor] | None = None
    sibling: Any = None
    visible: Tensor | None = None
    output_positions: OutputPositions | None = None
    cache: Any = None

    @property
    def samples(self) -> Samples | None:
        """The samples of the batch, if the structure is one."""
        return getattr(self.structure, "samples", None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """The device of x."""
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
        """Compute function(x, 0), one of a mechanism's `sources`; for a prepared x, return the stored result.

        With `unread` the result of the last entries may not be computed yet. Use it only if the result goes into the
        basis unchanged.
        """
        return function(self.x, 0) if self.cache is None else self.cache.of(function, unread)

    @property
    def start(self) -> int:
        """The place of the first input: 0 unless x is prepared and what came before is gone."""
        return 0 if self.cache is None else self.cache.dropped

    def positions_of_outputs(self) -> Tensor:
        """Return the position of each output among the existing inputs, (..., N) integers."""
        if self.output_positions is None:
            return torch.arange(self.num_outputs, device=self.device)
        return self.output_positions.of_outputs(self.num_outputs, self.device)

    def existing(self) -> int | Tensor:
        """Return the number of existing inputs: M, or (..., 1) without masked ones; for a batch, the number in each
        output's sample, (..., N)."""
        samples, visible = self.samples, self.visible
        if samples is None:
            return self.num_inputs if visible is None else visible.sum(-1, keepdim=True)
        of_inputs, of_outputs = samples.members(self.device)
        visible = torch.ones_like(of_inputs, dtype=torch.bool) if visible is None else visible
        return segment_sum(visible.to(self.dtype), of_inputs, samples.num_samples)[..., of_outputs]
