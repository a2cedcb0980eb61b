"""Calls the kernels of src/gemm.cpp: x w + bias and x^T g in float32, for many rows and few channels."""

from __future__ import annotations

import torch
from torch import Tensor

from structconv.primitives.native.dispatch import kernels
from structconv.primitives.native.loader import Core

__all__ = ["kernels_for", "outer", "parts", "project"]

_FILL = 32  # columns of scratch are filled up to multiples of this: kFill in src/api.h
_NARROW = 16  # columns up to which vectors run over the wider of both operands of x^T g
_PART_ROWS, _MOST_PARTS, _PART_NUMBERS = 256, 16, 1 << 23


def kernels_for(*tables: Tensor) -> Core | None:
    """The kernels, if they can take these (M, C) as they lie: float32 on the CPU, contiguous rows, nothing empty."""
    return kernels() if all(t.is_cpu and t.dtype is torch.float32 and _by_rows(t) for t in tables) else None


def project(core: Core, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """x w + bias: (M, P), (P, Q) and (Q,) or None -> (M, Q), for what `kernels_for(x)` accepts.

    The rows of x may lie apart, w may have any strides. 2 M P Q flops; scratch of P Q numbers.
    """
    y: Tensor = core.project(x, w, bias)
    return y


def outer(core: Core, x: Tensor, g: Tensor) -> Tensor:
    """x^T g: (M, P), (M, Q) -> (P, Q), for what `kernels_for(x, g)` accepts. The rows of both may lie apart.

    2 M P Q flops; scratch of as many results as there are `parts` of the rows, whose sums are added in their order.
    """
    by_columns = g.shape[1] <= _NARROW and g.shape[1] < x.shape[1]
    a, b = (g, x) if by_columns else (x, g)
    y: Tensor = core.outer(a, b, parts(a.shape[0], a.shape[1] * (-(-b.shape[1] // _FILL) * _FILL)), by_columns)
    return y


def parts(rows: int, numbers: int) -> int:
    """Into how many parts the rows are cut: a power of two, whatever the threads, so that the sums are the same."""
    most = min(_MOST_PARTS, rows // _PART_ROWS, _PART_NUMBERS // numbers)
    return 1 << max(most.bit_length() - 1, 0)


def _by_rows(t: Tensor) -> bool:
    return t.numel() > 0 and not t.is_neg() and t.stride(1) == 1 and t.stride(0) >= t.shape[1]
