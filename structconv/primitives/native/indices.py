"""`Csr`, and what the core does with indices: it builds layouts, finds what is out of range, and proves layouts sound.

No index reaches a kernel unchecked. A layout that was built here is sound; any other is read through once, when its
addresses are taken for the first time, and each use compares the number of columns it needs with those there are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.errors import StructureError
from structconv.memo import derived
from structconv.primitives.native.interface import Struct, constants, integers, pointers
from structconv.primitives.native.loader import Core, core

__all__ = ["LIMIT", "Addresses", "Csr", "addresses", "build", "fits", "narrow", "outside", "proved"]

LAYOUT = Struct("Layout", pointers("indptr index order"), integers("rows slots"))
_LAYOUTS = Struct("LayoutsArgs", pointers("index"), integers("row column wide edges inputs outputs threads"),
                  pointers("indptr_target index_target order_target indptr_source index_source order_source bad"))
_OUTSIDE = Struct("OutsideArgs", pointers("index"), integers("row column wide rows columns"), pointers("sizes bad"))
_VERIFY = Struct("VerifyArgs", LAYOUT.named("layout"), pointers("met wrong columns"))
_NOTHING, _INDPTR, _INDEX, _ORDER = constants(kNothing=0, kIndptr=1, kIndex=2, kOrder=3)
_WRONG = {
    _INDPTR: "indptr must start at 0, not fall, and end at E={}",
    _INDEX: "indices must not be negative",
    _ORDER: "order must hold each of the E={} edges once",
}
#: Sizes below it can be counted in int32.
LIMIT = 2**31 - 1


class Csr(NamedTuple):
    """Pairs grouped by row: row r owns the slots indptr[r] to indptr[r + 1].

    `indptr` (rows + 1,) and `indices` (E,) are both int32 or both int64, as torch's CSR tensors want it; `order` (E,)
    says where in the input each slot came from: `values[..., order]` brings edge values into slot order. Pairs of one
    row keep their input order, and duplicates are kept.
    """

    indptr: Tensor
    indices: Tensor
    order: Tensor


class Addresses(NamedTuple):
    """Where the core finds a layout, the sizes that it needs, and what keeps the memory alive."""

    indptr: int
    indices: int
    order: int
    rows: int
    slots: int
    columns: int
    held: tuple[Tensor, ...]


def fits(*sizes: int) -> bool:
    """Whether all sizes can be counted in int32."""
    return max(sizes) < LIMIT


def narrow(index: Tensor) -> Tensor:
    """The same numbers as contiguous int32. O(1) for int32, or when the tensor was seen before and has not changed."""
    if index.dtype is torch.int32 and index.is_contiguous():
        return index
    return derived(index, "int32", lambda: index.to(torch.int32).contiguous())


def addresses(layout: Csr) -> Addresses:
    """Those of a layout on the CPU that proves sound. O(E), once for each three arrays while they do not change.

    Raises:
        StructureError: if it is none.
    """
    return derived(layout, "addresses", lambda: proved(layout))


def proved(layout: Csr) -> Addresses:
    """`addresses`, found and checked anew."""
    for index in layout:
        if index.dtype is torch.int64 and index.numel() and int(index.abs().amax()) > LIMIT:
            raise StructureError("Csr", "indices must be below 2^31", int(index.abs().amax()))
    tensors = [narrow(index) for index in layout]
    if any(t.dim() != 1 or not t.is_cpu or t.dtype is not torch.int32 for t in tensors) or not tensors[0].shape[0]:
        raise StructureError("Csr", "indptr, indices and order must be lists of integers on the CPU, indptr not empty",
                             [(tuple(t.shape), str(t.device)) for t in layout])
    indptr, indices, order = tensors
    slots = indices.shape[0]
    if order.shape[0] != slots:
        raise StructureError("Csr", f"order must have the length E={slots} of indices", order.shape[0])
    found = indptr.data_ptr(), indices.data_ptr(), order.data_ptr(), indptr.shape[0] - 1, slots
    columns = _columns(found)
    return Addresses(*found, columns, tuple(t for t, own in zip(tensors, layout, strict=True) if t is not own))


def _columns(layout: tuple[int, ...]) -> int:
    """How many columns there are at least."""
    kernels = core()
    assert kernels is not None
    found, met = (ctypes.c_int64 * 2)(), torch.zeros(layout[4], dtype=torch.uint8)
    at = ctypes.addressof(found)
    kernels.verify(_VERIFY.pack(*layout, met.data_ptr(), at, at + 8))
    wrong, columns = found
    if wrong != _NOTHING:
        raise StructureError("Csr", _WRONG[wrong].format(layout[4]), "a layout that is none")
    return columns


def build(kernels: Core, index: Tensor, num_inputs: int, num_outputs: int) -> tuple[Csr, Csr] | int:
    """Both layouts of edges (2, E) on the CPU, by target and by source, or the first edge that is out of range."""
    edges, threads = index.shape[1], torch.get_num_threads()
    bad, one = ctypes.c_int64(-1), torch.int32
    ahead, back = (Csr(torch.empty(rows + 1, dtype=one), torch.empty(edges, dtype=one), torch.empty(edges, dtype=one))
                   for rows in (num_outputs, num_inputs))
    kernels.layouts(_LAYOUTS.pack(
        index.data_ptr(), *index.stride(), index.dtype is torch.int64, edges, num_inputs, num_outputs, threads,
        *(t.data_ptr() for t in ahead), *(t.data_ptr() for t in back), ctypes.addressof(bad)))
    if bad.value >= 0:
        return bad.value
    for layout, columns in ((ahead, num_inputs), (back, num_outputs)):
        derived(layout, "addresses", partial(_located, layout, columns))
    return ahead, back


def _located(layout: Csr, columns: int) -> Addresses:
    """The addresses of a layout of int32 that is known to be sound."""
    indptr, indices, order = layout
    return Addresses(indptr.data_ptr(), indices.data_ptr(), order.data_ptr(), indptr.shape[0] - 1, indices.shape[0],
                     columns, ())


def outside(kernels: Core, index: Tensor, sizes: Sequence[int]) -> int:
    """The first column of the first row r of an index (R, E) on the CPU that is not in [0, sizes[r]), or -1."""
    bad, limits = ctypes.c_int64(-1), (ctypes.c_int64 * len(sizes))(*sizes)
    kernels.outside(_OUTSIDE.pack(index.data_ptr(), *index.stride(), index.dtype is torch.int64, *index.shape,
                                  ctypes.addressof(limits), ctypes.addressof(bad)))
    return bad.value
