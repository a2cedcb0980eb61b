"""What a layer over a structure derives anew in each call, kept for the next call of the same kind.

On few entries the arithmetic of a call takes microseconds, and building the basis, checking shapes and finding the
plan take many times that. They depend on the structure and on the shape of x alone where the mechanism is index-based;
of attention the form that its expression was recognised as does (`attended`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn.modules import module as _torch
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
#: Stands for a bias that is no ordinary parameter.
_ELSEWHERE: Any = object()
#: Kinds of call that a layer keeps.
KINDS = 8
#: Mechanisms that read the structure and the number of x's entries, and have no parameters.
STRUCTURAL = frozenset((Adjacency, Chebyshev, Cuboid, Identity, Incidence, Pool, Powers, Relation, Relations, Shifts,
                        Walks))
#: Where torch keeps the hooks that every module runs.
_EVERYWHERE = (_torch._global_forward_hooks, _torch._global_forward_pre_hooks, _torch._global_backward_hooks,
               _torch._global_backward_pre_hooks, _torch._global_forward_hooks_always_called,
               _torch._global_forward_hooks_with_kwargs)
#: (x, b or none, z or none) -> y.
Repeat = Callable[..., Tensor]


class Grounds(NamedTuple):
    """What a call rests on beside the structure's identity: as long as nothing of it has changed, it may be repeated.

    Args:
        held: dictionaries, keys, and the very objects that they must hold: submodules, parameters, options.
        hooks: dictionaries that must be empty.
        parameters: each, and whether it requires a gradient.
        versions: the structure's tensors, and how often each was changed in place.
    """

    held: tuple[tuple[dict[str, Any], str, Any], ...]
    hooks: tuple[dict[int, Any], ...]
    parameters: tuple[tuple[nn.Parameter, bool], ...]
    versions: tuple[tuple[Tensor, int], ...]

    def hold(self, x: Tensor) -> bool:
        """Whether all is as it was, for an x of the same dtype and device."""
        if any(self.hooks):
            return False
        for held, name, value in self.held:
            if held.get(name) is not value:
                return False
        dtype, device = x.dtype, x.device
        for parameter, wanted in self.parameters:
            if (parameter.requires_grad is not wanted or parameter.dtype is not dtype
                    or parameter.device != device):
                return False
        return True not in [t._version != version or t.requires_grad for t, version in self.versions]


class Call(NamedTuple):
    """A kind of call: its structure, what it rests on, and how it is repeated.

    `made` is what it came to, where that is the same for any x.
    """

    structure: Any
    grounds: Grounds
    run: Repeat
    made: tuple[Basis, Theta, Plan] | None = None


class Calls(dict[Hashable, Call]):
    """A layer's kept calls; a copy of the layer, and one read from a file, begins with none."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Calls:
        return Calls()

    def __copy__(self) -> Calls:
        return Calls()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return Calls, ()


def recalled(layer: Conv, x: Tensor, structure: Any, z: Tensor | None = None) -> Call | None:
    """The kept call of `layer` that this one repeats, if there is one."""
    if not _plain(x):
        return None
    call = layer._calls.get(kind_of(layer, x) if z is None else kind_of(layer, x, z))
    if call is None or not (structure is call.structure or alike(structure, call.structure)):
        return None
    return call if call.grounds.hold(x) else None


def recalled_image(layer: Conv, image: Tensor) -> Call | None:
    """As `recalled`, for a call of `layer` with an image, whose kernel takes images as they are."""
    if not _plain(image) or watched(layer):
        return None
    call = layer._calls.get(("image", *kind_of(layer, image)))
    return call if call is not None and call.grounds.hold(image) else None


def bias_of(layer: Conv) -> Tensor | None:
    """`layer.bias`; quicker where it is an ordinary parameter, since modules look attributes up in Python."""
    bias = layer._parameters.get("bias", _ELSEWHERE)
    return layer.bias if bias is _ELSEWHERE else bias


