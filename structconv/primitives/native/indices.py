"""`Csr`, a layout of edges, and `sealed`, the form of it that kernels take.

No index reaches a kernel unchecked. Kernels take sealed layouts: one tensor of all arrays, whose header says that they
were checked (src/operators.cpp). The arrays of a layout from `layouts` are parts of one; any other layout is checked
and copied once, when it is first used. Each use compares the number of columns it needs with those there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from structconv.derived import derived
from structconv.errors import StructureError
from structconv.primitives.native.loader import core

__all__ = ["LIMIT", "Csr", "Sealed", "narrow", "sealed"]

_WRONG = {
    1: "indptr must start at 0, not fall, and end at E={}",
    2: "indices must not be negative",
    3: "order must hold each of the E={} edges once",
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


class Sealed(NamedTuple):
    """A layout as kernels take it, and how many columns it has at least."""

    tensor: Tensor
    columns: int


def narrow(index: Tensor) -> Tensor:
    """Return the tensor as contiguous int32. O(1) for int32, and for a tensor that is cached and unchanged."""
    if index.dtype is torch.int32 and index.is_contiguous():
        return index
    return derived(index, "int32", lambda: index.to(torch.int32).contiguous())


def sealed(layout: Csr) -> Sealed:
    """A layout on the CPU, checked. O(E), once for each three arrays while they do not change.

    Raises:
        StructureError: if it is none.
    """
    return derived(layout, "sealed", lambda: _checked(layout))


def _checked(layout: Csr) -> Sealed:
    for index in layout:
        if index.dtype is torch.int64 and index.numel() and int(index.abs().amax()) > LIMIT:
            raise StructureError("Csr", "indices must be below 2^31", int(index.abs().amax()))
    tensors = [narrow(index) for index in layout]
    if any(t.dim() != 1 or not t.is_cpu or t.dtype is not torch.int32 for t in tensors) or not tensors[0].shape[0]:
        raise StructureError("Csr", "indptr, indices and order must be lists of integers on the CPU, indptr not empty",
                             [(tuple(t.shape), str(t.device)) for t in layout])
    slots = tensors[1].shape[0]
    if tensors[2].shape[0] != slots:
        raise StructureError("Csr", f"order must have the length E={slots} of indices", tensors[2].shape[0])
    kernels = core()
    assert kernels is not None
    tensor, wrong, columns = kernels.verify(*tensors)
    if wrong:
        raise StructureError("Csr", _WRONG[wrong].format(slots), "a layout that is none")
    return Sealed(tensor, columns)
