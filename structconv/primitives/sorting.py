"""Sorts, searches and repeats of integers: torch's own, and in an exported program by operators that ONNX has, too."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_exporting

__all__ = ["numbered_by_count", "rows_of", "search", "stable_order", "stable_sort"]


def stable_sort(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The keys (E,) in rising order, and their order (E,) int64; equal keys keep theirs."""
    if _exporting():
        order = stable_order(keys)
        return keys.index_select(0, order), order
    values, order = torch.sort(keys, stable=True)
    return values, order


def stable_order(keys: Tensor) -> Tensor:
    """The order of `stable_sort` by a sort that need not be stable, of keys >= 0 that differ."""
    count = keys.shape[0]
    return torch.argsort(keys.long() * count + torch.arange(count, device=keys.device))


def search(ordered: Tensor, keys: Tensor, right: bool = False) -> Tensor:
    """Return how many numbers of a sorted list (E,) are less than each key, or with `right` not greater: int64."""
    if not _exporting():
        return torch.searchsorted(ordered, keys, right=right)
    # sorted together, a number of the list counts for the keys after it
    both = torch.cat([2 * ordered.long() + int(not right), 2 * keys.flatten().long() + int(right)])
    order = torch.argsort(both)
    before = (order < ordered.shape[0]).long().cumsum(0)
    return torch.zeros_like(before).scatter(0, order, before)[ordered.shape[0]:].view(keys.shape)


def numbered_by_count(counts: Tensor, total: Any) -> Tensor:
    """Each number i of a list of counts (G,), counts[i] times: (total,) int64, `total` being their sum."""
    if not _exporting():
        return torch.repeat_interleave(counts, output_size=total)
    return rows_of(counts.cumsum(0), total)


def rows_of(ends: Tensor, total: Any) -> Tensor:
    """The row of each of `total` entries that lie row by row, of which row i ends before entry ends[i]: int64."""
    ends = ends.long()
    steps = ends.new_zeros((total + 1,)).index_add(0, ends, torch.ones_like(ends))
    return steps[:-1].cumsum(0)


def _exporting() -> bool:
    return is_compiling() and is_exporting()
