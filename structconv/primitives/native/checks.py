"""Checks of an operator's arguments before a kernel reads memory by them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from structconv.derived import derived
from structconv.errors import ConfigError, ShapeError, StructureError, text_of
from structconv.primitives.native.indices import LIMIT, Csr, sealed
from structconv.primitives.native.loader import core

__all__ = ["check_columns", "check_dropout", "check_edges", "check_like", "check_numbers"]


def check_numbers(owner: str, first: Tensor, *others: Tensor | None) -> None:
    """Raise `ShapeError` unless all are dense tensors of floating numbers on one device."""
    for t in (first, *others):
        if t is None:
            continue
        if t.layout is not torch.strided or not t.is_floating_point() or t.is_nested:
            raise ShapeError(owner, "tensors must be dense and floating", f"{t.dtype}, {t.layout}")
        if t.device != first.device:
            raise ShapeError(owner, f"tensors must be on one device, {first.device}", t.device)


def check_like(owner: str, name: str, tensor: Tensor, expected: Tensor) -> None:
    """Raise `ShapeError` unless a tensor has the shape and dtype of another."""
    if tensor.shape != expected.shape or tensor.dtype != expected.dtype:
        raise ShapeError(owner, f"{name} must have shape {text_of(expected.shape)} and dtype {expected.dtype}",
                         f"{text_of(tensor.shape)} and {tensor.dtype}")


def check_dropout(owner: str, dropout: float, seed: Tensor | None, batch_heads: int | None = None) -> None:
    """Check 0 <= dropout < 1, an integer seed unless it is zero, and that batch_heads is at least 1.

    Raises:
        ConfigError: if one of them is out of range, or missing.
        ShapeError: if the seed is not one integer.
    """
    if not 0 <= dropout < 1:
        raise ConfigError(owner, "dropout must be in [0, 1)", dropout)
    if dropout > 0:
        if seed is None:
            raise ConfigError(owner, "dropout needs a seed", None, "Pass an integer scalar tensor.")
        if seed.dim() or seed.is_floating_point() or seed.is_complex() or seed.dtype is torch.bool:
            raise ShapeError(owner, "seed must be an integer scalar tensor", f"{text_of(seed.shape)} of {seed.dtype}")
    if batch_heads is not None and batch_heads < 1:
        raise ConfigError(owner, "batch_heads must be at least 1", batch_heads)


def check_edges(owner: str, layouts: Sequence[Tensor], near: Tensor) -> tuple[Csr, Csr]:
    """The two layouts of an operator's edges, by target and by source, on the device of its numbers.

    Raises:
        ShapeError: if they are not lists of integers there, or do not fit each other.
        StructureError: if one of them is no layout: see `check_columns`.
    """
    for t in layouts:
        if t.dim() != 1 or t.dtype not in (torch.int32, torch.int64) or t.layout is not torch.strided:
            raise ShapeError(owner, "layouts must be lists of integers", f"{text_of(t.shape)} of {t.dtype}, {t.layout}")
        if t.device != near.device:
            raise ShapeError(owner, f"layouts must be on the device of the numbers, {near.device}", t.device)
    by_target, by_source = Csr(*layouts[:3]), Csr(*layouts[3:])
    for layout, other in ((by_target, by_source), (by_source, by_target)):
        if not layout.indptr.shape[0] or layout.indptr.dtype != layout.indices.dtype:
            raise ShapeError(owner, "indptr must not be empty, and have the dtype of indices",
                             f"{text_of(layout.indptr.shape)} of {layout.indptr.dtype} and {layout.indices.dtype}")
        if layout.indices.shape != layout.order.shape or layout.indices.shape != other.indices.shape:
            raise ShapeError(owner, "both layouts must have the same edges", [tuple(t.shape) for t in layouts])
        check_columns(owner, layout, other.indptr.shape[0] - 1)
    return by_target, by_source


def check_columns(owner: str, layout: Csr, columns: int) -> None:
    """Check the indices of a layout. O(E), once for each three arrays while they do not change.

    Raises:
        StructureError: unless indptr starts at 0, does not fall and ends at E, each index is in [0, columns), and order
            holds each edge once.
    """
    if layout.indices.is_meta:
        return
    if layout.indices.is_cpu and layout.indices.dtype is torch.int32 and core() is not None:
        least = sealed(layout).columns
    else:
        least = derived(layout, "columns", lambda: _columns(layout))
    if least > columns:
        raise StructureError(owner, f"indices must be below {columns}", least - 1)


def _columns(layout: Csr) -> int:
    """How many columns a layout has at least."""
    indptr, indices, order = layout
    slots = indices.shape[0]
    if int(indptr[0]) or int(indptr[-1]) != slots or bool((indptr.diff() < 0).any()):
        raise StructureError("Csr", f"indptr must start at 0, not fall, and end at E={slots}", "a layout that is none")
    if not slots:
        return 0
    low, high = torch.stack(torch.aminmax(indices)).tolist()
    if low < 0 or high >= LIMIT:
        raise StructureError("Csr", "indices must not be negative, and be below 2^31 - 1", low if low < 0 else high)
    if not torch.equal(order.long().sort().values, torch.arange(slots, device=order.device)):
        raise StructureError("Csr", f"order must hold each of the E={slots} edges once", "a layout that is none")
    return high + 1
