"""What a layer over a structure derives anew in each call, kept for the next call of the same kind.

On few entries the arithmetic of a call takes microseconds, and building the basis, checking shapes and finding the
plan take many times that. They depend on the structure and on the shape of x alone where the mechanism is index-based.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from structconv.bases.base import Basis
from structconv.mechanisms.graphs import Adjacency, Chebyshev, Incidence, Powers, Relation, Relations, Walks
from structconv.mechanisms.grids import Cuboid, Pool, Shifts
from structconv.mechanisms.index import Identity
from structconv.planning import Plan
from structconv.planning.tuning import Autotuning, may_time
from structconv.structures.grid import Grid
from structconv.theta import Theta

if TYPE_CHECKING:
    from structconv.nn.conv import Conv

#: Numbers of a structure above which nothing is kept: there the arithmetic is what costs, and memory counts.
LARGEST = 1 << 16
#: Kinds of call that a layer keeps.
KINDS = 4
#: Mechanisms that read the structure and the number of x's entries, and have no parameters.
STRUCTURAL = frozenset((Adjacency, Chebyshev, Cuboid, Identity, Incidence, Pool, Powers, Relation, Relations, Shifts,
                        Walks))


class Call(NamedTuple):
    """A kind of call: what it was made of, and what it came to."""

    structure: Any
    versions: tuple[tuple[Tensor, int], ...]
    parameters: tuple[tuple[nn.Parameter, bool], ...]
    basis: Basis
    theta: Theta
    plan: Plan

    def holds(self, layer: Conv, x: Tensor, structure: Any) -> bool:
        """Whether nothing that it was made of has changed."""
        if structure is not self.structure and not (type(structure) is Grid and structure == self.structure):
            return False
        weight: Any = layer._modules["weight"]
        held = weight._parameters
        if len(held) != len(self.parameters) or weight._forward_hooks or weight._forward_pre_hooks:
            return False
        for now, (parameter, wanted) in zip(held.values(), self.parameters, strict=True):
            if (now is not parameter or parameter.requires_grad != wanted or parameter.dtype != x.dtype
                    or parameter.device != x.device):
                return False
        return not self.versions or all(t._version == version and not t.requires_grad for t, version in self.versions)


class Calls(dict[Hashable, Call]):
    """A layer's kept calls; a copy of the layer, and one read from a file, begins with none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return Calls()

    def __copy__(self) -> Calls:
        return Calls()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Calls, ()


def recalled(layer: Conv, x: Tensor, structure: Any) -> Call | None:
    """The kept call that this one repeats, if there is one."""
    if torch.compiler.is_compiling() or type(x) is not Tensor:
        return None
    call = layer._calls.get(_kind(layer, x))
    return call if call is not None and call.holds(layer, x, structure) else None


def keep(layer: Conv, x: Tensor, structure: Any, basis: Basis, theta: Theta, plan: Plan) -> None:
    """Keep a call, unless it depends on more than the structure and x's shape, or its structure is large."""
    if type(layer.mechanism) not in STRUCTURAL or not may_time(x) or torch.is_inference_mode_enabled():
        return
    versions, parameters = _versions(structure), _parameters(layer, theta)
    if versions is None or parameters is None:
        return
    if len(layer._calls) >= KINDS:
        layer._calls.clear()
    layer._calls[_kind(layer, x)] = Call(structure, versions, parameters, basis, theta, plan)


def _kind(layer: Conv, x: Tensor) -> Hashable:
    grad = torch.is_grad_enabled()
    return x.shape, x.dtype, x.device, grad, grad and x.requires_grad, layer.path, layer.max_bytes, Autotuning.enabled


def _versions(structure: Any) -> tuple[tuple[Tensor, int], ...] | None:
    """The tensors of a small structure and how often each was changed in place; `None` if it must not be kept."""
    leaves = [] if structure is None or type(structure) is Grid else pytree.tree_leaves(structure)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if any(not isinstance(leaf, Tensor | int | float | str | None) for leaf in leaves):
        return None
    if any(type(t) is not Tensor or t.requires_grad or t.is_inference() for t in tensors):
        return None
    if sum(t.numel() for t in tensors) > LARGEST:
        return None
    return tuple((t, t._version) for t in tensors)


def _parameters(layer: Conv, theta: Theta) -> tuple[tuple[nn.Parameter, bool], ...] | None:
    """The parameters that Theta holds as they are; `None` where it is computed from them."""
    held = layer.weight._parameters.values()
    kept = [parameter for parameter in held if parameter is not None]
    if len(kept) != len(held) or any(all(t is not p for p in kept) for t in theta.tensors):
        return None
    return tuple((parameter, parameter.requires_grad) for parameter in kept)
