"""The options of a mechanism: the static attributes of a module, and whether they may change in place."""

from __future__ import annotations

import enum
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from torch import Tensor, nn

from structconv.structures.values import VALUES, FrozenValue

__all__ = ["KEPT", "may_change", "options"]

#: The attributes that torch, or this package, sets in every module.
KEPT = frozenset((*nn.Module().__dict__, "_known_parts", "_known_in_layer", "_options_key", "_bound",
                  "_names", "_reads"))
#: Objects that never change, but are known by their identity, or by what they hold.
_FIXED = (float, complex, type, enum.Enum, np.generic, FunctionType, MethodType, partial, FrozenValue, nn.Module,
          Tensor)


def options(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, by name, beside parameters, buffers and submodules; not tensors, which pruning,
    weight norms and replicas set in the place of a parameter at each call, and not a child of another module."""
    return {name: value for name, value in module.__dict__.items()
            if name not in KEPT and not isinstance(value, Tensor | nn.Module)}


def may_change(option: Any) -> bool:
    """Return True if an option may change in place without notice."""
    if isinstance(option, tuple | frozenset) and not hasattr(option, "__dict__"):
        return any(map(may_change, option))
    return type(option) not in VALUES and not isinstance(option, _FIXED)
