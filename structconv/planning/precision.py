"""Mixed precision: under autocast the arguments of a call are cast once, so that kernels get one dtype.

As in torch's layers, products and y have the dtype of autocast. Kernels run with autocast off; sums and normalizations
run in float32, as for 16-bit arguments.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.bases.tree import Function, NormalizedWeights
from structconv.planning.problem import Call
from structconv.structures.values import Structure, map_tensors

__all__ = ["autocast_dtype", "cast", "cast_call", "promoted_dtype"]

T = TypeVar("T")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for products with x; `None` if autocast is off, or x is float64."""
    if not private.any_autocast():
        return None
    kind = x.device.type
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled and _may_be_cast(x) else None


def cast(value: T, dtype: torch.dtype | None) -> T:
    """The value with those tensors in this dtype that autocast would cast; structures keep theirs, and functions of
    scores run under autocast."""
    if dtype is None:
        return value
    target = dtype

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(target) if _may_be_cast(value) else value
        if type(value) is NormalizedWeights:
            return value.compute(value.graph, value.normalize, target, value.weighted)
        return Function(value.module, target, value.parameters) if type(value) is Function else value

    result: T = map_tensors(value, changed, whole=(Structure,), also=(Function, NormalizedWeights))
    return result


def cast_call(call: Call, dtype: torch.dtype | None) -> Call:
    """The call with all its tensors in this dtype."""
    if dtype is None:
        return call
    return call._replace(x=cast(call.x, dtype), basis=cast(call.basis, dtype), theta=cast(call.theta, dtype),
                         bias=cast(call.bias, dtype), projected=cast(call.projected, dtype),
                         relative=cast(call.relative, dtype))


def promoted_dtype(*values: Any) -> torch.dtype | None:
    """Return the dtype that torch's type promotion gives to the floating tensors of these values; `None` without any.
    """
    result: torch.dtype | None = None

    def promote(value: Any) -> Any:
        nonlocal result
        if isinstance(value, NormalizedWeights) or value.is_floating_point():
            result = value.dtype if result is None else torch.promote_types(result, value.dtype)
        return value

    map_tensors(values, promote, whole=(Structure,), also=(NormalizedWeights,))
    return result


def _may_be_cast(t: Tensor) -> bool:
    """Return True if autocast casts tensors of this dtype; float64 is not cast."""
    return t.is_floating_point() and t.dtype != torch.float64
