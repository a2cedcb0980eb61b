"""What a layer over a structure derives anew in each call, kept for the next call of the same kind.

On few entries the arithmetic of a call takes microseconds, and building the basis, checking shapes and finding the
plan take many times that. They depend on the structure and on the shape of x alone where the mechanism is index-based.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from structconv.bases.base import Basis
from structconv.mechanisms.graphs import Adjacency, Chebyshev, Incidence, Powers, Relation, Relations, Walks
from structconv.mechanisms.grids import Cuboid, Pool, Shifts
from structconv.mechanisms.index import Identity
from structconv.planning import Plan, Run
from structconv.planning.tuning import Autotuning, may_time
from structconv.structures.grid import Grid
from structconv.theta import Theta

if TYPE_CHECKING:
    from structconv.nn.conv import Conv

#: Numbers of a structure above which nothing is kept: there the arithmetic is what costs, and memory counts.
LARGEST = 1 << 16
#: Stands for a bias that is no ordinary parameter.
_ELSEWHERE: Any = object()
#: Kinds of call that a layer keeps.
KINDS = 8
#: Mechanisms that read the structure and the number of x's entries, and have no parameters.
STRUCTURAL = frozenset((Adjacency, Chebyshev, Cuboid, Identity, Incidence, Pool, Powers, Relation, Relations, Shifts,
                        Walks))


class Call(NamedTuple):
    """A kind of call: what it was made of, and what it came to."""

    structure: Any
    versions: tuple[tuple[Tensor, int], ...]
    parameters: tuple[tuple[str, nn.Parameter, bool], ...]
    basis: Basis
    theta: Theta
    plan: Plan
    run: Run

    def holds(self, layer: Conv, x: Tensor) -> bool:
        """Whether nothing that it was made of has changed, the structure's identity aside."""
        weight: Any = layer._modules["weight"]
        if weight._forward_hooks or weight._forward_pre_hooks:
            return False
        held, dtype, device = weight._parameters, x.dtype, x.device
        for name, parameter, wanted in self.parameters:
            if (held.get(name) is not parameter or parameter.requires_grad is not wanted
                    or parameter.dtype is not dtype or parameter.device != device):
                return False
        return True not in [t._version != version or t.requires_grad for t, version in self.versions]


class Calls(dict[Hashable, Call]):
    """A layer's kept calls; a copy of the layer, and one read from a file, begins with none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return Calls()

    def __copy__(self) -> Calls:
        return Calls()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Calls, ()


def recalled(layer: Conv, x: Tensor, structure: Any) -> Call | None:
    """The kept call of `layer.forward` that this one repeats, if there is one."""
    if is_compiling() or type(x) is not Tensor:
        return None
    call = layer._calls.get(_kind(layer, x))
    if call is None or not call.holds(layer, x):
        return None
    same = structure is call.structure or (type(structure) is Grid and structure == call.structure)
    return call if same else None


def recalled_image(layer: Conv, image: Tensor) -> Call | None:
    """As `recalled`, for a call of `layer` with an image, whose kernel takes images as they are."""
    if is_compiling() or type(image) is not Tensor or watched(layer):
        return None
    call = layer._calls.get(("image", *_kind(layer, image)))
    return call if call is not None and call.holds(layer, image) else None


def bias_of(layer: Conv) -> Tensor | None:
    """`layer.bias`; quicker where it is an ordinary parameter, since modules look attributes up in Python."""
    bias = layer._parameters.get("bias", _ELSEWHERE)
    return layer.bias if bias is _ELSEWHERE else bias


def keep(layer: Conv, x: Tensor, structure: Any, basis: Basis, theta: Theta, plan: Plan) -> None:
    """Keep a call, unless it depends on more than the structure and x's shape, or its structure is large."""
    if type(layer.mechanism) not in STRUCTURAL or not may_time(x) or torch.is_inference_mode_enabled():
        return
    versions, parameters = _versions(structure), _parameters(layer, theta)
    if versions is None or parameters is None:
        return
    run = plan.rule.prepared(x, basis, theta)
    _add(layer, _kind(layer, x), Call(structure, versions, parameters, basis, theta, plan, run))


def keep_image(layer: Conv, image: Tensor, x: Tensor, structure: Any) -> None:
    """Keep the call of `layer` with an image that was just computed from its entries x, where a kernel takes images."""
    call = recalled(layer, x, structure)
    run = None if call is None else call.plan.rule.prepared_image(image, call.basis, call.theta)
    if call is not None and run is not None:
        _add(layer, ("image", *_kind(layer, image)), call._replace(run=run))


def watched(module: nn.Module) -> bool:
    """Whether somebody is to be told of calls of this module."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks or _has_any_global_hook())


def _add(layer: Conv, kind: Hashable, call: Call) -> None:
    if len(layer._calls) >= KINDS:
        layer._calls.clear()
    layer._calls[kind] = call


def _kind(layer: Conv, x: Tensor) -> tuple[Hashable, ...]:
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


def _parameters(layer: Conv, theta: Theta) -> tuple[tuple[str, nn.Parameter, bool], ...] | None:
    """The parameters that Theta holds as they are; `None` where it is computed from them."""
    held = layer.weight._parameters
    kept = [(name, parameter) for name, parameter in held.items() if parameter is not None]
    if len(kept) != len(held) or any(all(t is not p for _, p in kept) for t in theta.tensors):
        return None
    return tuple((name, parameter, parameter.requires_grad) for name, parameter in kept)
