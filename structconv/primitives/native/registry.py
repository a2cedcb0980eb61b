"""How an operator of the library is registered, called without the dispatcher where that can be, and differentiated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.compiler import is_compiling
from torch.nn import Parameter

from structconv.errors import ConfigError

#: The schema of the two layouts, with which an operator along edges begins.
EDGES = ", ".join(f"Tensor {name}{end}" for end in ("", "_T") for name in ("indptr", "indices", "order"))

_LIBRARY = torch.library.Library("structconv", "FRAGMENT")
_OWN = frozenset((Tensor, Parameter, int, float, bool, str, type(None)))
_KERNELS: dict[str, Callable[..., Any]] = {}


class _Seen:
    """Whether a functional transform ever met an operator: from then on tensors may be what is left of one."""

    transforms = False


def define(name: str, arguments: str, kernel: Callable[..., Any], fake: Callable[..., Any],
           results: str = "Tensor") -> None:
    """Define structconv::name(arguments) -> results with one body for every device, and the shapes of its results."""
    _LIBRARY.define(f"{name}({arguments}) -> {results}")
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"structconv::{name}", fake, lib=_LIBRARY)
    _KERNELS[name] = kernel


def register_gradient(name: str, backward: Callable[..., Any], save: Callable[..., None]) -> Callable[..., Any]:
    """Give an operator of `define` its gradient, by an `autograd.Function` of its own.

    `torch.library.register_autograd` does the same with several times the overhead, which counts on small graphs: it
    completes the arguments from the schema at every call. Nor do its gradients pass through `torch.func.grad` and
    `vjp`, as these do.

    Args:
        backward: (ctx, gradients of the results) -> those of the arguments, by differentiable operators.
        save: (ctx, arguments, results), what the backward needs.

    Returns:
        The operator without the dispatcher, which takes longer than a kernel on few entries: the kernel, or the
        `autograd.Function`, where the inputs are tensors of torch's own and nothing is to see or to transform the
        operator (a tracer, a mode, a functional transform, a profiler), and else the operator.
    """
    operator, compute = getattr(torch.ops.structconv, name).default, _KERNELS[name]

    def forward(ctx: Any, *inputs: Any) -> Any:
        if _unseen(inputs) is None:
            with torch._C._AutoDispatchBelowAutograd():
                output = operator(*inputs)
        else:
            output = compute(*inputs)
        save(ctx, inputs, output)
        return output

    def forward_of_level(ctx: Any, *inputs: Any) -> Any:
        # autograd.Function turns the graph off, which the levels below this one still have to draw
        with torch.enable_grad(), torch._C._AutoDispatchBelowAutograd():
            output = operator(*inputs)
        save(ctx, inputs, output)
        return output

    function, of_level = (_function(name, f, backward) for f in (forward, forward_of_level))

    def differentiable(*inputs: Any) -> Any:
        if not (torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)):
            with torch._C._AutoDispatchBelowAutograd():
                return operator(*inputs)
        if not torch._C._are_functorch_transforms_active():
            return function.apply(*inputs)
        _Seen.transforms = True
        with enable_single_level_autograd_function():
            return super(torch.autograd.Function, of_level).apply(*inputs)

    def call(*inputs: Any) -> Any:
        wanted = _unseen(inputs)
        if wanted is None:
            return operator(*inputs)
        return function.apply(*inputs) if wanted else compute(*inputs)

    _LIBRARY.impl(name, differentiable, "Autograd")
    return call


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Any:
    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), members)


def _unseen(inputs: Sequence[Any]) -> bool | None:
    """Whether a gradient is wanted; `None` where the operator is to be seen or transformed."""
    if (is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
            or torch._C._are_functorch_transforms_active() or torch._C._get_tracing_state() is not None
            or torch.autograd._profiler_enabled()):
        return None
    if not _OWN.issuperset(map(type, inputs)) and not all(_own(value) for value in inputs):
        return None
    if _Seen.transforms and any(isinstance(value, Tensor) and is_functorch_wrapped_tensor(value) for value in inputs):
        return None
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*inputs)


def _own(value: Any) -> bool:
    return type(value) in _OWN or not isinstance(value, Tensor)


def trains(*tensors: Tensor | None) -> bool:
    """Whether the gradient of something along these may be asked for, by autograd or by a functional transform."""
    return torch.is_grad_enabled() and (any(t is not None and t.requires_grad for t in tensors)
                                        or torch._C._are_functorch_transforms_active())


def check_dropout(owner: str, dropout: float, seed: Tensor | None) -> None:
    """Raise `ConfigError` unless 0 <= dropout < 1, with a seed where it is not zero."""
    if not 0 <= dropout < 1:
        raise ConfigError(owner, "dropout must be in [0, 1)", dropout)
    if dropout > 0 and seed is None:
        raise ConfigError(owner, "dropout needs a seed", None, "Pass an integer scalar tensor.")
