"""Dispatch to the core: which tensors kernels take, their arguments, and the calls of sparse products and dropout."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.derived import derived
from structconv.errors import StructureError
from structconv.primitives.memory import LEAST, new_empty
from structconv.primitives.native.indices import LIMIT, Csr, sealed
from structconv.primitives.native.loader import Core, core

__all__ = ["MAX_CHANNELS", "NO_DROP", "Drop", "Heads", "Turn", "core_for", "dense", "drop_of", "edges_of", "empty",
           "floats", "kernels", "parts_of_table", "spmm", "unit", "usable", "usable_rows"]

#: Channels of a head that kernels gather.
MAX_CHANNELS = 7168
#: Edges below which values are in the nearest caches anyway, whatever their order.
FEW = 1 << 14
_STORED = frozenset((torch.float32, torch.bfloat16))
_ALIKE = {torch.float32}, {torch.bfloat16}
Drop = tuple[float, int, int]  # p, seed, heads of one batch entry
NO_DROP: Drop = (0.0, 0, 1)


class Loaded:
    """The core, loaded at its first use."""

    core: Core | None = None
    asked = False


def kernels() -> Core | None:
    """`loader.core()`, remembered."""
    if not Loaded.asked:
        Loaded.core, Loaded.asked = core(), True
    return Loaded.core


setattr(kernels, "_dynamo_marked_constant", True)  # noqa: B010 - see torch_compat: loading cannot be traced


def usable(x: Tensor, edges: int) -> Core | None:
    """The kernels, if they can take x (., rows, channels): on the CPU, float32 or bfloat16, of bearable size."""
    if not x.is_cpu or x.dtype not in _STORED or x.shape[-1] > MAX_CHANNELS or max(edges, *x.shape) >= LIMIT:
        return None
    return Loaded.core if Loaded.asked else kernels()


def core_for(*tensors: Tensor | None) -> Core | None:
    """Return the kernels, if they can read these tensors without a copy: contiguous, on the CPU, all float32 or all
    bfloat16."""
    dtypes = set()
    for t in tensors:
        if t is not None:
            if not t.is_contiguous() or not t.is_cpu or t.is_neg():
                return None
            dtypes.add(t.dtype)
    return kernels() if dtypes in _ALIKE else None


def usable_rows(*tables: Tensor) -> Core | None:
    """Return the kernels, if x w and x^T y can read these (M, C) without a copy: float32 on the CPU, contiguous rows,
    not empty."""
    fit = all(t.is_cpu and t.dtype is torch.float32 and t.numel() > 0 and not t.is_neg() and t.stride(1) == 1
              and t.stride(0) >= t.shape[1] for t in tables)
    return kernels() if fit else None


# -- arguments ----------------------------------------------------------------------------------------------------

def edges_of(layout: Csr, columns: int) -> Tensor:
    """Return a sealed layout that has at most `columns` columns.

    Raises:
        StructureError: if it has more.
    """
    csr = sealed(layout)
    if csr.columns > columns:
        raise StructureError("Csr", f"indices must be below {columns}", csr.columns - 1)
    return csr.tensor


def dense(t: Tensor) -> Tensor:
    """Return the tensor, contiguous."""
    return (t.resolve_neg() if t.is_neg() else t).contiguous()


def unit(t: Tensor) -> Tensor:
    """Return the tensor with contiguous channels."""
    if t.is_neg():
        t = t.resolve_neg()
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def floats(t: Tensor) -> Tensor:
    """Return the tensor as contiguous float32."""
    return dense(t) if t.dtype is torch.float32 else t.to(torch.float32).contiguous()


def drop_of(p: float, seed: Tensor | None, batch_heads: int) -> Drop:
    """Dropout as numbers, which are not looked at where there is none."""
    return (p, int(seed), batch_heads) if p and seed is not None else NO_DROP


def empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a result of this shape: a large one on huge pages, from the memory of earlier results."""
    if prod(shape) * 4 < LEAST:
        return like.new_empty(shape) if dtype is None else like.new_empty(shape, dtype=dtype)
    return new_empty(like, shape, dtype)


def parts_of_table(table: Tensor, q: Tensor | None, heads: int, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, views of the table where they are its columns."""
    width, at = heads * depth, 0 if q is not None else heads * depth
    key, value = table[:, at:at + width], table[:, at + width:]
    query = table[:, :width].unflatten(-1, (heads, depth)) if q is None else q
    return query, key.unflatten(-1, (heads, depth)), value.unflatten(-1, (heads, value.shape[1] // heads))


# -- a step of decoding by attention, projections and all ----------------------------------------------------------

class Heads(NamedTuple):
    """One entry by heads (B, K, D): x (B, P) times a matrix (K D, P), plus bias (K D); without a matrix x itself."""

    x: Tensor
    weight: Tensor | None = None
    bias: Tensor | None = None


class Turn(NamedTuple):
    """How query and key turn by the position, as in `primitives.rotation.rotate`; without rates they do not."""

    rates: Tensor | None = None
    gain: float = 1.0
    halves: bool = False


# -- kernels ------------------------------------------------------------------------------------------------------

def layout_ordered(values: Tensor, order: Tensor) -> Tensor | None:
    """values[..., order], cached from the second request for the same unchanged values on, else None.

    A product reads values in the order of its slots; to look each up by its edge costs as much as the rest of it.
    Values that come once, or that are learned, are not worth a copy. (V, E) or (E,); E numbers a row while both live.
    """
    if order.shape[0] < FEW or values.requires_grad:
        return None
    again = derived((values, order), "asked for", lambda: [False])
    if not again[0]:
        again[0] = True
        return None
    return derived((values, order), "in the order of the layout", lambda: values.index_select(-1, order))


def spmm(kernels: Core, layout: Csr, values: Tensor | None, x: Tensor, z: Tensor | None, rows: int, count: int,
         alpha: float, beta: float, out: Tensor | None = None) -> Tensor:
    """y[v rows // V] += alpha A x[v X // V] + beta z, for V = `count` and A of values[v W // V].

    values (W, E), (E,) for W = 1, or None for ones. x is (X, M, C) or (M, C), and so is y; it is written to `out`,
    contiguous, where given. z may be the same memory.
    """
    layout_tensor, in_order = edges_of(layout, x.shape[-2]), None
    if values is not None and (in_order := layout_ordered(values, layout.order)) is not None:
        values = in_order
    arguments = layout_tensor, values, in_order is not None, x
    if out is None:
        y: Tensor = kernels.spmm(*arguments, z, rows, count, alpha, beta)
        return y
    kernels.spmm_into(*arguments, out, count, alpha, beta)
    return out

