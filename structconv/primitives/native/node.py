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
            reads_result: bool = True, flagged: bool = False, asks: bool = False, along: bool = True,
            read: Mapping[int, tuple[int, ...]] | None = None) -> Callable[..., Tensor]:
    """Return a function (adjacency, composed, *tensors, *options) -> y that is one node where it needs a gradient.

    Kernels are called with sealed layouts, functions of Python with the adjacency:

        forward(by_target, *tensors, *options) -> y or (y, *saved)
        backward(by_target, by_source, *tensors, y, *saved, gradient of y, *options) -> the gradients of the tensors

    Args:
        name: of the node, as autograd shows it.
        count: of the tensors, some of which may be None.
        forward, backward: names of kernels, or two functions, of which the second takes, after the gradient of y,
            which gradients are needed.
        reads_result: whether the backward takes y.
        flagged: whether the last argument of the forward says if a gradient is needed.
        asks: whether the backward kernel takes, after the gradient of y, which gradients are needed.
        along: whether kernels take the layouts.
        read: the numbers of tensors -> those of the tensors whose gradients read them, if not all do; not of a backward
            that takes y, which is computed from all. Others may change between both passes; the backward takes zeros
            in their place.
    """
    assert read is None or not reads_result
    limited = () if read is None else tuple((i, [2 + reader for reader in readers]) for i, readers in read.items())
    named, names_backward = isinstance(forward, str), isinstance(backward, str)
    with_gradient, without = ((True,), (False,)) if flagged else ((), ())  # type: tuple[bool, ...], tuple[bool, ...]

    def ahead(ctx: Any, adjacency: Any, composed: Callable[..., Tensor], *arguments: Any) -> Tensor:
        results = (getattr(Loaded.core, forward)(  # type: ignore[arg-type]
            *((adjacency.by_target,) if along else ()), *arguments, *with_gradient)
                   if named else forward(adjacency, *arguments, *with_gradient))  # type: ignore[operator]
        y, *others = results if type(results) is tuple else (results,)
        tensors, needed, unread = [*arguments[:count]], ctx.needs_input_grad, []
        for i, readers in limited:
            for reader in readers:
                if needed[reader]:
                    break
            else:
                if tensors[i] is not None:
                    unread.append((i, _unread(tensors[i].shape)))
                    tensors[i] = None
        ctx.save_for_backward(*tensors, *others)
        ctx.kept = adjacency, composed, arguments[count:], Result(y) if reads_result else None, unread  # one is faster
        result: Tensor = y
        return result

    def back(ctx: Any, grad: Tensor) -> Gradients:
        adjacency, composed, options, result, unread = ctx.kept
        saved = [*ctx.saved_tensors]
        for i, t in unread:
            saved[i] = t
        if (torch.is_grad_enabled() or private.is_functional(grad) or private.is_batched(grad)
                or private.forward_level() >= 0):
            gradients = pulled_back(composed, saved[:count], ctx.needs_input_grad[2:count + 2], [grad])
        else:
            if reads_result:
                y = result.take()
                if y is None:
                    with torch.no_grad():
                        y = call(adjacency, composed, *saved[:count], *options)
                saved.insert(count, y)
            needed = ctx.needs_input_grad[2:count + 2]
            if names_backward:
                gradients = getattr(Loaded.core, backward)(  # type: ignore[arg-type]
                    *(adjacency.sides() if along else ()), *saved, grad, *(needed if asks else ()), *options)
            else:
                gradients = backward(adjacency, *saved, grad, needed, *options)  # type: ignore[operator]
        grads = (gradients,) if isinstance(gradients, Tensor) else gradients
        return None, None, *grads, *(None,) * len(options)

    node = type(name, (torch.autograd.Function,), {"forward": staticmethod(ahead), "backward": staticmethod(back)})
    apply = private.bound_apply(node)

    def call(adjacency: Any, composed: Callable[..., Tensor], *arguments: Any) -> Tensor:
        if torch.is_grad_enabled() and private.any_requires_grad(*arguments):
            y: Tensor = apply(adjacency, composed, *arguments)
            return y
        results = (getattr(Loaded.core, forward)(  # type: ignore[arg-type]
            *((adjacency.by_target,) if along else ()), *arguments, *without)
                   if named else forward(adjacency, *arguments, *without))  # type: ignore[operator]
        y = results[0] if isinstance(results, tuple) else results
        return y

    return call
