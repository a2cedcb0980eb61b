"""`Expressed`: a layer over an expression of mechanisms; the leaves are its children, under their own names."""

from __future__ import annotations

import re
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from structconv.mechanisms.expression import Mechanism, check_mechanism
from structconv.mechanisms.leaves import Link, is_node, leaves_of, link, over_leaves, role_of
from structconv.nn.direct import Direct, direct_of
from structconv.nn.layer import Layer
from structconv.planning.plan import check_path

__all__ = ["Expressed", "children_of_expression"]

#: Tensors of masks, which a file may have though the layer has no such mask.
_OF_MASKS = re.compile(r"(mask(?:_\d+)?)\.mask\d+")


class _Expression(NamedTuple):
    """An expression, its leaves by the names that the layer has for them, what they share, the mode of its nodes, and
    its direct call."""

    root: Mechanism
    leaves: tuple[tuple[str, nn.Module | None], ...]
    links: tuple[Link, ...]
    training: bool
    direct: Direct | None = None


class Expressed(Layer):
    """A layer whose parameters are named by what they are for: `attention.query.weight`, `position_bias.table`. The
    leaves of its expression are its children, each by its role, with a number where a role occurs twice (`mask_1`):
    neither dropout, nor a mask, a scale or another term changes the name of what is there already. The nodes are no
    children; they are made again when a leaf is replaced, or the mode changes."""

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
        self._express(mechanism)

    def _directly(self, x: Any, structure: Any = None) -> Tensor | None:
        """The result of a small call that needs no plan, if this is one; see `nn.direct`."""
        own = self.__dict__
        if own["_expression"].direct is None or type(x) is not Tensor or is_compiling():
            return None
        if x.layout is not torch.strided or x.is_nested:
            return None
        self.mechanism  # noqa: B018 - renewed if a leaf was replaced
        direct = own["_expression"].direct
        return None if direct is None else direct(self, x, structure)

    def _renewed(self) -> Mechanism:
        """Return the mechanism with its own nodes, because the current ones may belong to another replica."""
        own = self.__dict__
        (root, leaves, links, *_), modules, training = own["_expression"], own["_modules"], own["training"]
        for shared in links:
            shared.renew(modules)
        root = over_leaves(root, {id(leaf): modules.get(name) for name, leaf in leaves}, training)
        own["_expression"] = _Expression(root, tuple((name, modules.get(name)) for name, _ in leaves), links,
                                         training, direct_of(root))
        return root

    def _express(self, mechanism: Any) -> None:
        """Take the leaves of an expression as children, in the place of those of the one before."""
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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_expression" in self.__dict__:
            self._renewed()  # a copy of a node notes nothing of its parts

    def _free_name(self, role: str) -> str:
        """The role, with a number if there is something of that name."""
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
        if name == "mechanism":  # torch would make a module a child, whatever the setter
            self._express(value)
            return
        if name == "path" and isinstance(value, str):
            check_path(type(self).__name__, value)
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) and "_expression" in self.__dict__:
            self.mechanism  # noqa: B018 - renewed here, as by `train`

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Load as any module does. Tensors of masks that are not there any more are left out."""
        for key in [key for key in state_dict if key.startswith(prefix)]:
            match = _OF_MASKS.fullmatch(key, len(prefix))
            if match and match[1] not in self._modules:
                del state_dict[key]
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        """The expression, where it is more than the leaf among the children."""
        return repr(self.mechanism) if is_node(self.mechanism) else ""


def children_of_expression(layer: Expressed) -> dict[str, nn.Module | None]:
    """The leaves of the layer's expression by the names of these children."""
    return dict(layer.__dict__["_expression"].leaves)
