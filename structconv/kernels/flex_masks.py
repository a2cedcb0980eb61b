"""Masks for FlexAttention: a function of the indices with the blocks that have pairs, and tensors that the score
function reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from structconv.bases.tree import getter
from structconv.derived import derived
from structconv.kernels.existing import all_of
from structconv.structures.masks import And, Not, Or, Transposed
from structconv.structures.supports import Blocks, Causal, DenseMask, Global, Padding, Support, Window

__all__ = ["BOOLEANS", "SIDE", "Present"]

#: Outputs and inputs of a block, and booleans that are evaluated at a time to find those that have a pair.
SIDE = 128
BOOLEANS = 1 << 24
#: The first support of each kind: programs are compiled for an object, and would be again for its equals.
_FIRST: dict[Hashable, Support] = {}


class Present(NamedTuple):
    """The pairs that are in every part: functions of only m and n, and what finds booleans (..., M) and (..., M, N)."""

    parts: tuple[Support, ...]
    paddings: tuple[Callable[[Any], Tensor], ...]
    tables: tuple[Callable[[Any], Tensor], ...]

    @classmethod
    def of(cls, support: Support | None) -> Present | None:
        """The parts of a support's spec; `None` where one of them is of another kind."""
        if support is None:
            return cls((), (), ())
        if isinstance(support, And):
            first, second = cls.of(support.first), cls.of(support.second)
            return None if first is None or second is None else cls(
                *(one + other for one, other in zip(first, second, strict=True)))  # type: ignore[arg-type]
        if isinstance(support, Padding):
            return cls((), (getter(support.keep),), ())
        if isinstance(support, DenseMask):
            return cls((), (), (getter(support.keep),))
        return cls((_FIRST.setdefault(_key(support), support),), (), ()) if _computable(support) else None

    @property
    def everything(self) -> bool:
        """True if no pair is absent."""
        return not any(self)

    @property
    def reflexive(self) -> bool:
        """True if every entry is known to have the pair (n, n)."""
        return all(isinstance(part, Causal | Window | Blocks) for part in self.parts) and not any(self[1:])

    def by_tensors(self, basis: Any, lead: torch.Size) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """The padding (B, M) and the tables (M, N) or (B, M, N) of a batch of B = prod(lead) entries."""
        padding = all_of([find(basis) for find in self.paddings])
        padding = None if padding is None else padding.expand(*lead, -1).reshape(lead.numel(), -1)
        tables = [find(basis) for find in self.tables]
        return padding, tuple(t if t.dim() == 2 else t.expand(*lead, *t.shape[-2:]).reshape(-1, *t.shape[-2:])
                              for t in tables)

    def block_mask(self, inputs: int, outputs: int, device: torch.device) -> BlockMask | None:
        """The pairs of `parts`, `None` where there are none; found once for these sizes: O(M N) booleans, a piece at a
        time."""
        if not self.parts:
            return None
        key = "block mask", tuple(map(_key, self.parts)), inputs, outputs, device
        return derived(self.parts[0], key, lambda: _block_mask(self.parts, inputs, outputs, device))


def _computable(support: Support) -> bool:
    """Return True if a support is a function of m and n without tensors that is known to compile."""
    if isinstance(support, And | Or):
        return _computable(support.first) and _computable(support.second)
    if isinstance(support, Not | Transposed):
        return _computable(support.kept if isinstance(support, Not) else support.of)
    if type(support) is Window:
        return support.center is None and (support.grid is None or not support.grid.periodic)
    if type(support) is Global:
        return not isinstance(support.entries, tuple)
    return type(support) in (Causal, Blocks)


def _key(support: Support) -> Hashable:
    fields = (getattr(support, field.name) for field in dataclasses.fields(support))  # type: ignore[arg-type]
    return type(support), *(_key(part) if isinstance(part, Support) else part for part in fields)


def _block_mask(parts: tuple[Support, ...], inputs: int, outputs: int, device: torch.device) -> BlockMask:
    def keep(b: Tensor, h: Tensor, n: Tensor, m: Tensor) -> Tensor:
        kept_pairs = m >= 0
        for part in parts:
            kept_pairs = kept_pairs & part.contains(m, n)
        return kept_pairs

    pairs = _counts(parts, inputs, outputs, device)
    full = pairs == SIDE * SIDE
    return BlockMask.from_kv_blocks(*_listed((pairs > 0) & ~full), *_listed(full), BLOCK_SIZE=SIDE, mask_mod=keep,
                                    seq_lengths=(outputs, inputs))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(1, 1, rows) how many blocks of a row are meant, and (1, 1, rows, columns) those first, in order."""
    order = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1).int()[None, None], order.int()[None, None].contiguous()


def _counts(parts: tuple[Support, ...], inputs: int, outputs: int, device: torch.device) -> Tensor:
    """Pairs in each block of SIDE outputs and SIDE inputs; those beyond the last entry do not exist."""
    rows, columns = -(-outputs // SIDE), -(-inputs // SIDE)
    m = torch.arange(columns * SIDE, device=device).unsqueeze(-1)
    step, counts = max(1, BOOLEANS // (columns * SIDE * SIDE)), []
    for first in range(0, rows, step):
        n = torch.arange(first * SIDE, min(first + step, rows) * SIDE, device=device).unsqueeze(0)
        keep = (m < inputs) & (n < outputs)
        for part in parts:
            keep = keep & part.contains(m, n)
        counts.append(keep.view(columns, SIDE, -1, SIDE).sum((1, 3)).mT)
    return torch.cat(counts)