def keep(layer: Conv, x: Tensor, structure: Any, basis: Basis, theta: Theta, plan: Plan) -> None:
    """Keep a call, unless it depends on more than the structure and x's shape, or its structure is large."""
    if type(layer.mechanism) not in STRUCTURAL or not may_keep(x):
        return
    found = grounds(layer, theta, structure)
    if found is not None:
        run = plan.rule.prepared(x, basis, theta)
        store(layer, kind_of(layer, x), Call(structure, found, run, (basis, theta, plan)))


def keep_image(layer: Conv, image: Tensor, x: Tensor, structure: Any) -> None:
    """Keep the call of `layer` with an image that was just computed from its entries x, where a kernel takes images."""
    call = recalled(layer, x, structure)
    if call is None or call.made is None:
        return
    basis, theta, plan = call.made
    run = plan.rule.prepared_image(image, basis, theta)
    if run is not None:
        store(layer, ("image", *kind_of(layer, image)), call._replace(run=run))


def watched(module: nn.Module) -> bool:
    """Whether somebody is to be told of calls of this module."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
                or module._backward_pre_hooks or _torch._has_any_global_hook())


def may_keep(x: Tensor) -> bool:
    """Whether a call with x says anything of the next one: values are computed, and as they are."""
    return may_time(x) and not torch.is_inference_mode_enabled() and not torch._C._is_any_autocast_enabled()


def store(layer: Conv, kind: Hashable, call: Call) -> None:
    """Keep a call among the layer's few."""
    if len(layer._calls) >= KINDS:
        layer._calls.clear()
    layer._calls[kind] = call


def _plain(x: Tensor) -> bool:
    """Whether x is a tensor with values of its own type, to be computed with as it is."""
    return (type(x) is Tensor and not is_compiling() and not torch._C._is_any_autocast_enabled()
            and torch._C._functorch.peek_interpreter_stack() is None)


def kind_of(layer: Conv, x: Tensor, *others: Tensor) -> tuple[Hashable, ...]:
    grad = torch.is_grad_enabled()
    kind: tuple[Hashable, ...] = (x.shape, x.dtype, x.device, grad, grad and x.requires_grad, layer.path,
                                  layer.max_bytes, Autotuning.enabled)
    for z in others:
        kind = (*kind, type(z), z.shape, z.dtype, z.device, z.requires_grad)
    return kind


def alike(one: Any, other: Any) -> bool:
    """Whether two structures are of the same numbers and the very same tensors."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if dataclasses.is_dataclass(one):
        return all(alike(field, other.__dict__.get(name)) for name, field in one.__dict__.items())
    return isinstance(one, int | float | str) and one == other


def grounds(layer: Conv, theta: Theta, structure: Any, called: Iterable[nn.Module] = (),
            options: Iterable[tuple[dict[str, Any], str, Any]] = ()) -> Grounds | None:
    """What a call with this Theta and structure rests on; `None` where it must not be kept.

    Args:
        called: modules of the mechanism that the layer calls, whose hooks it would run.
        options: what must be held beside submodules and parameters.
    """
    weight, versions = list(layer.weight.modules()), _versions(structure)
    modules = [*weight, *layer.mechanism.modules()]
    parameters = [parameter for module in modules for parameter in module._parameters.values() if parameter is not None]
    hooks: list[Any] = [*_EVERYWHERE]
    for module in (*weight, *called):
        hooks += (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    if versions is None or any(hooks) or any(all(t is not p for p in parameters) for t in theta.tensors):
        return None
    links: list[tuple[Any, str, Any]] = [(layer._modules, name, layer._modules.get(name))
                                         for name in ("weight", "mechanism", "relative_value")]
    links += [(held, name, value) for module in modules for held in (module._modules, module._parameters)
              for name, value in held.items()]
    return Grounds((*links, *options), tuple(hooks), tuple((p, p.requires_grad) for p in parameters), versions)


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
