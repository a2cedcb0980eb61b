"""`copied`: a deep copy of a model, also of a pruned one."""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import Tensor, nn

from structconv import torch_compat as private

__all__ = ["copied"]

M = TypeVar("M", bound=nn.Module)


def copied(model: M) -> M:
    """Return a deep copy of a model.

    Modules may hold tensors that were computed with gradients, which torch does not copy: the weight of a module that
    `torch.nn.utils.prune` or the older `weight_norm` and `spectral_norm` have changed, or what a forward left. The copy
    has their numbers; hooks compute such a weight again before each forward.
    """
    held = [leaf for module in model.modules() for leaf in private.pytree.tree_leaves(
        [value for name, value in vars(module).items() if name not in ("_parameters", "_modules")])
        if isinstance(leaf, Tensor) and not leaf.is_leaf]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in held})
