"""All private names of torch that the package uses, each with a public fallback.

If a version of torch lacks a name, its fallback is used: slower or more careful, with equal results. `NAMES` lists
them; the tests remove each in turn.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial, reduce
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from structconv import errors

__all__ = ["CALL", "NAMES", "PLAIN", "PLAIN_CALLS", "above_autograd", "all_plain", "any_autocast",
           "any_requires_grad", "autocast", "backward_task", "below_autograd", "bound", "bound_apply", "called",
           "calls_forward", "conv_forward", "decomposition_table", "defers", "dispatch_modes", "encoder_attention",
           "encoder_linear", "flash_attention", "flash_attention_backward", "follows_transforms", "forward_level",
           "forward_mode", "function_modes", "fused_choice", "global_hooks", "in_a_mode", "is_batched",
           "is_functional", "is_wrapped", "known_version", "linear_pointwise", "meta_table", "outside_modes",
           "outside_trace", "parameter", "profiling", "pytree", "single_level", "softmax_backward", "tracing",
           "transforms_active", "unsafe_view", "version", "watched", "weight_and_bias", "will_run", "without_autocast"]

T = TypeVar("T")


#: Torch's name -> the object that the package uses, and the fallback.
NAMES: dict[str, tuple[Any, Any]] = {}


def _resolved(path: str, fallback: Any = None) -> Any:
    """Return torch's object under this path, or the fallback."""
    try:
        value = reduce(getattr, path.split(".")[1:], torch)
    except AttributeError:
        value = fallback
    NAMES[path] = value, fallback
    return value


def _always(*_: Any) -> bool:
    return True


def _without_storage(t: Tensor) -> bool:
    """Return True for a tensor without memory of its own, such as one that a functional transform wraps."""
    try:
        t.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return True
    return False


def _one_requires_grad(*values: Any) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _some_autocast() -> bool:
    return torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")


#: Return True if a functional transform (`torch.func`) is active.
transforms_active: Callable[[], bool] = _resolved("torch._C._are_functorch_transforms_active", _always)
#: Return True if a gradient is a batch of gradients (`torch.autograd.grad` with `is_grads_batched`).
is_batched: Callable[[Tensor], bool] = _resolved("torch._C._functorch.is_legacy_batchedtensor", _without_storage)
#: Return True if a tensor belongs to a functional transform, or remained from one.
is_functional: Callable[[Tensor], bool] = _resolved("torch._C._functorch.is_functorch_wrapped_tensor", _without_storage)
#: Reshape a tensor that has no other user, without a view, so that the result may be changed in place.
unsafe_view: Callable[[Tensor, list[int]], Tensor] = _resolved(
    "torch.ops.aten._unsafe_view", lambda t, shape: t.reshape(shape).clone())
#: Axes -> how torch's convolutions compute, which derived classes may override; `None` where they have no such method.
conv_forward: dict[int, Any] = {axes: _resolved(f"torch.nn.Conv{axes}d._conv_forward") for axes in (1, 2, 3)}
#: The two blocks of torch's encoder layers; `None` if they are called otherwise.
encoder_attention: Any = _resolved("torch.nn.TransformerEncoderLayer._sa_block")
encoder_linear: Any = _resolved("torch.nn.TransformerEncoderLayer._ff_block")


def is_wrapped(t: Tensor) -> bool:
    """Return True if a tensor wraps others, so that its memory must not be read."""
    return is_functional(t) or is_batched(t)


#: Return the number of active dispatch modes, and of function modes.
dispatch_modes: Callable[[], int] = _resolved("torch._C._len_torch_dispatch_stack", _always)
function_modes: Callable[[], int] = _resolved("torch._C._len_torch_function_stack", _always)
#: Return True if a profiler records operators.
profiling: Callable[[], bool] = _resolved("torch.autograd._profiler_enabled", _always)
any_requires_grad: Callable[..., bool] = _resolved("torch._C._any_requires_grad", _one_requires_grad)
#: A context in which operators skip autograd; `None` if torch has none.
below_autograd: Any = _resolved("torch._C._AutoDispatchBelowAutograd")
#: Excludes a dispatch key, or no longer; `None` if torch does not.
exclude_key: Any = _resolved("torch._C._dispatch_tls_set_dispatch_key_excluded")
#: A context in which an `autograd.Function` is one of the level that is being differentiated; `None` without.
single_level: Any = _resolved("torch._functorch.autograd_function.enable_single_level_autograd_function")
#: Return the state of the tracer, `None` if none is active.
tracing: Callable[[], Any] = _resolved("torch._C._get_tracing_state", lambda: torch.jit.is_tracing() or None)
#: Return the level of forward derivatives; below 0 if there are none.
forward_level: Callable[[], int] = ((lambda: 0) if _resolved("torch.autograd.forward_ad._current_level") is None
                                    else partial(getattr, torch.autograd.forward_ad, "_current_level"))
