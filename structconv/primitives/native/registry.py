"""What the native operators share: how one is registered, checked, and differentiated twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import Parameter

from structconv.errors import ConfigError

_LIBRARY = torch.library.Library("structconv", "FRAGMENT")
_OWN = frozenset((Tensor, Parameter, int, float, bool, type(None)))
_KERNELS: dict[str, Callable[..., Any]] = {}
_EDGES = ", ".join(f"Tensor {name}{end}" for end in ("", "_T") for name in ("indptr", "indices", "order"))


def register(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], *,
             edges: bool = True) -> None:
    """Define structconv::name(edges, schema with one body for every device, and what it returns for fake tensors.

    Without `edges` the operator takes what the schema says and no layouts.
    """
    _define(f"{name}({_EDGES}, {schema}" if edges else f"{name}({schema}", name, kernel, fake)


def define(name: str, arguments: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """The same for an operator without edges, which returns one tensor."""
    _define(f"{name}({arguments}) -> Tensor", name, kernel, fake)


def _define(schema: str, name: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"structconv::{name}", fake, lib=_LIBRARY)
    _KERNELS[name] = kernel


def register_gradient(name: str, backward: Callable[..., Any], save: Callable[..., None],
                      kernel: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Define the gradient of structconv::name by an `autograd.Function` of its own.

    `torch.library.register_autograd` does the same with several times the overhead, which counts on small graphs: it
    completes the arguments from the schema at every call.

    Args:
        kernel: what computes the operator, where it was registered by other means than `register`; without one
            what is returned goes through the dispatcher.

    Returns:
        The operator without the dispatcher, which takes longer than a kernel on few entries: the kernel, or the
        `autograd.Function`, where the inputs are tensors of torch's own and nothing is to see or to transform the
        operator (a tracer, a mode, a functional transform, a profiler), and else the operator.
    """
    operator, compute = getattr(torch.ops.structconv, name).default, kernel or _KERNELS.get(name)

    def forward(ctx: Any, *inputs: Any) -> Any:
        if compute is None or _unseen(inputs) is None:
            with torch._C._AutoDispatchBelowAutograd():
                output = operator(*inputs)
        else:
            output = compute(*inputs)
        save(ctx, inputs, output)
        return output

    function: Any = type(name, (torch.autograd.Function,),
                         {"forward": staticmethod(forward), "backward": staticmethod(backward)})

    def differentiable(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in inputs):
            return function.apply(*inputs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*inputs)

    def call(*inputs: Any) -> Any:
        wanted = _unseen(inputs)
        if compute is None or wanted is None:
            return operator(*inputs)
        return function.apply(*inputs) if wanted else compute(*inputs)

    _LIBRARY.impl(name, differentiable, "Autograd")
    return call


def _unseen(inputs: Sequence[Any]) -> bool | None:
    """Whether a gradient is wanted; `None` where the operator is to be seen or transformed."""
    if (is_compiling() or torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()
            or torch._C._functorch.peek_interpreter_stack() is not None or torch._C._get_tracing_state() is not None
            or torch.autograd._profiler_enabled()):
        return None
    if not _OWN.issuperset(map(type, inputs)) and not all(_own(value) for value in inputs):
        return None
    return torch.is_grad_enabled() and any(isinstance(value, Tensor) and value.requires_grad for value in inputs)


def _own(value: Any) -> bool:
    return type(value) in _OWN or not isinstance(value, Tensor)


def check_dropout(owner: str, dropout: float, seed: Tensor | None) -> None:
    """Raise `ConfigError` unless 0 <= dropout < 1, with a seed where it is not zero."""
    if not 0 <= dropout < 1:
        raise ConfigError(owner, "dropout must be in [0, 1)", dropout)
    if dropout > 0 and seed is None:
        raise ConfigError(owner, "dropout needs a seed", None, "Pass an integer scalar tensor.")


def twice_differentiable(fn: Callable[..., Tensor], tensors: Sequence[Tensor | None], needed: Sequence[bool],
                         grad: Tensor) -> list[Tensor | None]:
    """The gradients of fn, computed anew with a graph of their own, so that they can be differentiated again."""
    leaves = [None if t is None else t.view_as(t) for t in tensors]
    wanted = [leaf for leaf, need in zip(leaves, needed, strict=True) if need and leaf is not None]
    found = iter(torch.autograd.grad(fn(*leaves), wanted, grad, create_graph=True, allow_unused=True))
    return [next(found) if need else None for need in needed]
