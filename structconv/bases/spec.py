"""Specs and leaves: the static and the dynamic side of a basis, as a formula and its arguments.

A call hands in *leaves*: tensors, `None`, products that are still to be made (`Projected`, `Term`), structures,
supports, whole bases. A *spec* is the tree of values over them with a `Leaf` in the place of every tensor, which knows
its sizes and how to get its tensor out of the leaves of a call. Kernels match on specs, and what they compile reads
leaves; nothing of a call stays behind.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.func import functional_call

from structconv.primitives.products import linear, split_heads
from structconv.structures.graph import Graph
from structconv.structures.values import FrozenValue, alterer, field_names, fields, structure

__all__ = ["LAZY", "Function", "Leaf", "Leaves", "Projected", "StandIns", "Term", "Token", "filler", "getter",
           "materialised", "spec_of", "stand_ins", "tensor"]

Leaves = Sequence[Any]
Get = Callable[[Leaves], Any]
#: What there is a stand-in for already, by its identity, and that.
_Made = dict[int, tuple[Any, Any]]


class Token:
    """Stands among leaves for options: one object for all equal ones, quick to hash and to compare.

    `Token()` stands for what is like nothing else.
    """

    __slots__ = ("__weakref__", "options")

    def __init__(self, options: Hashable = None) -> None:
        self.options = options

    @classmethod
    def of(cls, options: Hashable) -> Token:
        """The token of these options."""
        return _TOKENS.setdefault(options, cls(options))

    def __deepcopy__(self, memo: dict[int, Any]) -> Token:
        return self

    def __reduce__(self) -> tuple[Any, tuple[Hashable, ...]]:
        return (Token, ()) if self.options is None else (Token.of, (self.options,))

    def __repr__(self) -> str:
        return f"Token({self.options!r})"


_TOKENS: WeakValueDictionary[Hashable, Token] = WeakValueDictionary()


class Projected(NamedTuple):
    """x weight^T + bias by heads, still to be made: (..., M, P), (K D, P) and (K D) or none -> (..., K, M, D).

    A kernel that takes several projections of one x makes them in one product.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the product."""
        return (*self.x.shape[:-2], self.heads, self.x.shape[-2], self.weight.shape[0] // self.heads)

    def tensor(self) -> Tensor:
        """The product."""
        y = linear(self.x, self.weight, self.bias)
        return split_heads(y, self.heads, self.weight.shape[0] // self.heads)


class Term(NamedTuple):
    """<vector_k, x_km> for each entry, still to be made: (..., K or 1, M, C) and (K, C) -> (..., K, M).

    A kernel that reads the rows of x anyway makes it as it passes.
    """

    x: Tensor
    vector: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the terms."""
        return *self.x.shape[:-3], self.vector.shape[0], self.x.shape[-2]

    def tensor(self) -> Tensor:
        """The terms."""
        if self.x.shape[-3] == 1:
            return (self.x.squeeze(-3) @ self.vector.mT).mT
        return (self.x @ self.vector.unsqueeze(-1)).squeeze(-1)


#: Products that a kernel may make itself.
LAZY = frozenset((Projected, Term))


@structure(init=False)
class Function(FrozenValue):
    """A module that maps entries, as a leaf of a call: a plan is for any, and keeps none.

    Its parameters are among the tensors of what holds it, so that a block that is evaluated anew sends gradients to
    them. With `precision` it runs under autocast to that dtype, and gives the dtype of what it maps.
    """

    static_key = ("Function",)
    module: Callable[[Tensor], Tensor] | None
    precision: torch.dtype | None
    parameters: tuple[Tensor, ...]

    def __init__(self, module: Callable[[Tensor], Tensor] | None, precision: torch.dtype | None = None,
                 parameters: tuple[Tensor, ...] | None = None) -> None:
        if parameters is None:
            parameters = tuple(module.parameters()) if isinstance(module, torch.nn.Module) else ()
        self.__dict__.update(module=module, precision=precision, parameters=parameters)

    def __call__(self, entries: Tensor) -> Tensor:
        assert self.module is not None, "a spec computes nothing"
        if self.precision is None:
            return self._mapped(entries)
        # Casts are not kept: a forward without gradients would leave such to a backward that runs this anew.
        with torch.autocast(entries.device.type, self.precision, cache_enabled=False):
            return self._mapped(entries).to(entries.dtype)

    def _mapped(self, entries: Tensor) -> Tensor:
        """The module's own numbers, or those of other parameters in the place of its own."""
        module = self.module
        assert module is not None
        named = list(module.named_parameters()) if isinstance(module, torch.nn.Module) else []
        if all(own is given for (_, own), given in zip(named, self.parameters, strict=True)):
            return module(entries)
        given = {name: t for (name, _), t in zip(named, self.parameters, strict=True)}
        found: Tensor = functional_call(module, given, (entries,))  # type: ignore[arg-type]
        return found

    def __repr__(self) -> str:
        return type(self.module).__name__


