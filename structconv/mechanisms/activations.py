"""Activations inside a basis, recognized by the function that they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from structconv import torch_compat as private
from structconv.bases.tree import Function

__all__ = ["as_function", "leaky_relu"]

#: Modules without options that compute what a function does.
_FUNCTIONS: dict[type, Callable[[Tensor], Tensor]] = {nn.Tanh: torch.tanh, nn.Sigmoid: torch.sigmoid,
                                                      nn.ReLU: torch.relu}


@lru_cache(maxsize=64)
def leaky_relu(slope: float) -> Callable[[Tensor], Tensor]:
    """The leaky ReLU of a slope, as a function that has its key."""
    function = partial(F.leaky_relu, negative_slope=slope)
    function.__dict__["static_key"] = "leaky_relu", slope  # see `key_of`
    return function


def as_function(activation: Any) -> Any:
    """The function that the call of a module computes, if it is known, else the module as a `Function`; what is no
    module is a function already."""
    if not isinstance(activation, nn.Module):
        return activation
    if torch.compiler.is_compiling() or not private.all_plain(activation):
        return Function(activation)
    if type(activation) in (nn.LeakyReLU, nn.Identity):
        return leaky_relu(getattr(activation, "negative_slope", 1.0))
    function = _FUNCTIONS.get(type(activation))
    return Function(activation) if function is None else function
