"""Index arrays as the native core reads them: int32, contiguous, converted once for each tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from structconv.memo import derived
from structconv.primitives.layout import Csr

_LIMIT = 2**31 - 1
#: Edges below which values are in the nearest caches anyway, whatever their order.
_FEW = 1 << 14
T = TypeVar("T")


def narrow(index: Tensor) -> Tensor:
    """The same numbers as contiguous int32. O(1) for int32, or when the tensor was seen before and has not changed."""
    if index.dtype is torch.int32 and index.is_contiguous():
        return index
    return derived(index, "int32", lambda: index.to(torch.int32).contiguous())


def in_slots(values: Tensor, order: Tensor) -> Tensor | None:
    """values[..., order], kept from the second time on that the same unchanged values are asked for, else None.

    A product reads values in the order of its slots; to look each up by its edge costs as much as the rest of it.
    Values that come once, or that are learnt, are not worth a copy. (V, E) or (E,); E numbers a row while both live.
    """
    if order.shape[0] < _FEW or values.requires_grad:
        return None
    asked = derived((values, order), "asked for", lambda: [False])
    if not asked[0]:
        asked[0] = True
        return None
    return derived((values, order), "in slots", lambda: values.index_select(-1, order))


def remembered(layout: Csr, build: Callable[[Csr], T]) -> T:
    """`build(layout)`, once for each three arrays as long as they live and do not change. O(1) when remembered."""
    return derived(tuple(layout), "addresses", lambda: build(layout))


def fits(*sizes: int) -> bool:
    """Whether all sizes can be counted in int32."""
    return max(sizes) < _LIMIT
