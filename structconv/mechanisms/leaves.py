"""The leaves of an expression: the modules that hold its parameters, their names, and their replacement.

An expression is a tree. Its nodes (`Operation`, `Mixture`) have no parameters. Its leaves may have some: mechanisms,
masks, factors, mixings and the modules of `map`. A layer registers the leaves as its own children, named by role.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from structconv.mechanisms.expression import Mechanism, Position
from structconv.mechanisms.mixture import Mixture
from structconv.mechanisms.operations import Operation

__all__ = ["Link", "is_node", "leaves_of", "link", "over_leaves", "role_of"]

#: The role of a module that is no part of the package, as the function of a map.
_FOREIGN = "map"


def is_node(module: Any) -> bool:
    """Return True for a part of an expression that only joins others, or takes steps on what they make."""
    return isinstance(module, Operation | Mixture)


def leaves_of(expression: nn.Module) -> list[nn.Module]:
    """The leaves of an expression in the order in which they stand, each once."""
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
    """The lists of modules that a node has, by name; one module may stand in two places."""
    return [(name, list(parts._modules.values())) for name, parts in node._modules.items() if parts is not None]


def role_of(leaf: nn.Module) -> str:
    """The name that a layer has for a leaf: its `_role`, for example "attention", or else its class in snake case."""
    role: str = getattr(leaf, "_role", "")
    if role or not isinstance(leaf, Mechanism):
        return role or _FOREIGN
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(leaf).__name__).lower()


class Link(NamedTuple):
    """An attribute of a leaf that is a child of another leaf, one predicted position of both for example. All four are
    names: of the leaf and its attribute, of the leaf that holds the module and of the child there."""

    leaf: str
    attribute: str
    holder: str
    child: str

    def module(self, leaves: Mapping[str, Any]) -> nn.Module | None:
        """The module that the holder has now; `None` if another module without such a child is in its place."""
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
    """Make a module that several leaves have the child of the first alone, so that its parameters have one name."""
    first: dict[int, tuple[str, str]] = {}
    links = []
    for name, leaf in leaves:
        referred = {key: part for key, part in leaf.__dict__.items() if isinstance(part, Position)}  # in a layer before
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
    """The expression over other leaves, given by the `id` of those that it has. Its nodes are new, and in this mode."""
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
