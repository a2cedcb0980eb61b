"""A second device without hardware: tensors that report the device `spare` and are computed on the CPU.

As on a graphics card, operators refuse tensors of two devices, `numpy` and `data_ptr` refuse tensors that are not on
the CPU, and a generator of the CPU draws nothing there. `torch` has one place for such a device in a process, for good:
a module that calls `report` runs in a process of its own, by `faults_of`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

DEVICE = "spare:0"
aten = torch.ops.aten
#: Operators that take tensors of two devices.
_ACROSS = {aten._to_copy.default, aten.copy_.default, aten.index.Tensor, aten.index_put.default,
           aten.index_put_.default, aten._index_put_impl_.default}
#: Operators that make tensors from none: torch asks the device itself for them, not the class of a tensor.
_FACTORIES = ("empty.memory_format", "empty_strided", "_to_copy", "arange", "arange.start_step", "full", "zeros",
              "ones", "scalar_tensor", "randn", "rand", "randint", "randperm", "eye")
_LIBRARIES: list[torch.library.Library] = []


class _Backend(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _There(Tensor):
    """A tensor of the second device, with its numbers on the CPU."""

    numbers: Tensor

    @staticmethod
    def __new__(cls, numbers: Tensor) -> _There:
        strided = numbers.layout == torch.strided
        there: _There = Tensor._make_wrapper_subclass(
            cls, numbers.shape, strides=numbers.stride() if strided else None,
            storage_offset=numbers.storage_offset() if strided else 0, dtype=numbers.dtype, layout=numbers.layout,
            device=torch.device(DEVICE), requires_grad=numbers.requires_grad)
        there.numbers = numbers
        return there

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"{self.numbers}, device={DEVICE}"

    def numpy(self, **options: Any) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first.")

    def __array__(self, *args: Any) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        raise RuntimeError(f"the memory of {DEVICE} cannot be read here")

    def tolist(self) -> Any:
        return self.numbers.tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, *args, **(kwargs or {}))


def faults_of(module: str, *words: str) -> tuple[list[str], int]:
    """What `report` prints in a process that runs a module: what failed, and the number of checks."""
    done = subprocess.run([sys.executable, "-m", module, *words], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *faults, count = done.stdout.splitlines()
    return faults, int(count)


def report(checks: Mapping[str, Callable[[], None]]) -> NoReturn:
    """Do each check where the device `spare` is known; print a line for each that fails, then their number, and end the
    process, without the interpreter's shutdown: autograd has a thread for the device, whose kernels are in Python, and
    Python aborts the process at times when such a thread asks for the interpreter while it shuts down.
    """
    _register()
    for name, check in checks.items():
        try:
            check()
        except Exception as error:
            places = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            print(f"{name}: {type(error).__name__}: {' '.join(str(error).split())}; {' '.join(places[-4:])}")
    print(len(checks), flush=True)
    os._exit(0)


def _register() -> None:
    """Tell torch of the device `spare`."""
    _setup_privateuseone_for_python_backend("spare", backend_module=_Backend())
    torch.__future__.set_swap_module_params_on_conversion(True)  # parameters stay the same objects, as on a real device
    library = torch.library.Library("aten", "IMPL")
    _LIBRARIES.append(library)  # what it has registered lasts as long as it does
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        operator = getattr(getattr(aten, packet), overload or "default")
        library.impl(name, partial(_computed, operator), "PrivateUse1")


def _computed(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an operator on the second device."""
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = {id(t.numbers): t for t in tensors if isinstance(t, _There)}
    asked = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
    mixed = len(there) and any(t.dim() for t in tensors if not isinstance(t, _There))
    if (mixed and operator not in _ACROSS) or (operator is aten.index.Tensor and not isinstance(args[0], _There)):
        raise RuntimeError(f"{operator}: expected all tensors to be on the same device, but found {DEVICE} and cpu")
    if kwargs.get("generator") is not None:
        raise RuntimeError(f"{operator}: expected a 'spare' device type for generator but found 'cpu'")
    if asked == "spare":
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map(lambda leaf: leaf.numbers if isinstance(leaf, _There) else leaf, (args, kwargs))
    result = operator(*args, **kwargs)
    if asked not in (None, "spare") or (operator is aten.copy_.default and id(result) not in there):
        return result
    # what an operator changes in place is the same object before and after
    return tree_map(lambda leaf: (there[id(leaf)] if id(leaf) in there else _There(leaf)) if isinstance(leaf, Tensor)
                    else leaf, result)
