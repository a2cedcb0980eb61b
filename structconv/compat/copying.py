"""`copied`: a deep copy of a model, also of a pruned one."""

from __future__ import annotations

import copy
from types import CellType, FunctionType
from typing import TypeVar

from torch import Tensor, nn

from structconv import torch_compat as private
from structconv.errors import ConfigError

__all__ = ["copied"]

M = TypeVar("M", bound=nn.Module)


def _content(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None


def copied(model: M) -> M:
    """Return a deep copy of a model.

    Modules may hold tensors that were computed with gradients, which torch does not copy: the weight of a module that
    `torch.nn.utils.prune` or the older `weight_norm` and `spectral_norm` have changed, or what a forward left. The copy
    has their numbers; hooks compute such a weight again before each forward.

    Raises:
        ConfigError: a module holds a function that calls modules of the model by name: Python does not copy functions,
            so the copy would compute with the original's parameters.
    """
    modules = {id(module) for module in model.modules()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            cells = value.__closure__ if isinstance(value, FunctionType) else None
            if any(id(_content(cell)) in modules for cell in cells or ()):
                raise ConfigError(f"a copy of {type(model).__name__}", "functions must not hold modules of the model",
                                  f"{path}.{name}".lstrip("."), "Pass inplace=True, or make it a method.")
    held = [leaf for module in model.modules() for leaf in private.pytree.tree_leaves(
        [value for name, value in vars(module).items() if name not in ("_parameters", "_modules")])
        if isinstance(leaf, Tensor) and not leaf.is_leaf]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in held})
