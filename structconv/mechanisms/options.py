"""The options of a mechanism: what is static of a module, and which of them may change unseen."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from structconv.bases.spec import Token
from structconv.structures.values import FrozenValue, field_names, fields

__all__ = ["KEPT", "may_change", "options", "static"]

#: What torch keeps in every module, and what is noted here.
KEPT = frozenset((*nn.Module().__dict__, "token", "_bound"))
#: Options that are equal where their values are.
_VALUES = (bool, int, float, complex, str, bytes, type, type(None), torch.dtype, torch.device, torch.Size, Token)
_CODE = (BuiltinFunctionType, FunctionType, MethodType)


def options(module: nn.Module) -> dict[str, Any]:
    """What the author of a module gave it beside parameters, buffers and submodules, by name.

    A tensor is none: pruning, norms of weights and replicas set one in the place of a parameter, at each call.
    """
    return {name: held for name, held in module.__dict__.items() if name not in KEPT and not isinstance(held, Tensor)}


def may_change(option: Any) -> bool:
    """Whether an option may become another one in place, unseen."""
    if isinstance(option, tuple | frozenset):
        return any(map(may_change, option))
    return not isinstance(option, (*_VALUES, *_CODE, partial, FrozenValue, nn.Module, Tensor))


def static(option: Any) -> Hashable:
    """What is known of an option without holding it: its value, or that it is like nothing else."""
    if isinstance(option, _VALUES):
        return option
    if isinstance(option, list | tuple):
        return type(option), *map(static, option)
    if isinstance(option, set | frozenset):
        return type(option), frozenset(map(static, option))
    if isinstance(option, dict):
        return dict, *((name, static(held)) for name, held in option.items())
    if isinstance(option, partial):
        return partial, static(option.func), static(option.args), static(option.keywords)
    if isinstance(option, FrozenValue) and field_names(option):
        return type(option), *map(static, fields(option))
    free = isinstance(option, BuiltinFunctionType) or (isinstance(option, FunctionType) and option.__closure__ is None)
    return option if free else Token()