#: A context that enables or disables them.
forward_mode: Any = _resolved("torch.autograd.forward_ad._set_fwd_grad_enabled")
function_base: Any = _resolved("torch._C._FunctionBase")
#: True if an `autograd.Function` can follow functional transforms level by level; otherwise torch raises its error.
follows_transforms: bool = None not in (below_autograd, single_level, forward_mode, function_base)
#: Return True if hooks are registered for all modules.
global_hooks: Callable[[], bool] = _resolved("torch.nn.modules.module._has_any_global_hook", _always)
#: oneDNN's product x w^T + b; `None` where torch was built without it.
linear_pointwise: Any = (_resolved("torch.ops.mkldnn._linear_pointwise")
                         if torch.backends.mkldnn.is_available() else None)
#: The operator of attention on a CPU; `None` if torch has none.
flash_attention: Any = _resolved("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu")
flash_attention_backward: Any = _resolved("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")
#: The backward of torch's softmax: (gradient, weights, axis, dtype) -> gradient of the scores.
softmax_backward: Any = _resolved("torch.ops.aten._softmax_backward_data")
#: Return the operator that torch chooses for attention.
fused_choice: Any = _resolved("torch._fused_sdp_choice")
any_autocast: Callable[[], bool] = _resolved("torch._C._is_any_autocast_enabled", _some_autocast)
no_dispatch_modes: Any = _resolved("torch.utils._python_dispatch._disable_current_modes")
no_transforms: Any = _resolved("torch._C._DisableFuncTorch")
no_functions: Any = _resolved("torch._C.DisableTorchFunction")
#: The number of the current backward pass, and whether it runs a node of the graph; `None` if torch lacks them.
backward_task: Any = _resolved("torch._C._current_graph_task_id")
will_run: Any = _resolved("torch._C._will_engine_execute_node")
#: Operator -> its form by others, which `torch.onnx.export` reads. A trace with dynamic sizes reads it too, except for
#: operators in the second table; `None` where torch lacks them.
decomposition_table: Any = _resolved("torch._decomp.decomposition_table")
meta_table: Any = _resolved("torch._decomp.meta_table")
#: True if a node can leave work to a later node of the same backward pass.
defers: bool = None not in (backward_task, will_run)


#: The `__call__` of modules, unless a tracer replaced it.
CALL = torch.nn.Module.__call__
#: The values of `__call__` for which a call runs `forward`.
PLAIN: list[Any] = [CALL]


def _all_plain(*modules: torch.nn.Module) -> bool:
    for module in modules:
        attrs = module.__dict__
        if (attrs["_forward_hooks"] or attrs["_forward_pre_hooks"] or attrs["_backward_hooks"]
                or attrs["_backward_pre_hooks"] or "forward" in attrs or "_compiled_call_impl" in attrs
                or type(module).__call__ not in PLAIN):
            return False
    return torch.nn.Module.__call__ is CALL and not global_hooks()


class PlainCalls:
    """True, for these modules, as long as a call of each is its `forward`: `all_plain` for many calls."""

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self._attributes = [module.__dict__ for module in modules]
        self._hooks = [attrs[name] for attrs in self._attributes for name in _HOOKS if name in attrs]
        self._kinds = {type(module) for module in modules}

    def __bool__(self) -> bool:
        if not PLAIN_CALLS or any(self._hooks) or global_hooks() or torch.nn.Module.__call__ is not CALL:
            return False
        for attrs in self._attributes:
            if "forward" in attrs or "_compiled_call_impl" in attrs:
                return False
        return all(kind.__call__ in PLAIN for kind in self._kinds)


_HOOKS = {"_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"}
PLAIN_CALLS = torch.nn.Module().__dict__.keys() >= _HOOKS


#: Return True if a call of each module is its `forward`, without hooks.
all_plain: Callable[..., bool] = _all_plain if PLAIN_CALLS else lambda *_: False


class _Parameter:
    """Finds the parameter that a module has registered under a name. Whatever takes its place elsewhere (the tensor of
    a pruned or parametrized module, a buffer, a property of a derived class) comes before, or is found as in any
    module."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, module: torch.nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        parameters = module.__dict__.get("_parameters", ())
        if self.name in parameters:
            return parameters[self.name]
        raise AttributeError(self.name)


def parameter() -> Any:
    """Declares a parameter in the body of a class: `weight: nn.Parameter = parameter()`."""
    return _Parameter()


def weight_and_bias(layer: Any) -> tuple[Any, Any]:
    """The weight and bias of a layer: its parameters in fewer steps than by attributes, or what took their place."""
    own = layer._parameters
    if "weight" in own and "bias" in own:
        return own["weight"], own["bias"]
    return layer.weight, layer.bias


def calls_forward(call: Any) -> Any:
    """Register a `__call__` of a class that does what torch's does, and converts its result."""
    PLAIN.append(call)
    return call


