"""The options of a mechanism: what is static of a module, and which of them may change unseen."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodDescriptorType, MethodType, WrapperDescriptorType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from structconv.bases.spec import Token
from structconv.memo import mark
from structconv.structures.values import FrozenValue, fields, tensors_in

__all__ = ["KEPT", "may_change", "options", "static"]

#: What torch keeps in every module, and what is noted here.
KEPT = frozenset((*nn.Module().__dict__, "token", "_bound"))
#: Types whose values never change and are known by themselves.
_VALUES = frozenset((bool, int, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Token,
                     BuiltinFunctionType, MethodDescriptorType, WrapperDescriptorType))
#: Objects that never change, but are known by their identity, or by what they hold.
_FIXED = (float, complex, type, enum.Enum, np.generic, FunctionType, MethodType, partial, FrozenValue, nn.Module,
          Tensor)


def options(module: nn.Module) -> dict[str, Any]:
    """What the author of a module gave it beside parameters, buffers and submodules, by name.

    A tensor is none: pruning, norms of weights and replicas set one in the place of a parameter, at each call.
    """
    return {name: held for name, held in module.__dict__.items() if name not in KEPT and not isinstance(held, Tensor)}


def may_change(option: Any) -> bool:
    """Whether an option may become another one in place, unseen."""
    if isinstance(option, tuple | frozenset) and not hasattr(option, "__dict__"):
        return any(map(may_change, option))
    return type(option) not in _VALUES and not isinstance(option, _FIXED)


def static(option: Any, within: tuple[int, ...] = ()) -> Hashable:
    """What is known of an option without holding it: type and value, or which object it is and what it holds now.

    `within` are the objects that hold it, which an option that holds itself is not looked into again.
    """
    kind, inside = type(option), (*within, id(option))
    if kind in _VALUES or isinstance(option, type):
        return kind, option
    if isinstance(option, float | complex | np.generic):
        return kind, repr(option)  # 0.0 is not -0.0, and nan is nan
    if isinstance(option, enum.Enum):
        return kind, option.name
    if isinstance(option, FrozenValue) and not tensors_in(option):
        return kind, *(static(field, inside) for field in fields(option))
    if isinstance(option, partial):
        return kind, *(static(part, inside) for part in (option.func, option.args, option.keywords))
    if isinstance(option, MethodType):
        return kind, static(option.__func__, inside), static(option.__self__, inside)
    if id(option) in within:
        return mark(option)
    return kind, *_contents(option, inside)


def _contents(option: Any, inside: tuple[int, ...]) -> tuple[Hashable, ...]:
    """What an object holds; which one it is where it may hold more than is seen."""
    held = tuple((name, static(value, inside)) for name, value in getattr(option, "__dict__", {}).items())
    if isinstance(option, list | tuple):
        return held, *(static(item, inside) for item in option)
    if isinstance(option, set | frozenset):
        return held, frozenset(static(item, inside) for item in option)
    if type(option) is dict:
        return held, *((static(name, inside), static(value, inside)) for name, value in option.items())
    if type(option) is FunctionType and option.__closure__ is None:
        return held, option
    return held, mark(option)
