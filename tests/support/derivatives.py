"""What tests compare: values with their gradients, the nodes of autograd of a result, and its derivatives."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def autograd_nodes(fn: Any) -> set[str]:
    """The names of all nodes that a gradient goes through."""
    return {fn.name()}.union(*(autograd_nodes(after) for after, _ in fn.next_functions if after is not None))


def same(actual: Tensor, expected: Tensor, leaves: Sequence[Tensor], rtol: float | None = None,
         atol: float | None = None) -> None:
    """Equal values, and equal gradients of a random linear function of them; what is not reached has zeros."""
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)
    cotangent = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(y, leaves, cotangent, retain_graph=True, materialize_grads=True)
                                 for y in (actual, expected)), rtol=rtol, atol=atol)


def derivatives(y: Tensor, leaves: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """y, then the gradients of its squares by the kernels, those that can be differentiated again, and theirs."""
    first = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    again = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
    return y, *first, *again, *torch.autograd.grad(torch.stack([g.square().sum() for g in again]).sum(), leaves)
