"""The leaves of an expression: the modules that hold its parameters, their roles, and others in their places.

An expression is a tree of nodes (`Operation`, `Mixture`), which have no parameters, over leaves, which may: mechanisms,
masks, factors, mixings and modules of `map`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.mixture import Mixture
from structconv.mechanisms.operations import Operation

__all__ = ["is_node", "leaves_of", "over_leaves", "role_of"]

#: The role of a module that is no part of the package, as the function of a map.
_FOREIGN = "map"


def is_node(module: Any) -> bool:
    """Return True for a part of an expression that only joins others, or takes steps on what they make."""
    return isinstance(module, Operation | Mixture)


def leaves_of(expression: nn.Module) -> list[nn.Module]:
    """The leaves of an expression in the order in which they stand, each once."""
    found: dict[int, nn.Module] = {}
    pending = [expression]
    while pending:
        part = pending.pop()
        if is_node(part):
            pending.extend(reversed([child for _, children in _held(part) for child in children]))
        else:
            found.setdefault(id(part), part)
    return list(found.values())


def _held(node: nn.Module) -> list[tuple[str, list[Any]]]:
    """The lists of modules that a node has, by name; one module may stand in two places."""
    return [(name, list(held._modules.values())) for name, held in node._modules.items() if held is not None]


def role_of(leaf: nn.Module) -> str:
    """The name that a layer has for a leaf: its `role`, for example "attention", or else its class in snake case."""
    role: str = getattr(leaf, "role", "")
    if role or not isinstance(leaf, Mechanism):
        return role or _FOREIGN
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(leaf).__name__).lower()


def over_leaves(expression: Any, leaves: Mapping[int, nn.Module | None], training: bool) -> Any:
    """The expression over other leaves, given by the `id` of those that it has. Its nodes are new, and in this mode."""
    made: dict[int, nn.Module | None] = dict(leaves)

    def over(part: Any) -> Any:
        if id(part) not in made:
            node = object.__new__(type(part))
            made[id(part)] = node
            held = {name: nn.ModuleList(map(over, children)) for name, children in _held(part)}
            node.__dict__.update({**part.__dict__, "_modules": held, "training": training})
        return made[id(part)]

    return over(expression)
