"""Calls the kernels of src/gemm.cpp: x w + bias and x^T g in float32, for many rows and few channels."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.primitives.memory import new_empty
from structconv.primitives.native.calls import dense, kernels, pointer
from structconv.primitives.native.interface import Struct, integers, pointers
from structconv.primitives.native.loader import Core

__all__ = ["kernels_for", "outer", "parts", "project"]

_PROJECT = Struct("ProjectArgs", pointers("x w bias y packed"),
                  integers("rows inputs columns x_row w_row w_column y_row threads"))
_OUTER = Struct("OuterArgs", pointers("x g y partial"),
                integers("rows inputs columns x_row g_row y_row y_column parts threads"))
_NARROW = 16  # columns up to which vectors run over the wider of both operands of x^T g
_PART_ROWS, _MOST_PARTS, _PART_NUMBERS = 256, 16, 1 << 23


def kernels_for(*tables: Tensor) -> Core | None:
    """The kernels, if they can take these (M, C) as they lie: float32 on the CPU, contiguous rows, nothing empty."""
    return kernels() if all(t.is_cpu and t.dtype is torch.float32 and _by_rows(t) for t in tables) else None


def project(core: Core, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x w + bias: (M, P), (P, Q) and (Q,) or None -> (M, Q), for what `kernels_for(x)` accepts.

    The rows of x may lie apart, w may have any strides. 2 M P Q flops; scratch of P Q numbers.
    """
    (rows, inputs), columns = x.shape, w.shape[1]
    y = new_empty(x, (rows, columns))
    packed = x.new_empty(inputs * _filled(core, columns))
    w, bias = w.resolve_neg(), None if bias is None else dense(bias)
    core.project(_PROJECT.pack(
        pointer(x), pointer(w), pointer(bias), y.data_ptr(), packed.data_ptr(), rows, inputs, columns, x.stride(0),
        *w.stride(), columns, torch.get_num_threads()))
    return y


def outer(core: Core, x: Tensor, g: Tensor) -> Tensor:
    """x^T g: (M, P), (M, Q) -> (P, Q), for what `kernels_for(x, g)` accepts. The rows of both may lie apart.

    2 M P Q flops; scratch of as many results as there are `parts` of the rows, whose sums are added in their order.
    """
    y = x.new_empty((x.shape[1], g.shape[1]))
    if g.shape[1] <= _NARROW and g.shape[1] < x.shape[1]:
        _outer(core, g, x, y.t())
    else:
        _outer(core, x, g, y)
    return y


def _outer(core: Core, x: Tensor, g: Tensor, y: Tensor) -> None:
    (rows, inputs), columns = x.shape, g.shape[1]
    numbers = inputs * _filled(core, columns)
    count = parts(rows, numbers)
    partial = x.new_empty(count * numbers)
    core.outer(_OUTER.pack(
        pointer(x), pointer(g), y.data_ptr(), partial.data_ptr(), rows, inputs, columns, x.stride(0), g.stride(0),
        *y.stride(), count, torch.get_num_threads()))


def parts(rows: int, numbers: int) -> int:
    """Into how many parts the rows are cut: a power of two, whatever the threads, so that the sums are the same."""
    most = min(_MOST_PARTS, rows // _PART_ROWS, _PART_NUMBERS // numbers)
    return 1 << max(most.bit_length() - 1, 0)


def _filled(core: Core, columns: int) -> int:
    fill = core.constants["kFill"]
    return -(-columns // fill) * fill


def _by_rows(t: Tensor) -> bool:
    return t.numel() > 0 and not t.is_neg() and t.stride(1) == 1 and t.stride(0) >= t.shape[1]
