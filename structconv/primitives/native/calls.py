"""What calls of kernels share, and those of sparse products and dropout. Whoever calls here has checked the sizes.

A tensor goes to a kernel through `dense`, `unit`, `rows` or `floats`, which see to it that its memory can be read.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from structconv.errors import StructureError
from structconv.memo import derived
from structconv.primitives.memory import LEAST, new_empty
from structconv.primitives.native.indices import LAYOUT, LIMIT, Csr, addresses
from structconv.primitives.native.interface import Struct, constants, integers, pointers, reals
from structconv.primitives.native.loader import Core, core

__all__ = ["DROP", "MAX_CHANNELS", "ROWS", "SPMM", "Drop", "Side", "drop_block", "drop_of", "dropped", "edges_of",
           "empty", "floats", "half", "kernels", "pointer", "rows", "rows_of", "sddmm", "spmm", "unit", "usable"]

ROWS = Struct("Rows", pointers("x"), integers("row head"))
DROP = Struct("DropArgs", reals("p"), integers("seed heads_per_batch num_outputs source_major"))
SPMM = Struct("SpmmArgs", LAYOUT.named("layout"), pointers("values x z y"),
               integers("x_rows channels num_values values_stride repeats_values repeats_x repeats_y half threads"),
               reals("alpha beta"))
_SDDMM = Struct("SddmmArgs", LAYOUT.named("layout"), pointers("q k s"),
                integers("k_rows channels num_values repeats_q repeats_k half threads"))
_DROP_BLOCK = Struct("DropBlockArgs", pointers("weights dropped gradient"),
                     integers("heads rows columns first_head last_row threads"), DROP.named("drop"))

(MAX_CHANNELS,) = constants(kMaxChannels=7168)
#: Edges below which values are in the nearest caches anyway, whatever their order.
FEW = 1 << 14
_STORED = frozenset((torch.float32, torch.bfloat16))
Drop = tuple[float, int, int]  # p, seed, heads of one batch entry
NO_DROP: Drop = (0.0, 0, 1)


class Loaded:
    """The core, once it was asked for."""

    core: Core | None = None
    asked = False


def kernels() -> Core | None:
    """`loader.core()`, remembered."""
    if not Loaded.asked:
        Loaded.core, Loaded.asked = core(), True
    return Loaded.core


def usable(x: Tensor, edges: int) -> Core | None:
    """The kernels, if they can take x (., rows, channels): on the CPU, float32 or bfloat16, of bearable size."""
    if not x.is_cpu or x.dtype not in _STORED or x.shape[-1] > MAX_CHANNELS or max(edges, *x.shape) >= LIMIT:
        return None
    return Loaded.core if Loaded.asked else kernels()


# -- arguments ----------------------------------------------------------------------------------------------------

class Side:
    """A layout as kernels take it, proved, and its values in the order of the slots; 0 for an array that is not there.
    """

    __slots__ = ("columns", "held", "in_slots", "layout", "rows", "values")

    def __init__(self, layout: tuple[int, int, int, int, int], values: int, columns: int, held: Tensor) -> None:
        self.layout, self.values, self.columns, self.held = layout, values, columns, held
        indptr, index, _, self.rows, slots = layout
        #: The layout of products, whose values lie in the order of the slots.
        self.in_slots = indptr, index, 0, self.rows, slots


def rows_of(layout: Csr | Side) -> int:
    """The number of rows of a layout."""
    return layout.rows if isinstance(layout, Side) else layout.indptr.shape[0] - 1


def edges_of(layout: Csr | Side, columns: int) -> tuple[Any, ...]:
    """A layout of at most so many columns, whose first five fields are those of the interface.

    Raises:
        StructureError: if it has more.
    """
    if isinstance(layout, Side):
        return layout.layout
    found = addresses(layout)
    if found.columns > columns:
        raise StructureError("Csr", f"indices must be below {columns}", found.columns - 1)
    return found


def pointer(t: Tensor | None) -> int:
    """Where the numbers of a tensor lie; 0 for `None`.

    Raises:
        RuntimeError: if they are not in the memory of the processor.
    """
    if t is None:
        return 0
    found = t.data_ptr()
    if not (found and t.is_cpu) and t.numel():
        raise RuntimeError(f"a tensor of shape {tuple(t.shape)} on {t.device} has no memory that a kernel could read")
    return found


def dense(t: Tensor) -> Tensor:
    """The same numbers, contiguous."""
    return (t.resolve_neg() if t.is_neg() else t).contiguous()


def unit(t: Tensor) -> Tensor:
    """The same numbers with contiguous channels."""
    if t.is_neg():
        t = t.resolve_neg()
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def floats(t: Tensor) -> Tensor:
    """The same numbers as contiguous float32."""
    return dense(t) if t.dtype is torch.float32 else t.to(torch.float32).contiguous()


def rows(t: Tensor | None) -> tuple[int, int, int]:
    """A tensor (rows, heads, channels) as the interface has it; nothing for `None`."""
    return (0, 0, 0) if t is None else (pointer(t), t.stride(0), t.stride(1))


def half(t: Tensor) -> int:
    """Whether numbers are stored in 16 bits."""
    return t.dtype is torch.bfloat16


def drop_of(p: float, seed: Tensor | None, batch_heads: int) -> Drop:
    """Dropout as numbers, which are not looked at where there is none."""
    return (p, int(seed), batch_heads) if p and seed is not None else NO_DROP


def dropped(drop: Drop, outputs: int, source_major: int) -> tuple[float, int, int, int, int]:
    """`DropArgs`."""
    p, seed, batch_heads = drop
    return p, seed, batch_heads, outputs, source_major


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Memory for a result of this shape: huge pages, and what was kept of earlier results, for a large one."""
    if prod(shape) * 4 < LEAST:
        return like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtype)
    return new_empty(like, shape, dtype)


