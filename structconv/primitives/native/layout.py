"""Index arrays as the native core reads them: int32, contiguous, converted once for each tensor and remembered."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from structconv.primitives.layout import Csr

_LIMIT = 2**31 - 1
#: Edges below which values are in the nearest caches anyway, whatever their order.
_FEW = 1 << 14
_SEEN = torch.empty(0)
_KNOWN: dict[tuple[int, ...], tuple[tuple[Any, ...], Any]] = {}
T = TypeVar("T")


def narrow(index: Tensor) -> Tensor:
    """The same numbers as contiguous int32. O(1) for int32, or when the tensor was seen before and has not changed."""
    if index.dtype is torch.int32 and index.is_contiguous():
        return index
    key = (id(index),)
    found = _recall(key, index)
    return _remember(key, index.to(torch.int32).contiguous(), index) if found is None else found


def in_slots(values: Tensor, order: Tensor) -> Tensor | None:
    """values[..., order], kept from the second time on that the same unchanged values are asked for, else None.

    A product reads values in the order of its slots; to look each up by its edge costs as much as the rest of it.
    Values that come once, or that are learnt, are not worth a copy. (V, E) or (E,); E numbers a row while both live.
    """
    if order.shape[0] < _FEW or values.requires_grad:
        return None
    key = (id(values), id(order))
    found = _recall(key, values, order)
    if found is None:
        _remember(key, _SEEN, values, order)
        return None
    return _remember(key, values.index_select(-1, order), values, order) if found is _SEEN else found


def remembered(layout: Csr, build: Callable[[Csr], T]) -> T:
    """`build(layout)`, once for each three arrays as long as they live and do not change. O(1) when remembered."""
    indptr, indices, order = layout
    key = (id(indptr), id(indices), id(order))
    found = _recall(key, indptr, indices, order)
    return _remember(key, build(layout), indptr, indices, order) if found is None else found


def fits(*sizes: int) -> bool:
    """Whether all sizes can be counted in int32."""
    return max(sizes) < _LIMIT


def _state(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _recall(key: tuple[int, ...], *owners: Tensor) -> Any:
    found = _KNOWN.get(key)
    if found is None:
        return None
    marks, made = found
    for (ref, version), owner in zip(marks, owners, strict=True):
        if ref() is not owner or version != (0 if owner.is_inference() else owner._version):
            return None
    return made


def _remember(key: tuple[int, ...], made: T, *owners: Tensor) -> T:
    def forget(_: object) -> None:
        _KNOWN.pop(key, None)

    _KNOWN[key] = (tuple((weakref.ref(owner, forget), _state(owner)) for owner in owners), made)
    return made
