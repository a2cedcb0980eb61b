"""Counting the floating-point operations that a model really does."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from structconv import torch_private as private
from structconv.primitives import csr as _csr  # noqa: F401 - registers the operators counted here
from structconv.primitives import products as _products  # noqa: F401
from structconv.primitives.native import additive as _additive  # noqa: F401
from structconv.primitives.native import additive_dense as _additive_dense  # noqa: F401
from structconv.primitives.native import affine as _affine  # noqa: F401
from structconv.primitives.native import bilinear as _bilinear  # noqa: F401

__all__ = ["counted", "forward_flops"]

_Shape = tuple[int, ...]


def forward_flops(fn: Callable[[Tensor], Any], x: Tensor) -> int:
    """Flops of the products in ``fn(x)``: matrix products, convolutions, attention and sparse products.

    A multiplication and an addition are two. Element-wise work (activations, softmax, index selection) is not
    counted. The function is run once, without gradients.
    """
    counter = FlopCounterMode(display=False, custom_mapping=counted())
    with torch.no_grad(), counter:
        fn(x)
    return int(counter.get_total_flops())


def counted() -> dict[Any, Callable[..., int]]:
    """The flops of the package's operators, for torch's `FlopCounterMode`."""
    ops = torch.ops.structconv
    formulas: dict[Any, Callable[..., int]] = {
        ops.spmm: _spmm_flops, ops.sddmm: _sddmm_flops, ops.project: _project_flops,
        ops.affine_attention: _affine_flops, ops.bilinear_attention: _bilinear_flops,
        ops.additive_attention: _bilinear_flops, ops.dense_additive_attention: _dense_additive_flops}
    if private.flash_attention is not None:
        formulas[private.flash_attention] = _attention_flops
    return formulas


def _spmm_flops(indptr: _Shape, indices: _Shape, order: _Shape, indptr_T: _Shape, indices_T: _Shape, order_T: _Shape,
                values: _Shape | None, x: _Shape, rows: int, **_: Any) -> int:
    return 2 * (1 if values is None else math.prod(values[:-1])) * indices[0] * x[2]


def _project_flops(x: _Shape, w: _Shape, *_: Any, **__: Any) -> int:
    return 2 * x[0] * w[0] * w[1]


def _sddmm_flops(indptr: _Shape, indices: _Shape, order: _Shape, indptr_T: _Shape, indices_T: _Shape,
                 order_T: _Shape, q: _Shape, k: _Shape, rows: int, **_: Any) -> int:
    return 2 * rows * indices[0] * q[2]


def _affine_flops(indptr: _Shape, indices: _Shape, order: _Shape, indptr_T: _Shape, indices_T: _Shape,
                  order_T: _Shape, source: _Shape, target: _Shape, x: _Shape, *_: Any, **__: Any) -> int:
    return 2 * indices[0] * x[1] * x[2]


def _bilinear_flops(indptr: _Shape, indices: _Shape, order: _Shape, indptr_T: _Shape, indices_T: _Shape,
                    order_T: _Shape, q: _Shape, k: _Shape, v: _Shape, *_: Any, **__: Any) -> int:
    return 2 * indices[0] * q[1] * (q[2] + v[2])


def _dense_additive_flops(q: _Shape, k: _Shape, x: _Shape, *_: Any, **__: Any) -> int:
    return 2 * q[0] * k[0] * q[1] * (q[2] + x[2])


def _attention_flops(query: _Shape, key: _Shape, value: _Shape, *_: Any, **__: Any) -> int:
    heads, outputs, inputs = math.prod(query[:-2]), query[-2], key[-2]
    return 2 * heads * outputs * inputs * (query[-1] + value[-1])
