"""Every private name of torch that the package uses, each with a public way to do without it.

A name that a version of torch lacks is replaced by its fallback when this module is imported: slower or more careful,
never another number. `NAMES` lists them; the tests take each away in turn.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["NAMES", "any_requires_grad", "below_autograd", "dispatch_modes", "function_modes", "global_hooks",
           "hooked", "in_a_mode", "inplace_requires_grad", "is_wrapped", "linear_pointwise", "outside_modes",
           "profiling", "single_level", "transforms_active", "version"]

T = TypeVar("T")


def _found(path: str, fallback: T) -> T:
    """What torch has under this path, or the fallback."""
    try:
        return reduce(getattr, path.split(".")[1:], torch)  # type: ignore[return-value]
    except AttributeError:
        return fallback


def _always(*_: Any) -> bool:
    return True


def _without_storage(t: Tensor) -> bool:
    """What a functional transform wraps has no memory of its own."""
    try:
        t.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return True
    return False


def _one_requires_grad(*values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


@contextlib.contextmanager
def _nothing(*_: Any) -> Any:
    yield


#: Our name -> torch's, and what does without it.
NAMES: dict[str, tuple[str, Any]] = {
    "transforms_active": ("torch._C._are_functorch_transforms_active", _always),
    "is_wrapped": ("torch._C._functorch.is_functorch_wrapped_tensor", _without_storage),
    "dispatch_modes": ("torch._C._len_torch_dispatch_stack", _always),
    "function_modes": ("torch._C._len_torch_function_stack", _always),
    "profiling": ("torch.autograd._profiler_enabled", _always),
    "any_requires_grad": ("torch._C._any_requires_grad", _one_requires_grad),
    "below_autograd": ("torch._C._AutoDispatchBelowAutograd", None),
    "single_level": ("torch._functorch.autograd_function.enable_single_level_autograd_function", None),
    "inplace_requires_grad": ("torch._functorch.eager_transforms.enable_inplace_requires_grad", _nothing),
    "global_hooks": ("torch.nn.modules.module._has_any_global_hook", _always),
    "linear_pointwise": ("torch.ops.mkldnn._linear_pointwise", None),
    "no_dispatch_modes": ("torch.utils._python_dispatch._disable_current_modes", None),
    "no_transforms": ("torch._C._DisableFuncTorch", None),
    "no_functions": ("torch._C.DisableTorchFunction", None),
}

#: Whether a functional transform (`torch.func`) is at work.
transforms_active: Callable[[], bool] = _found(*NAMES["transforms_active"])
#: Whether a tensor is a transform's stand-in, or what is left of one: its memory is not to be read.
is_wrapped: Callable[[Tensor], bool] = _found(*NAMES["is_wrapped"])
#: How many modes see every operator, and every function.
dispatch_modes: Callable[[], int] = _found(*NAMES["dispatch_modes"])
function_modes: Callable[[], int] = _found(*NAMES["function_modes"])
#: Whether operators are being recorded.
profiling: Callable[[], bool] = _found(*NAMES["profiling"])
any_requires_grad: Callable[..., bool] = _found(*NAMES["any_requires_grad"])
#: A context in which operators skip autograd; `None` where there is none.
below_autograd: Any = _found(*NAMES["below_autograd"])
#: A context in which an `autograd.Function` is one of the level that is being differentiated; `None` without.
single_level: Any = _found(*NAMES["single_level"])
#: A context in which a transform lets a tensor be made a variable.
inplace_requires_grad: Any = _found(*NAMES["inplace_requires_grad"])
#: Whether hooks are registered for all modules.
global_hooks: Callable[[], bool] = _found(*NAMES["global_hooks"])
#: oneDNN's product x w^T + b; `None` where torch was built without it.
linear_pointwise: Any = _found(*NAMES["linear_pointwise"]) if torch.backends.mkldnn.is_available() else None
no_dispatch_modes: Any = _found(*NAMES["no_dispatch_modes"])
no_transforms: Any = _found(*NAMES["no_transforms"])
no_functions: Any = _found(*NAMES["no_functions"])

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def hooked(module: torch.nn.Module) -> bool:
    """Whether somebody is to be told of calls of this module."""
    held = module.__dict__
    return any(held.get(name, True) for name in _HOOKS) or global_hooks()


def version(t: Tensor) -> int | None:
    """How often a tensor was changed in place, 0 where torch does not count (inference); `None` where it never does."""
    return 0 if t.is_inference() else getattr(t, "_version", None)


def in_a_mode() -> bool:
    """Whether what is computed now would be another kind of tensor than outside of its caller."""
    return (torch.is_inference_mode_enabled() or transforms_active() or bool(dispatch_modes())
            or bool(function_modes()) or torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))


def outside_modes(build: Callable[[], T]) -> T:
    """`build()` without gradients, as if no inference mode, transform, fake tensors, autocast or default device were.

    All of these belong to a thread, so that another one is free of them: that is the public way.
    """
    if not in_a_mode():
        with torch.no_grad():
            return build()
    if no_dispatch_modes is None or no_transforms is None or no_functions is None:
        return _in_a_thread(build)
    with (torch.inference_mode(False), torch.no_grad(), no_dispatch_modes(), no_transforms(), no_functions(),
          torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)):
        return build()


def _in_a_thread(build: Callable[[], T]) -> T:
    found: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with torch.no_grad():
                found.append(build())
        except BaseException as error:  # handed on below
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]
