"""`Expressed`: a layer over an expression of mechanisms; the leaves are its children, under their own names.

An expression is a tree. Its nodes (`Operation`, `Mixture`) have no parameters. Its leaves may have some: mechanisms,
masks, factors, mixings and the modules of `map`. The layer registers the leaves as its own children, named by role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from structconv.mechanisms.expression import Mechanism, Position, check_mechanism
from structconv.mechanisms.mixture import Mixture
from structconv.mechanisms.operations import Operation
from structconv.nn.direct import Direct, DirectStep, direct_of, step_of
from structconv.nn.layer import Layer
from structconv.planning.plan import check_path

__all__ = ["Expressed", "children_of_expression"]

#: Tensors of masks, which a file may have though the layer has no such mask.
_OF_MASKS = re.compile(r"(mask(?:_\d+)?)\.mask\d+")
#: The role of a module from outside the package, such as the function of a `map`.
_FOREIGN = "map"


def is_node(module: Any) -> bool:
    """Return True for a part of an expression that joins other parts, or applies steps to their bases."""
    return isinstance(module, Operation | Mixture)


def leaves_of(expression: nn.Module) -> list[nn.Module]:
    """The leaves of an expression in order, each once."""
    result: dict[int, nn.Module] = {}
    pending = [expression]
    while pending:
        part = pending.pop()
        if is_node(part):
            pending.extend(reversed([child for _, children in _child_lists(part) for child in children]))
        else:
            result.setdefault(id(part), part)
    return list(result.values())


def _child_lists(node: nn.Module) -> list[tuple[str, list[Any]]]:
    """Return the name of each child module with the list of its own children. A module may be in two lists."""
    return [(name, list(parts._modules.values())) for name, parts in node._modules.items() if parts is not None]


def role_of(leaf: nn.Module) -> str:
    """The name of a leaf in a layer: its `_role`, for example "attention", or else its class in snake case."""
    role: str = getattr(leaf, "_role", "")
    if role or not isinstance(leaf, Mechanism):
        return role or _FOREIGN
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(leaf).__name__).lower()


class Link(NamedTuple):
    """An attribute of a leaf that is a child of another leaf, for example a predicted position that both use.

    Fields, all names: the leaf and its attribute; the leaf that holds the module, and the child there.
    """

    leaf: str
    attribute: str
    holder: str
    child: str

    def module(self, leaves: Mapping[str, Any]) -> nn.Module | None:
        """The module that the holder has now; `None` if the holder was replaced by a module without such a child."""
        return getattr(leaves.get(self.holder), self.child, None)

    def holds(self, leaves: Mapping[str, Any]) -> bool:
        """Return True if the leaf uses the module that the holder has now."""
        module = self.module(leaves)
        return module is None or leaves[self.leaf].__dict__.get(self.attribute) is module

    def renew(self, leaves: Mapping[str, Any]) -> None:
        """Let the leaf use the module that the holder has now."""
        module = self.module(leaves)
        if module is not None and leaves.get(self.leaf) is not None:
            leaves[self.leaf].__dict__[self.attribute] = module


def link(leaves: Sequence[tuple[str, nn.Module]]) -> tuple[Link, ...]:
    """Make a module that several leaves share a child of only the first, so that its parameters have one name."""
    first: dict[int, tuple[str, str]] = {}
    links = []
    for name, leaf in leaves:
        referred = {key: part for key, part in leaf.__dict__.items() if isinstance(part, Position)}  # of earlier links
        for key, part in {**leaf._modules, **referred}.items():
            if part is None:
                continue
            holder = first.setdefault(id(part), (name, key))
            if holder[0] == name:
                leaf.__dict__.pop(key, None)
                leaf._modules[key] = part
            else:
                leaf._modules.pop(key, None)
                leaf.__dict__[key] = part
                links.append(Link(name, key, *holder))
    return tuple(links)


def over_leaves(expression: Any, leaves: Mapping[int, nn.Module | None], training: bool) -> Any:
    """The expression with new nodes, in this mode, over other leaves, which are found by the `id` of the old ones."""
    copies: dict[int, nn.Module | None] = dict(leaves)

    def over(part: Any) -> Any:
        if id(part) not in copies:
            node = object.__new__(type(part))
            copies[id(part)] = node
            new = {name: nn.ModuleList(map(over, children)) for name, children in _child_lists(part)}
            node.__dict__.update({**part.__dict__, "_modules": new, "training": training, "_known_in_layer": True})
            node.__dict__.pop("_known_parts", None)
        return copies[id(part)]

    return over(expression)


class _Expression(NamedTuple):
    """An expression, its leaves by their names in the layer, the modules that they share, the mode of its nodes, and
    its direct calls."""

    root: Mechanism
    leaves: tuple[tuple[str, nn.Module | None], ...]
    links: tuple[Link, ...]
    training: bool
    direct: Direct | None = None
    step: DirectStep | None = None


class Expressed(Layer):
    """A layer whose parameters are named by their roles: `attention.query.weight`, `position_bias.table`.

    The leaves of its expression are its children, each by its role, with a number if a role occurs twice (`mask_1`):
    adding dropout, a mask, a scale or another term changes no name. The nodes are no children; they are built again
    when a leaf is replaced or the mode changes.
    """

    @property
    def mechanism(self) -> Mechanism:
        """The expression over the leaves that are registered now."""
        own = self.__dict__
        expression, modules = own["_expression"], own["_modules"]
        if expression.training is not own["training"]:
            return self._renewed()
        for name, leaf in expression.leaves:
            if modules.get(name) is not leaf:
                return self._renewed()
        for shared in expression.links:
            if not shared.holds(modules):
                return self._renewed()
        root: Mechanism = expression.root
        return root

    @mechanism.setter
    def mechanism(self, mechanism: Mechanism) -> None:
        """Register the leaves of an expression as children, instead of those of the expression before."""
        check_mechanism(type(self).__name__, mechanism)
        for name, _ in self.__dict__["_expression"].leaves if "_expression" in self.__dict__ else ():
            self._modules.pop(name, None)
        named = []
        for leaf in leaves_of(mechanism):
            name = self._free_name(role_of(leaf))
            self.add_module(name, leaf)
            named.append((name, leaf))
        self.__dict__["_expression"] = _Expression(mechanism, tuple(named), link(named), not self.training)
        self._renewed()

    def _directly(self, x: Any, structure: Any = None) -> Tensor | None:
        """The result of a small call that needs no plan, else `None`; see `nn.direct`."""
        own = self.__dict__
        if own["_expression"].direct is None or type(x) is not Tensor or is_compiling():
            return None
        if x.layout is not torch.strided or x.is_nested:
            return None
        self.mechanism  # noqa: B018 - renewed if a leaf was replaced
        direct = own["_expression"].direct
        return None if direct is None else direct(self, x, structure)

    def _directly_others(self, x: Any, z: Tensor) -> Tensor | None:
        """`_directly` for few outputs z that are not among x, a tensor or a `Cache`."""
        own = self.__dict__
        if own["_expression"].step is None or type(z) is not Tensor or is_compiling():
            return None
        self.mechanism  # noqa: B018 - as above
        step = own["_expression"].step
        return None if step is None else step(self, x, z)

    def _renewed(self) -> Mechanism:
        """Return the mechanism with its own nodes, because the current ones may belong to another replica."""
        own = self.__dict__
        (root, leaves, links, *_), modules, training = own["_expression"], own["_modules"], own["training"]
        for shared in links:
            shared.renew(modules)
        root = over_leaves(root, {id(leaf): modules.get(name) for name, leaf in leaves}, training)
        direct = direct_of(root)
        own["_expression"] = _Expression(root, tuple((name, modules.get(name)) for name, _ in leaves), links,
                                         training, direct, step_of(root, direct))
        return root

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_expression" in self.__dict__:
            self._renewed()  # a copied node has none of the notes about its parts

    def _free_name(self, role: str) -> str:
        """The role, with a number if the name is in use."""
        name, number = role, 0
        while (name in self.fixed or name in self.__dict__ or name in self._modules or name in self._parameters
               or name in self._buffers or hasattr(type(self), name)):
            number += 1
            name = f"{role}_{number}"
        return name

    def train(self, mode: bool = True) -> Self:
        """Set the mode, also that of the steps of the expression, such as dropout."""
        super().train(mode)
        self.mechanism  # noqa: B018 - renewed here rather than in a call, which a compiler may trace
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "mechanism":  # torch would register the expression as a child, without the setter
            object.__setattr__(self, name, value)
            return
        if name == "path" and isinstance(value, str):
            check_path(type(self).__name__, value)
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) and "_expression" in self.__dict__:
            self.mechanism  # noqa: B018 - renewed here, as by `train`

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load as any module does, without the tensors of masks that the layer no longer has."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            match = _OF_MASKS.fullmatch(key, len(prefix))
            if match and match[1] not in self._modules:
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """The expression, unless it is a single leaf, which is shown as a child."""
        return repr(self.mechanism) if is_node(self.mechanism) else ""


def children_of_expression(layer: Expressed) -> dict[str, nn.Module | None]:
    """The leaves of the layer's expression by the names of these children."""
    return dict(layer.__dict__["_expression"].leaves)
