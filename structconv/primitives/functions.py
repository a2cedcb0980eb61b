"""Helpers for hand-written derivatives, so that transforms, second derivatives and compilers work."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.derived import values_known

__all__ = ["Result", "apply", "finite", "pulled_back", "sum_dtype", "transformed"]


class Result:
    """The result of a node for its backward pass, which frees it: computed again after a change in place, such as
    `relu_`, and in a second backward pass.
    """

    __slots__ = ("version", "y")

    def __init__(self, y: Tensor) -> None:
        self.y: Tensor | None = y.detach()
        self.version = y._version

    def take(self) -> Tensor | None:
        """Return the result and release it; `None` if it is to be computed again."""
        y, self.y = self.y, None
        return y if y is not None and y._version == self.version else None


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which numbers of a floating dtype are added up: float32 at least."""
    return torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype


def finite(t: Tensor) -> bool:
    """Return True if all numbers are finite: their sum shows it in one pass, unless it overflows.

    Compiled programs and functional transforms read no values; there the layer clears masked entries.
    """
    if not values_known(t):
        return True
    return math.isfinite(float(t.detach().sum())) or bool(t.isfinite().all())


def apply(function: Any, *inputs: Any) -> Any:
    """`function.apply(*inputs)`, for inputs that are not `transformed`."""
    return function.apply(*inputs) if is_compiling() else private.bound_apply(function)(*inputs)


def transformed(*tensors: Tensor | None) -> bool:
    """Return True if a functional transform or a forward derivative is active, or left one of these tensors.

    Then their memory must not be read, and hand-written derivatives are replaced by operators, which compilers trace
    too.
    """
    return not is_compiling() and _watched(*tensors)


def _watched(*tensors: Tensor | None) -> bool:
    return private.transforms_active() or private.forward_level() >= 0 or any(
        t is not None and private.is_wrapped(t) for t in tensors)


def pulled_back(fn: Callable[..., Any], tensors: Sequence[Tensor | None], needed: Sequence[bool],
                grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of fn(*tensors) = one result or several, in those tensors that are `needed`; None for the others.

    Args:
        fn: made of differentiable operators.
        grads: of the results, None for zero.

    The gradients can themselves be differentiated, forward and backward, and transformed, where that is under way.
    """
    at = [i for i, (t, need) in enumerate(zip(tensors, needed, strict=True)) if t is not None and need]
    result: list[Tensor | None] = [None] * len(tensors)
    if not at or all(g is None for g in grads):
        return result
    inputs = [tensors[i] for i in at]

    def of(*chosen: Tensor) -> tuple[Tensor, ...]:
        inputs = list(tensors)
        for i, t in zip(at, chosen, strict=True):
            inputs[i] = t
        results = fn(*inputs)
        return (results,) if isinstance(results, Tensor) else tuple(results)

    for i, grad in zip(at, _way(*tensors, *grads)(of, inputs, grads), strict=True):
        result[i] = grad
    return result


def _way(*tensors: Tensor | None) -> Callable[..., Sequence[Tensor | None]]:
    if not private.follows_transforms:
        return _pull_recorded if torch.is_grad_enabled() else _pull
    return _pull_again if torch.is_grad_enabled() or _watched(*tensors) else _pull


def _pull(of: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Any],
          grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    with torch.enable_grad():
        return _gradients(of(*leaves), leaves, grads, recorded=False)


def _pull_recorded(of: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Any],
                   grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    aliases = [t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in inputs]
    return _gradients(of(*aliases), aliases, grads, recorded=True)


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor], grads: Sequence[Tensor | None], *,
               recorded: bool) -> Sequence[Tensor | None]:
    pairs = [(y, g) for y, g in zip(results, grads, strict=True) if g is not None and y.requires_grad]
    if not pairs:
        return [None] * len(leaves)
    return torch.autograd.grad([y for y, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True,
                               create_graph=recorded)


def _pull_again(of: Callable[..., tuple[Tensor, ...]], inputs: Sequence[Any],
                grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    used = [i for i, g in enumerate(grads) if g is not None]

    def chosen(*leaves: Tensor) -> tuple[Tensor, ...]:
        results = of(*leaves)
        return tuple(results[i] for i in used)

    pull: Callable[..., Any] = torch.func.vjp(chosen, *inputs)[1]
    return pull(tuple(grads[i] for i in used))
