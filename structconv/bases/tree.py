"""The key of a basis, and its spec: the form in which a plan stores it.

Each call builds a new basis: a tree of values that holds the tensors of the call. Two things are computed from it:

- `tree_key(basis)`, in each call: a tuple of types, options, dtypes and classes of sizes, by which a plan is found.
- `tree_spec(basis, itself)`, once for each plan: the same tree with a `Leaf` in place of each tensor. A `Leaf` has a
  shape, a dtype and a device. Kernels match on the spec, and `getter(part)` finds a part in the basis of any call.

So a plan holds no tensor, and a call passes nothing but its basis.

A basis may hold products that are not computed yet (`LAZY`), so that a kernel may fuse them. `materialized(basis)`
computes them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.func import functional_call

from structconv.bases.base import Basis, is_basis
from structconv.primitives.products import linear
from structconv.primitives.rotation import rotate
from structconv.structures.graph import Graph, listed_edges, tensor_ids
from structconv.structures.supports import DenseMask, EdgeSupport, Padding
from structconv.structures.values import (
    EXACT,
    VALUES,
    FrozenValue,
    Structure,
    alterer,
    field_names,
    fields,
    key_of,
    map_tensors,
    size_class,
    structure,
    tensors_in,
)

__all__ = ["LAZY", "Function", "Leaf", "NormalizedWeights", "Projected", "Rotated", "Shared", "Term", "getter",
           "itself", "materialized", "materializer", "shape_class", "tensor", "tree_key", "tree_spec"]

#: The basis of a call -> a part of it.
Get = Callable[[Any], Any]
#: The values that have a part in the spec already, by `id`, each with that part.
_Specs = dict[int, tuple[Any, Any]]


def _not_computed(product: Any, name: str) -> Any:
    """Say how the basis of a mechanism inside another one is computed; only kernels read lazy products."""
    raise AttributeError(f"{type(product).__name__!r}, a product that a kernel has still to compute, has no attribute "
                         f"{name!r}. A mechanism that uses another one calls it as a module, self.inner(inputs), which "
                         "computes all products of its basis.", name=name, obj=product)


class Projected(NamedTuple):
    """x weight^T + bias by heads, not computed yet: (..., M, P), (K D, P) and (K D) or none -> (..., K, M, D).

    A kernel that takes several projections of one x makes them in one product.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    heads: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.x.shape[:-2], self.heads, self.x.shape[-2], self.weight.shape[0] // self.heads)

    def tensor(self) -> Tensor:
        x, weight, bias, heads = self
        return linear(x, weight, bias).view(*x.shape[:-1], heads, weight.shape[0] // heads).transpose(-2, -3)


class Rotated(NamedTuple):
    """A `Projected` whose pairs of channels are turned by the positions of the entries, not computed yet: a decoding
    step makes it in one kernel. The further fields are those of `primitives.rotation.rotate`."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    heads: int
    positions: Tensor
    rates: Tensor
    gain: float
    halves: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return Projected(*self[:4]).shape

    def tensor(self) -> Tensor:
        return rotate(Projected(*self[:4]).tensor(), *self[4:])


class Shared(NamedTuple):
    """Keys or values whose heads serve `repeats` consecutive heads each: (..., G, M, D) -> (..., G repeats, M, D). A
    decoding step reads them as they are."""

    x: Tensor
    repeats: int

    @property
    def shape(self) -> tuple[int, ...]:
        *lead, groups, entries, depth = self.x.shape
        return *lead, groups * self.repeats, entries, depth

    def tensor(self) -> Tensor:
        x: Tensor = tensor(self.x)
        return x.repeat_interleave(self.repeats, -3)


class Term(NamedTuple):
    """<vector_k, x_km> for each entry, not computed yet: (..., K or 1, M, C) and (K, C) -> (..., K, M). A kernel that
    reads the rows of x anyway makes it as it passes."""

    x: Tensor
    vector: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return *self.x.shape[:-3], self.vector.shape[0], self.x.shape[-2]

    def tensor(self) -> Tensor:
        if self.x.shape[-3] == 1:
            return (self.x.squeeze(-3) @ self.vector.mT).mT
        return (self.x @ self.vector.unsqueeze(-1)).squeeze(-1)


class NormalizedWeights:
    """The weights (E,) of the edges of a graph, normalized, not computed yet, without a gradient: a kernel that sorts
    the edges makes them in passing. Fields as in `bases.matrices.adjacency`, which `compute` gives the numbers."""

    __slots__ = ("compute", "dtype", "graph", "normalize", "weighted")
    requires_grad = False

    def __init__(self, graph: Graph, normalize: str | None, weighted: bool, dtype: torch.dtype,
                 compute: Callable[..., Tensor]) -> None:
        self.graph, self.normalize, self.weighted, self.dtype, self.compute = graph, normalize, weighted, dtype, compute

    @property
    def x(self) -> NormalizedWeights:
        """The weights themselves, which have the dtype and device."""
        return self

    @property
    def device(self) -> torch.device:
        return listed_edges(self.graph)[0].device

    @property
    def shape(self) -> tuple[int]:
        return (self.graph.num_edges,)

    def dim(self) -> int:
        return 1

    def tensor(self) -> Tensor:
        """The numbers, in the order of the edges."""
        return self.compute(self.graph, self.normalize, self.dtype, self.weighted)


#: Products that a kernel may make itself.
LAZY = frozenset((Projected, Rotated, Shared, Term, NormalizedWeights))
for _kind in LAZY - {NormalizedWeights}:
    _kind.__getattr__ = _not_computed  # type: ignore[attr-defined]


@structure(init=False)
class Function(FrozenValue):
    """A module that maps entries, as a part of a basis: a plan is for any, and keeps none. Its parameters are among the
    tensors of what holds it, so that a block that is evaluated again sends gradients to them. With `precision` it runs
    under autocast to that dtype, and gives the dtype of what it maps."""

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
        # Casts are not kept: a forward without gradients would leave such to a backward that runs this again.
        with torch.autocast(entries.device.type, self.precision, cache_enabled=False):
            return self._mapped(entries).to(entries.dtype)

    def _mapped(self, entries: Tensor) -> Tensor:
        module = self.module
        assert module is not None
        named = list(module.named_parameters()) if isinstance(module, torch.nn.Module) else []
        if all(own is values for (_, own), values in zip(named, self.parameters, strict=True)):
            return module(entries)
        values = {name: t for (name, _), t in zip(named, self.parameters, strict=True)}
        y: Tensor = functional_call(module, values, (entries,))  # type: ignore[arg-type]
        return y

    def __repr__(self) -> str:
        return type(self.module).__name__


class Leaf:
    """The part of a spec for a tensor: its shape, dtype and device, and a function that gets it from a basis."""

    __slots__ = ("device", "dtype", "get", "lazy", "requires_grad", "shape")
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    def __init__(self, get: Get, like: Tensor | Leaf, shape: tuple[int, ...], lazy: bool = False) -> None:
        self.get, self.shape, self.dtype, self.device = get, torch.Size(shape), like.dtype, like.device
        self.requires_grad, self.lazy = like.requires_grad, lazy

    def dim(self) -> int:
        return len(self.shape)

    @property
    def mT(self) -> Leaf:
        return Leaf(_attribute(self.get, "mT"), self, (*self.shape[:-2], self.shape[-1], self.shape[-2]))


def tensor(leaf: Any) -> Any:
    """Return the tensor; compute it if it is a lazy product."""
    return leaf.tensor() if type(leaf) in LAZY else leaf


def materialized(value: Any) -> Any:
    """Return the basis, or tuple of bases, with all products computed; unchanged if there are none."""
    return map_tensors(value, tensor, whole=(Structure,), also=tuple(LAZY))


@lru_cache(1 << 12)
def shape_class(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with size classes in the place of sizes, except channels; a vector has one number for each edge.
    """
    if not shape or max(shape) <= EXACT:
        return shape
    if len(shape) == 1:
        return (size_class(shape[0]),)
    if len(shape) == 2:
        return size_class(shape[0]), shape[1]
    return *[size_class(size) for size in shape[:-1]], shape[-1]


def tree_key(basis: Any) -> tuple[Hashable, ...]:
    """The facts of a basis that a plan may depend on: types, options, dtypes, classes of sizes, and shared tensors. One
    function walks over the tree, because it runs in every call of a layer."""
    facts: list[Any] = []
    ids: list[int] = []
    pending = [basis]
    while pending:
        value = pending.pop()
        kind = type(value)
        fields = _NODES.get(kind)
        if kind is tuple or kind is list:
            facts += (kind, len(value))
            for item in value:
                facts.append(item.size if is_basis(item) else 0)
                pending.append(item)
            continue
        if fields is None:
            known = value.__dict__.get("_known_key") if isinstance(value, FrozenValue) else None
            if known is None and kind is Graph:
                known = value.__dict__["_known_key"] = (id(value), *tensor_ids(value)), value._static()
            if known is not None:
                ids += known[0]
                facts.append(known[1])
                continue
            fields = _fields(value, facts, ids, pending)
        else:
            facts.append(kind)
        attrs = value.__dict__ if fields else {}
        for name, counts in fields:
            part = attrs[name]
            kind = type(part)
            if kind in _PLAIN:
                facts.append(size_class(part) if counts and kind is int and part > EXACT else part)
            elif isinstance(part, Tensor):
                ids.append(id(part))
                shape: tuple[int, ...] = part.shape
                if shape and max(shape) > EXACT:
                    shape = tuple(map(size_class, shape)) if counts else shape_class(shape)
                facts += (part.dtype, part.requires_grad, shape)
            elif kind is float:
                facts += (kind, part if part and part == part else repr(part))  # 0.0 is not -0.0, and nan is nan
            elif kind is NormalizedWeights:
                facts += (kind, part.normalize, part.weighted, part.dtype)
            elif kind in LAZY:
                x, *others = part
                shape = shape_class(x.shape) if x.shape and max(x.shape) > EXACT else x.shape
                facts += (kind, x.dtype, x.requires_grad, shape)
                for other in others:
                    facts += (other.shape, other.dtype, other.requires_grad) if isinstance(other, Tensor) else (other,)
            else:
                facts.append(...)
                pending.append(part)
    if len(ids) > 1:
        facts += map(ids.index, ids)
    return tuple(facts)


#: Types that are their own key: no two values of them are equal that differ.
_PLAIN = VALUES - {bool}
#: The fields of each type in the tree, and whether a field is a number of entries, or a tensor whose last axis counts
#: entries.
_NODES: dict[type, tuple[tuple[str, bool], ...]] = {}


def _fields(value: Any, facts: list[Any], ids: list[int], pending: list[Any]) -> tuple[tuple[str, bool], ...]:
    """The fields of a value of a type that is new; none, with its facts noted, if its fields are not walked through."""
    kind, names = type(value), field_names(value)
    if kind in LAZY or isinstance(value, Tensor):
        ids.append(id(value))
        computed = materialized(value)
        facts += (key_of(computed), computed.requires_grad)
    elif isinstance(value, Basis) and names and not value.keeps_key:
        _NODES[kind] = tuple((name, name in value.ENTRY_COUNTS) for name in names)
        facts.append(kind)
        return _NODES[kind]
    elif isinstance(value, EdgeSupport | Padding | DenseMask):
        _NODES[kind] = tuple((name, True) for name in names)
        facts.append(kind)
        return _NODES[kind]
    else:
        key = key_of(value)
        if isinstance(value, FrozenValue):
            own_ids = id(value), *map(id, tensors_in(value))
            ids += own_ids
            if type(value) is not Function:
                value.__dict__["_known_key"] = own_ids, key
        facts.append(key)
    return ()


def tree_spec(value: Any, get: Get, specs: _Specs | None = None) -> Any:
    """The value with a `Leaf` in place of each tensor; `get` finds the value in the basis of a call. A part that occurs
    twice in the value becomes one part of the spec."""
    specs = {} if specs is None else specs
    if id(value) not in specs:
        specs[id(value)] = value, _stand_in(value, get, specs)
    return specs[id(value)][1]


def _stand_in(value: Any, get: Get, specs: _Specs) -> Any:
    if isinstance(value, Tensor | Leaf):
        return Leaf(get, value, value.shape)
    if type(value) in LAZY:
        return Leaf(get, value.x, value.shape, lazy=True)
    if isinstance(value, tuple | list):
        items = [tree_spec(item, _item(get, i), specs) for i, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if not isinstance(value, FrozenValue):
        return value
    if type(value) is Function:
        stub = Function(None)
        stub.__dict__["_get"] = get
        return stub
    return _spec_over(value, {}, get, specs)


def _spec_over(value: Any, changed: dict[str, Any], get: Get, specs: _Specs) -> Any:
    """The spec of a value with some fields changed; `get` finds the value in a basis."""
    spec = object.__new__(_GraphSpec) if type(value) is Graph else copy.copy(value)
    by_name = dict(zip(field_names(value), fields(value), strict=True)) if field_names(value) else vars(value)
    for name, field in {**by_name, **changed}.items():
        spec.__dict__[name] = tree_spec(field, _attribute(get, name), specs)
    spec.__dict__["_get"] = get
    return spec


def getter(value: Any) -> Get:
    """Return the function (basis of a call) -> the value that this part of a spec describes.

    While a program is traced, a spec is the basis itself, and the function returns the given part.

    Example:

        >>> from structconv.bases import Dense
        >>> from structconv.bases.tree import getter, itself, tree_spec
        >>> spec = tree_spec(Dense(torch.ones(1, 2, 3)), itself)   # `problem.basis`, in `Kernel.match`
        >>> get = getter(spec.a)
        >>> get(Dense(torch.full((1, 2, 3), 5.0)))[0, 0]           # `call.basis`, in what a kernel compiles
        tensor([5., 5., 5.])
    """
    if isinstance(value, Leaf):
        return value.get
    known = _own(value)
    return (lambda basis: value) if known is None else known


def materializer(spec: Any) -> Get:
    """Return the function (basis of a call) -> the value that this part of a spec describes, all products computed."""
    if is_compiling():
        return lambda basis: spec
    known = spec.get if isinstance(spec, Leaf) else _own(spec)
    if known is not None:
        if not _holds(spec, lazy=True):
            return known
        computed = _computing(spec)
        return lambda basis: computed(known(basis))
    if isinstance(spec, tuple | list):
        items = [materializer(item) for item in spec]
        return lambda basis: tuple(fill(basis) for fill in items)
    if not isinstance(spec, FrozenValue) or not _holds(spec):
        return lambda basis: spec
    named = zip(field_names(spec), fields(spec), strict=True)
    parts = {name: materializer(field) for name, field in named if _holds(field)}
    alter = alterer(spec)
    return lambda basis: alter({name: fill(basis) for name, fill in parts.items()})


def _computing(spec: Any) -> Get:
    """The function from a value that a part of a spec describes, and which holds products, to the value with these
    computed."""
    if isinstance(spec, Leaf):
        return tensor
    kind, names = type(spec), field_names(spec)
    if isinstance(spec, tuple | list) or hasattr(kind, "__post_init__"):
        return materialized
    fills = [(name, _computing(part)) for name in names if _holds(part := spec.__dict__[name], lazy=True)]

    def computed(value: Any) -> Any:
        attrs, new = value.__dict__, object.__new__(kind)
        own = new.__dict__
        for name in names:
            own[name] = attrs[name]
        for name, fill in fills:
            own[name] = fill(attrs[name])
        return new

    return computed


def _own(value: Any) -> Get | None:
    """The function that finds the value of a part of a spec in the basis of a call; `None` if it has none."""
    noted = isinstance(value, FrozenValue) and not is_compiling()
    return value.__dict__.get("_get") if noted else None


def _holds(spec: Any, lazy: bool = False) -> bool:
    """Return True if a part of a spec holds a `Leaf`, or with `lazy` one of a product that is not computed yet."""
    if isinstance(spec, Leaf):
        return spec.lazy or not lazy
    if not lazy and _own(spec) is not None:
        return True
    return any(_holds(part, lazy) for part in (spec if isinstance(spec, tuple | list) else fields(spec)))


class _GraphSpec(Graph):
    """The part of a spec for a graph."""

    def reversed(self) -> Graph:
        get = self.__dict__["_get"]
        sizes = {"num_inputs": self.num_outputs, "num_outputs": self.num_inputs}
        return self.__dict__.setdefault(
            "_reversed", _spec_over(self, sizes, lambda basis: get(basis).reversed(), {}))


def _item(get: Get, index: int) -> Get:
    return lambda basis: get(basis)[index]


def itself(basis: Any) -> Any:
    """The whole basis of a call."""
    return basis


def _attribute(get: Get, name: str) -> Get:
    """The function that gets an attribute; a chain of attributes is one `attrgetter`, which is faster."""
    if get is itself:
        return attrgetter(name)
    if isinstance(get, attrgetter):
        return attrgetter(f"{get.__reduce__()[1][0]}.{name}")
    if isinstance(get, _Below):
        return _Below(get.get, cast("attrgetter[Any]", _attribute(get.attributes, name)))
    return _Below(get, attrgetter(name))


class _Below:
    """The function that gets a chain of attributes of a part that `get` finds."""

    __slots__ = ("attributes", "get")

    def __init__(self, get: Get, attributes: attrgetter[Any]) -> None:
        self.get, self.attributes = get, attributes

    def __call__(self, basis: Any) -> Any:
        return self.attributes(self.get(basis))
