"""`Existing`: the pairs that exist, split into the kinds that dense kernels support: order, padding, others."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.tree import getter, materializer
from structconv.derived import derived
from structconv.shapes import broadcast
from structconv.structures.masks import joined_by_and
from structconv.structures.supports import Causal, DenseMask, Padding, Support

__all__ = ["Existing", "all_of"]

#: Booleans of a mask above which blocks are preferred to one table, and up to which a table is remembered.
MASK_ELEMENTS, REMEMBERED = 1 << 27, 1 << 22


class Existing(NamedTuple):
    """The parts of a support's spec: only pairs m <= n (`causal`), and what finds the booleans (..., M) of each
    padding, and the supports of other kinds."""

    causal: bool
    paddings: tuple[Callable[[Any], Tensor], ...]
    others: tuple[Callable[[Any], Support], ...]

    @classmethod
    def of(cls, support: Support | None, num_inputs: int, num_outputs: int) -> Existing | None:
        """The parts of a support; `None` where a table of its pairs would be too large."""
        parts = joined_by_and(support)
        others = [part for part in parts if not isinstance(part, Causal | Padding)]
        entries = math.prod(broadcast(*(part.batch_shape for part in others))) if others else 0
        if not torch.compiler.is_compiling() and entries * num_inputs * num_outputs > MASK_ELEMENTS:
            return None
        return cls(any(isinstance(part, Causal) for part in parts),
                   tuple(getter(part.keep) for part in parts if isinstance(part, Padding)),
                   tuple(materializer(part) for part in others))

    @property
    def masked(self) -> bool:
        """True if pairs are absent for a reason other than their order."""
        return bool(self.paddings or self.others)

    def padding(self, basis: Any) -> Tensor | None:
        """The inputs that exist by all paddings, (..., M)."""
        return all_of([find(basis) for find in self.paddings])

    def table(self, basis: Any, lead: tuple[int, ...], num_inputs: int, num_outputs: int,
              device: torch.device) -> Tensor | None:
        """Booleans (B or 1, 1, M, N) of all but the order, B = prod(lead); padding alone has stride 0 along N."""
        keep = all_of([_table(find(basis), num_inputs, num_outputs, device) for find in self.others])
        padding = self.padding(basis)
        if padding is None:
            return None if keep is None else _flat(keep, lead)
        rows = _flat(padding.unsqueeze(-1), lead)
        return rows.expand(*rows.shape[:-1], num_outputs) if keep is None else _flat(keep, lead) & rows


def all_of(masks: list[Tensor]) -> Tensor | None:
    """True where all masks are; `None` without any."""
    return functools.reduce(operator.and_, masks) if masks else None


def _table(support: Support, num_inputs: int, num_outputs: int, device: torch.device) -> Tensor:
    if isinstance(support, DenseMask):
        return support.keep

    def build() -> Tensor:
        m, n = (torch.arange(size, device=device) for size in (num_inputs, num_outputs))
        return support.contains(m.unsqueeze(-1), n.unsqueeze(0))

    if torch.compiler.is_compiling() or math.prod(support.batch_shape) * num_inputs * num_outputs > REMEMBERED:
        return build()
    return derived(support, ("table", num_inputs, num_outputs, device), build)


def _flat(keep: Tensor, lead: tuple[int, ...]) -> Tensor:
    """(..., M, N) -> (B or 1, 1, M, N)."""
    shape = keep.shape[-2:]
    if keep.dim() == 2:
        return keep[None, None]
    return keep.expand(*lead, *shape).reshape(math.prod(lead), 1, *shape)
