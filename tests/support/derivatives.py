"""What a test of a node of autograd compares: the nodes of a result, and its derivatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["autograd_nodes", "derivatives"]


def autograd_nodes(fn: Any) -> set[str]:
    """The names of all nodes that a gradient goes through."""
    return {fn.name()}.union(*(autograd_nodes(after) for after, _ in fn.next_functions if after is not None))


def derivatives(y: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """y, then the gradients of its squares by the kernels, those that can be differentiated again, and theirs."""
    first = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    return y, *first, *again, *torch.autograd.grad(torch.stack([g.square().sum() for g in again]).sum(), leaves)