class Leaf:
    """Stands in a spec for a tensor of a call: its sizes, dtype and device, and how to `get` it from the leaves."""

    __slots__ = ("device", "dtype", "get", "requires_grad", "shape")
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __init__(self, get: Get, like: Tensor | Leaf, shape: tuple[int, ...]) -> None:
        self.get, self.shape, self.dtype, self.device = get, torch.Size(shape), like.dtype, like.device
        self.requires_grad = like.requires_grad

    def dim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of numbers."""
        return math.prod(self.shape)

    def is_floating_point(self) -> bool:
        """Whether its numbers are."""
        return self.dtype.is_floating_point

    @property
    def mT(self) -> Leaf:
        """The transposed matrices."""
        get, shape = self.get, self.shape
        return Leaf(lambda leaves: get(leaves).mT, self, (*shape[:-2], shape[-1], shape[-2]))

    def reshape(self, *shape: int) -> Leaf:
        """The same numbers in another shape: a vector of all of them is (-1,)."""
        get = self.get
        return Leaf(lambda leaves: get(leaves).reshape(shape), self, (self.numel(),) if shape == (-1,) else shape)

    def split(self, sizes: list[int]) -> tuple[Leaf, ...]:
        """The numbers of a vector, so many after so many."""
        get = self.get
        return tuple(Leaf(_item(lambda leaves: get(leaves).split(sizes), i), self, (size,))
                     for i, size in enumerate(sizes))

    @property
    def is_cpu(self) -> bool:
        """Whether it is in the memory of the processor."""
        return self.device.type == "cpu"


class StandIns(list[Any]):
    """What stands in for the leaves of calls while their spec is made."""


def stand_ins(leaves: Leaves) -> StandIns:
    """A stand-in for each leaf; the same for the same structure, as the key of a plan tells, and no other object."""
    made: dict[int, Any] = {}
    own = [spec_of(leaf, itemgetter(i)) for i, leaf in enumerate(leaves)]
    return StandIns([made.setdefault(id(leaf), spec) if isinstance(leaf, FrozenValue) else spec
                     for leaf, spec in zip(leaves, own, strict=True)])


def tensor(leaf: Any) -> Any:
    """The leaf, made if it was still to be made."""
    return leaf.tensor() if type(leaf) in LAZY else leaf


def materialised(leaves: Leaves) -> list[Any]:
    """The leaves with all products made."""
    return [leaf.tensor() if type(leaf) in LAZY else leaf for leaf in leaves]


def spec_of(value: Any, get: Get, made: _Made | None = None) -> Any:
    """The value with a `Leaf` in the place of each tensor; `get` finds the value among the leaves of a call.

    What it holds in two places has one stand-in.
    """
    made = {} if made is None else made
    if id(value) not in made:
        made[id(value)] = value, _stand_in(value, get, made)
    return made[id(value)][1]


def _stand_in(value: Any, get: Get, made: _Made) -> Any:
    if isinstance(value, Tensor | Leaf):
        return Leaf(get, value, value.shape)
    if type(value) in LAZY:
        return Leaf(get, value.x, value.shape)
    if isinstance(value, tuple | list):
        items = [spec_of(item, _item(get, i), made) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, FrozenValue):
        return value
    if type(value) is Function:
        stub = Function(None)
        stub.__dict__["_get"] = get
        return stub
    return _spec_over(value, {}, get, made)


def _spec_over(value: Any, changed: dict[str, Any], get: Get, made: _Made) -> Any:
    """The stand-in for a value with other numbers, which `get` finds."""
    spec = object.__new__(_GraphSpec) if type(value) is Graph else copy.copy(value)
    held = dict(zip(field_names(value), fields(value), strict=True)) if field_names(value) else vars(value)
    for name, field in {**held, **changed}.items():
        spec.__dict__[name] = spec_of(field, _attribute(get, name), made)
    spec.__dict__["_get"] = get
    return spec


def getter(value: Any) -> Get:
    """What finds, among the leaves of a call, the thing that this part of a spec stands for.

    Where a program is traced specs are the values themselves, and so is what is found.
    """
    if isinstance(value, Leaf):
        return value.get
    known = _own(value)
    return (lambda leaves: value) if known is None else known


def filler(spec: Any) -> Get:
    """(leaves) -> the value itself of a part of a spec, all products made; the same if it holds nothing of a call."""
    if is_compiling():
        return lambda leaves: spec
    if isinstance(spec, Leaf):
        get = spec.get
        return lambda leaves: tensor(get(leaves))
    known = _own(spec)
    if known is not None:
        return known
    if isinstance(spec, tuple | list):
        items = [filler(item) for item in spec]
        return lambda leaves: tuple(fill(leaves) for fill in items)
    if not isinstance(spec, FrozenValue) or not _holds_leaves(spec):
        return lambda leaves: spec
    parts = {name: filler(field) for name, field in zip(field_names(spec), fields(spec), strict=True)
             if _holds_leaves(field)}
    made = alterer(spec)
    return lambda leaves: made({name: fill(leaves) for name, fill in parts.items()})


def _own(value: Any) -> Get | None:
    """What finds a part that stands for one of the leaves, or for a field of one."""
    noted = isinstance(value, FrozenValue) and not is_compiling()
    return value.__dict__.get("_get") if noted else None


def _holds_leaves(spec: Any) -> bool:
    if isinstance(spec, Leaf) or _own(spec) is not None:
        return True
    return any(map(_holds_leaves, spec if isinstance(spec, tuple | list) else fields(spec)))


class _GraphSpec(Graph):
    """Stands in a spec for a graph."""

    def reversed(self) -> Graph:
        get = self.__dict__["_get"]
        sizes = {"num_inputs": self.num_outputs, "num_outputs": self.num_inputs}
        return self.__dict__.setdefault(
            "_reversed", _spec_over(self, sizes, lambda leaves: get(leaves).reversed(), {}))


def _item(get: Get, index: int) -> Get:
    return lambda leaves: get(leaves)[index]


def _attribute(get: Get, name: str) -> Get:
    return lambda leaves: getattr(get(leaves), name)


