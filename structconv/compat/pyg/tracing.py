"""`torch.jit.trace` of our layers: the trace records the operators of the exported layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.export.graph_signature import InputKind

from structconv import torch_compat as private
from structconv.errors import ConfigError, StructconvError

__all__ = ["is_tracing", "record", "traceable"]


def is_tracing() -> bool:
    """Return True within `torch.jit.trace`."""
    return not is_compiling() and private.tracing() is not None


def traceable(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `torch.jit.trace` record a function of tensors, or the `forward` of a module."""
    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        return record(function, args, options) if is_tracing() else function(*args, **options)

    return called


def record(function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call a function, or the `forward` of a module, within a trace."""
    signature = inspect.signature(function)
    arguments = signature.bind(*args, **options).args
    if next(iter(signature.parameters)) == "self":
        return _record(arguments[0], arguments[1:])
    return _record(_Call(function), arguments)


class _Call(nn.Module):
    """A function as a module, which is what can be exported."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        return self.function(*args)


def _record(module: nn.Module, args: tuple[Any, ...]) -> Any:
    """Call a module by its exported operators, whose sizes are numbers: a trace has tensors for them."""
    owner = module.function.__name__ if isinstance(module, _Call) else type(module).__name__
    leaves, spec = private.pytree.tree_flatten(args)

    def export() -> Any:
        plain = [int(leaf) if _is_size(leaf) else leaf.detach() if isinstance(leaf, Tensor) else leaf
                 for leaf in leaves]
        return torch.export.export(module, private.pytree.tree_unflatten(plain, spec))

    try:
        program = private.outside_trace(export)
    except StructconvError:
        raise
    except Exception as error:
        raise ConfigError(owner, "the call must be one that torch.export takes", "torch.jit.trace",
                          "Use torch.compile, or call the layer untraced.") from error
    values = iter([_of_size(leaf, list(leaf.shape), owner) if isinstance(leaf, Tensor) and leaf.dim() else leaf
                  for leaf in leaves])
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers()),
            **program.constants}
    inputs = [next(values) if one.kind is InputKind.USER_INPUT else tensors[one.target]
              for one in program.graph_signature.input_specs]
    return private.pytree.tree_unflatten(program.graph_module(*inputs), program.call_spec.out_spec)


def _is_size(leaf: Any) -> bool:
    """Return True for a number that is a tensor only while `torch.jit.trace` records."""
    return isinstance(leaf, Tensor) and not leaf.dim() and leaf.dtype is torch.int64


@torch.jit.script_if_tracing
def _of_size(x: Tensor, size: list[int], owner: str) -> Tensor:
    assert x.shape == size, (f"{owner}: a tensor must have the shape of the trace, {size}; got {x.shape}. "
                             "Trace again, or use torch.export with dynamic_shapes.")
    return x
