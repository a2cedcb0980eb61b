"""A function of tensors as one node of autograd, whose forward and backward pass are kernels: `as_node`.

It is called with an `Adjacency` or what is in its place, with `composed`, the same function of the tensors by
differentiable operators, for derivatives of the gradients, and with tensors that `is_direct` accepts, then options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from structconv import torch_compat as private
from structconv.primitives.functions import Result, pulled_back
from structconv.primitives.native.dispatch import MAX_CHANNELS, Loaded
from structconv.primitives.native.indices import LIMIT

__all__ = ["PLAIN", "Gradients", "as_node", "is_direct"]

PLAIN = frozenset((Tensor, torch.nn.Parameter))
Gradients = tuple[Tensor | None, ...]


@lru_cache(128)
def _unread(shape: torch.Size) -> Tensor:
    """Zeros in the place of numbers that no gradient reads; without memory, but for those of a bias."""
    few = shape.numel() <= MAX_CHANNELS
    return torch.zeros(shape if few else (), dtype=torch.float32).expand(shape)


def is_direct(x: Tensor, *others: Tensor | None) -> bool:
    """Return True if a kernel may read x (M, ..., C), and only autograd records or transforms the layer."""
    if (is_dynamo_compiling() or private.transforms_active() or private.dispatch_modes() or private.function_modes()
            or private.forward_level() >= 0 or private.tracing() is not None):  # no exported program has such tensors
        return False
    try:
        for t in (x, *others):  # an item of a shape takes less time than `size`
            if t is not None and (type(t) not in PLAIN or t.dtype is not torch.float32 or not t.is_cpu
                                  or t.shape[-1] > MAX_CHANNELS):
                return False
    except IndexError:  # a scalar
        return False
    return 0 < x.numel() < LIMIT and not private.is_batched(x)


def as_node(name: str, count: int, forward: str | Callable[..., Any], backward: str | Callable[..., Any], *,
            readers: Mapping[int, tuple[int, ...]] | None = None, takes_layouts: bool = True,
            takes_training: bool = False, takes_needed: int = 0) -> Callable[..., Tensor]:
    """Return a function (adjacency, composed, *tensors, *options) -> y that is one node where it needs a gradient.

    Kernels are called with sealed layouts, functions of Python with the adjacency:

        forward(by_target, *tensors, *options) -> y or (y, *saved)
        backward(by_target, by_source, *tensors, y, *saved, gradient of y, *options) -> the gradients of the tensors

    Args:
        name: of the node, as autograd shows it.
        count: of the tensors, some of which may be None.
        forward, backward: names of kernels, or two functions, of which the second takes, after the gradient of y,
            which gradients are needed.
        readers: None if the backward takes y. Else the number of a tensor -> those of the tensors whose gradients read
            it, if not all do. A tensor that no needed gradient reads may change between both passes; the backward takes
            zeros in its place.
        takes_layouts: whether kernels take the layouts.
        takes_training: whether the last argument of the forward says if a gradient is needed.
        takes_needed: of how many tensors, the first ones, the backward kernel takes, after the gradient of y, whether
            their gradients are needed.
    """
    takes_result = readers is None
    limited = tuple((i, [2 + reader for reader in by]) for i, by in (readers or {}).items())
    named, names_backward = isinstance(forward, str), isinstance(backward, str)
    training, inference = ((True,), (False,)) if takes_training else ((), ())  # type: tuple[bool, ...], tuple[bool, ...]

    def run(ctx: Any, adjacency: Any, composed: Callable[..., Tensor], *arguments: Any) -> Tensor:
        results = (getattr(Loaded.core, forward)(  # type: ignore[arg-type]
            *((adjacency.by_target,) if takes_layouts else ()), *arguments, *training)
                   if named else forward(adjacency, *arguments, *training))  # type: ignore[operator]
        y, *others = results if type(results) is tuple else (results,)
        tensors, needed, unread = [*arguments[:count]], ctx.needs_input_grad, []
        for i, by in limited:
            for reader in by:
                if needed[reader]:
                    break
            else:
                if tensors[i] is not None:
                    unread.append((i, _unread(tensors[i].shape)))
                    tensors[i] = None
        ctx.save_for_backward(*tensors, *others)
        ctx.kept = adjacency, composed, arguments[count:], Result(y) if takes_result else None, unread  # one is faster
        result: Tensor = y
        return result

    def differentiate(ctx: Any, grad: Tensor) -> Gradients:
        adjacency, composed, options, result, unread = ctx.kept
        saved = [*ctx.saved_tensors]
        for i, t in unread:
            saved[i] = t
        if (torch.is_grad_enabled() or private.is_functional(grad) or private.is_batched(grad)
                or private.forward_level() >= 0):
            gradients = pulled_back(composed, saved[:count], ctx.needs_input_grad[2:count + 2], [grad])
        else:
            if takes_result:
                y = result.take()
                if y is None:
                    with torch.no_grad():
                        y = call(adjacency, composed, *saved[:count], *options)
                saved.insert(count, y)
            needed = ctx.needs_input_grad[2:count + 2]
            if names_backward:
                gradients = getattr(Loaded.core, backward)(  # type: ignore[arg-type]
                    *(adjacency.sides() if takes_layouts else ()), *saved, grad, *needed[:takes_needed], *options)
            else:
                gradients = backward(adjacency, *saved, grad, needed, *options)  # type: ignore[operator]
        grads = (gradients,) if isinstance(gradients, Tensor) else gradients
        return None, None, *grads, *(None,) * len(options)

    members = {"forward": staticmethod(run), "backward": staticmethod(differentiate)}
    apply = private.bound_apply(type(name, (torch.autograd.Function,), members))

    def call(adjacency: Any, composed: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if torch.is_grad_enabled() and private.any_requires_grad(*arguments):
            y: Tensor = apply(adjacency, composed, *arguments)
            return y
        results = (getattr(Loaded.core, forward)(  # type: ignore[arg-type]
            *((adjacency.by_target,) if takes_layouts else ()), *arguments, *inference)
                   if named else forward(adjacency, *arguments, *inference))  # type: ignore[operator]
        y = results[0] if isinstance(results, tuple) else results
        return y

    return call
