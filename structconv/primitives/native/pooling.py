"""`pool_groups`: rows that lie one group after the other, summed, averaged or maximized group by group, as one node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.primitives.functions import pulled_back
from structconv.primitives.native import dispatch
from structconv.primitives.native.loader import Core

__all__ = ["group_starts", "pool_groups"]

_KINDS = {"sum": 0, "mean": 1, "max": 2}  # see Pooling in src/operators.cpp


def pool_groups(x: Tensor, starts: Tensor, kind: str, composed: Callable[[Tensor], Tensor]) -> Tensor | None:
    """x (M, C) by groups of rows -> (G, C), zero for a group without rows; `None` where no kernel can read them.

    Args:
        x: see `adjacency.is_direct`.
        starts: (G + 1,), the first row of each group and the number of all.
        kind: "sum", "mean" or "max".
        composed: the same by differentiable operators, for derivatives of the gradients.
    """
    core = dispatch.kernels()
    if core is None or not (starts.is_cpu and starts.dtype is torch.int64 and starts.is_contiguous()):
        return None
    if torch.is_grad_enabled() and x.requires_grad:
        found: Tensor = _pool(x, starts, _KINDS[kind], core, composed)
        return found
    y: Tensor = core.pool(x, starts, _KINDS[kind])
    return y


def group_starts(groups: Tensor, count: int) -> Tensor | None:
    """The first row of each group, and the number of all: (count + 1,); `None` where no kernel can say.

    Args:
        groups: (M,), the group of each row; `None` is returned if they do not rise, or one is not in [0, count).
    """
    core = dispatch.kernels()
    if core is None or not (groups.is_cpu and groups.dtype is torch.int64 and groups.is_contiguous()):
        return None
    starts: Tensor = core.starts(groups, count)
    return starts if starts.shape[0] else None


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, starts: Tensor, kind: int, core: Core, composed: Callable[[Tensor], Tensor]
                ) -> Tensor:
        y: Tensor = core.pool(x, starts, kind)
        ctx.save_for_backward(x, y, starts)
        ctx.kind, ctx.core, ctx.composed = kind, core, composed
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y, starts = ctx.saved_tensors
        if torch.is_grad_enabled() or private.is_wrapped(grad):
            return *pulled_back(ctx.composed, (x,), [True], [grad]), None, None, None, None
        return ctx.core.pool_backward(x, y, starts, grad, ctx.kind), None, None, None, None


_pool = private.bound_apply(_Pool)