def called(module: torch.nn.Module, *args: Any, **options: Any) -> Any:
    """Return `module(*args, **options)`, calling `forward` directly if the module has no hooks."""
    attrs = module.__dict__
    if (PLAIN_CALLS and not (attrs["_forward_hooks"] or attrs["_forward_pre_hooks"] or attrs["_backward_hooks"]
                              or attrs["_backward_pre_hooks"] or "forward" in attrs or "_compiled_call_impl" in attrs)
            and type(module).__call__ in PLAIN and torch.nn.Module.__call__ is CALL and not global_hooks()):
        return module.forward(*args, **options)
    return module(*args, **options)


def bound_apply(function: Any) -> Callable[..., Any]:
    """Return `function.apply` without its search for functional transforms, 27 of 47 us of a small call. Use it outside
    of transforms, and not with tensors that remain from one."""
    return function.apply if function_base is None else super(torch.autograd.Function, function).apply


def bound(operator: Any) -> Any:
    """Return the C++ operator, without the Python code that torch.ops runs at each call."""
    return getattr(operator, "_op", operator)


def version(t: Tensor) -> int | None:
    """Return the number of changes in place of a tensor; `None` if torch does not count them, as for inference tensors.
    """
    return None if t.is_inference() else getattr(t, "_version", None)


#: `version` for a tensor that is known to have one, by a C function.
known_version: Callable[[Tensor], int] = attrgetter("_version")


def watched(profilers: bool = True) -> bool:
    """Return True if a mode, transform or (with `profilers`) profiler must observe each operator."""
    return bool(dispatch_modes() or function_modes() or transforms_active() or forward_level() >= 0
                or tracing() is not None or (profilers and profiling()))


def autocast() -> tuple[torch.dtype, ...]:
    """Return autocast's dtype on each kind of device; empty if autocast is off."""
    if not any_autocast():
        return ()
    return tuple(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else torch.float32
                 for kind in ("cpu", "cuda"))


def without_autocast(kind: str) -> Any:
    """A context without autocast on this kind of device; some kinds have no autocast."""
    if torch.amp.is_autocast_available(kind):
        return torch.autocast(kind, enabled=False)
    return nullcontext()


def above_autograd(build: Callable[[], T]) -> T:
    """`build()` within a kernel, with its operators recorded even where autograd has skipped the kernel itself."""
    if exclude_key is None:
        return _in_a_thread(build)
    key = torch._C.DispatchKey.AutogradFunctionality
    excluded = torch._C._dispatch_tls_is_dispatch_key_excluded(key)
    exclude_key(key, False)
    try:
        return build()
    finally:
        exclude_key(key, excluded)


def in_a_mode() -> bool:
    """Return True if results now would be another kind of tensor than outside of the current mode."""
    return (torch.is_inference_mode_enabled() or transforms_active() or bool(dispatch_modes())
            or bool(function_modes()) or any_autocast())


def outside_modes(build: Callable[[], T]) -> T:
    """`build()` without gradients, as if no inference mode, transform, fake tensors, autocast or default device were.
    All of these belong to a thread, so that another one is free of them: that is the public way."""
    if not in_a_mode():
        with torch.no_grad():
            return build()
    if no_dispatch_modes is None or no_transforms is None or no_functions is None:
        return _in_a_thread(build)
    with (torch.inference_mode(False), torch.no_grad(), no_dispatch_modes(), no_transforms(), no_functions(),
          torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False)):
        return build()


def outside_trace(build: Callable[[], T]) -> T:
    """`build()` with gradients, unseen by `torch.jit.trace`, which follows its own thread alone."""
    return _in_a_thread(build, grad=True)


def _in_a_thread(build: Callable[[], T], grad: bool = False) -> T:
    results: list[T] = []
    raised: list[BaseException] = []

    def work() -> None:
        try:
            with torch.set_grad_enabled(grad):
                results.append(build())
        except BaseException as error:  # handed on below
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return results[0]


errors.IS_COMPILING = torch.compiler.is_compiling
#: The attribute that `torch.compiler.assume_constant_result` sets, without importing the compiler. A compiler that does
#: not know it reports the exception in its own words.
setattr(errors._raise_now, "_dynamo_marked_constant", True)  # noqa: B010 - a function has no such attribute