# -- kernels ------------------------------------------------------------------------------------------------------

def in_slots(values: Tensor, order: Tensor) -> Tensor | None:
    """values[..., order], kept from the second time on that the same unchanged values are asked for, else None.

    A product reads values in the order of its slots; to look each up by its edge costs as much as the rest of it.
    Values that come once, or that are learned, are not worth a copy. (V, E) or (E,); E numbers a row while both live.
    """
    if order.shape[0] < FEW or values.requires_grad:
        return None
    asked = derived((values, order), "asked for", lambda: [False])
    if not asked[0]:
        asked[0] = True
        return None
    return derived((values, order), "in slots", lambda: values.index_select(-1, order))


def spmm(kernels: Core, layout: Csr, values: Tensor | None, x: Tensor, z: Tensor | None, rows: int, count: int,
         alpha: float, beta: float, out: Tensor | None = None) -> Tensor:
    """y[v rows // V] += alpha A x[v X // V] + beta z, for V = `count` and A of values[v W // V].

    values (W, E), (E,) for W = 1, or None for ones. x is (X, M, C) or (M, C), and so is y; it is written to `out`,
    contiguous, where given. z may be the same memory.
    """
    *lead, inputs, channels = x.shape
    batch = lead[0] if lead else 1
    x = dense(x)
    indptr, indices, order, outputs, edges, *_ = edges_of(layout, inputs)
    stride, repeats = 0, count
    if values is not None:
        stride, repeats = (0, count) if values.numel() == edges else (edges, count // values.shape[0])
        sorted_values = in_slots(values, layout.order)
        values, order = (values, order) if sorted_values is None else (sorted_values, 0)
        values = dense(values if values.dtype is x.dtype else values.to(x.dtype))
    z = None if z is None else dense(z)
    y = empty(x, (rows, outputs, channels) if lead else (outputs, channels)) if out is None else out
    kernels.spmm(SPMM.pack(indptr, indices, order, outputs, edges, pointer(values), pointer(x), pointer(z),
                            y.data_ptr(), inputs, channels, count, stride, repeats, count // batch, count // rows,
                            half(x), torch.get_num_threads(), alpha, beta))
    return y


def sddmm(kernels: Core, layout: Csr, q: Tensor, k: Tensor, rows: int) -> Tensor:
    """s[v, e] = <q[v Y // V][n], k[v X // V][m]>, in the order of the edges."""
    q, k = dense(q), dense(k)
    s = new_empty(q, (rows, layout.indices.shape[0]))
    kernels.sddmm(_SDDMM.pack(*edges_of(layout, k.shape[1])[:5], pointer(q), pointer(k), s.data_ptr(), k.shape[1],
                              q.shape[2], rows, rows // q.shape[0], rows // k.shape[0], half(q),
                              torch.get_num_threads()))
    return s


def drop_block(kernels: Core, weights: Tensor, dropped_weights: Tensor, gradient: Tensor | None, first_head: int,
               last_row: int, outputs: int, drop: Drop) -> None:
    """dropped = weights times 0 or 1 / (1 - p), and so the gradient in place: contiguous float32 (heads, rows, M).

    Row i is output `last_row` - i of `outputs`; head h is head `first_head` + h of all.
    """
    kernels.drop_block(_DROP_BLOCK.pack(pointer(weights), pointer(dropped_weights), pointer(gradient), *weights.shape,
                                        first_head, last_row, torch.get_num_threads(), *dropped(drop, outputs, 0)))
