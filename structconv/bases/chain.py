"""`Chain`: an expression of nodes over one child each, as what it makes of whatever stands at its end.

Building an expression from a mechanism resolves options and checks sizes, node by node. Where only the numbers of its
last child differ, the same nodes over another child are the same expression.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from structconv.bases.algebra import draw_seed
from structconv.bases.base import Basis
from structconv.bases.linear import Scaled
from structconv.bases.pairwise import Dropped, LeakyReLU, Mapped, Masked, Normalised

#: Nodes over one child, whose other fields are options.
NODES = frozenset((Dropped, LeakyReLU, Mapped, Masked, Normalised, Scaled))
_Value = TypeVar("_Value")


class Chain(NamedTuple):
    """The nodes from the root down, without what they stand on, and without the seed of a dropout."""

    nodes: tuple[Basis, ...]

    @classmethod
    def of(cls, basis: Basis) -> tuple[Chain, Basis]:
        """The chain of a basis, perhaps an empty one, and what is at its end."""
        nodes: list[Basis] = []
        while type(basis) in NODES:
            forgotten = {"seed": None} if type(basis) is Dropped else {}
            nodes.append(altered(basis, child=None, **forgotten))
            basis = basis.child  # type: ignore[attr-defined]
        return cls(tuple(nodes)), basis

    def over(self, leaf: Basis) -> tuple[Basis, Tensor | None]:
        """The expression over another leaf of the same type and shapes, and the seed of its dropout, drawn anew."""
        basis, seed = leaf, None
        for node in reversed(self.nodes):
            if type(node) is Dropped:
                seed = draw_seed()
                basis = altered(node, child=basis, seed=seed)
            else:
                basis = altered(node, child=basis)
        return basis, seed


def altered(value: _Value, **fields: Any) -> _Value:
    """The same frozen value with other fields, which are taken to be as good as those that they replace."""
    made = object.__new__(type(value))
    made.__dict__.update(value.__dict__)
    made.__dict__.update(fields)
    return made
