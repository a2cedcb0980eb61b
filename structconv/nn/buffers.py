"""`StructureBuffer`: a structure that belongs to a module like a buffer."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

from torch import Tensor, nn

from structconv.arguments import checked
from structconv.errors import ConfigError
from structconv.structures.values import FrozenValue, field_names, fields, map_tensors

__all__ = ["StructureBuffer"]

S = TypeVar("S", bound=FrozenValue)


class StructureBuffer(nn.Module, Generic[S]):
    """A graph, or another structure, as a part of a module; a call returns the structure.

    Its tensors are buffers under the names of the structure's fields, `edge_index`, `edge_weight`, ...: they move and
    are cast by `.to()`, saved in `state_dict`, loaded (of the same number of edges), and copied. A structure that is a
    plain attribute of a module is pickled with it, and neither moves nor is part of its `state_dict`.

        self.graph = StructureBuffer(graph)
        ... self.conv(x, self.graph())

    Args:
        structure: a `Graph`, a `KnowledgeGraph`, a `Grid`, a batch of them, or a support.
        persistent: whether its tensors are in `state_dict`.

    Example:

        >>> from structconv import Grid
        >>> from structconv.nn import StructureBuffer
        >>> held = StructureBuffer(Grid((2, 2)).graph())
        >>> sorted(held.state_dict()), held()
        (['edge_index'], Graph(M=4, N=4, E=8, int64))
    """

    @checked
    def __init__(self, structure: S, persistent: bool = True) -> None:
        super().__init__()
        if not isinstance(structure, FrozenValue):
            raise ConfigError("StructureBuffer", "structure must be a structure", type(structure).__name__)
        self._structure = structure
        for name, tensor in _named(structure):
            self.register_buffer(name, tensor.clone(), persistent)  # its own: a file is read into it

    def forward(self) -> S:
        """Return the structure over the current buffers: the same object until a buffer is replaced."""
        held = iter(list(self._buffers.values()))
        self._structure = cast(S, map_tensors(self._structure, lambda t: next(held)))
        return self._structure

    def extra_repr(self) -> str:
        return repr(self._structure)


def _named(value: Any) -> list[tuple[str, Tensor]]:
    """Return the tensors of a value by field name; names of nested values follow the name of their field."""
    tensors: list[tuple[str, Tensor]] = []
    for name, field in zip(field_names(value), fields(value), strict=True):
        inside = [("", field)] if isinstance(field, Tensor) else []
        for i, part in enumerate(field if isinstance(field, tuple) else (field,)):
            nested = _named(part) if isinstance(part, FrozenValue) else []
            inside += [(f"{i}_{inner}" if isinstance(field, tuple) else inner, t) for inner, t in nested]
        tensors += [(f"{name}_{inner}".rstrip("_"), t) for inner, t in inside]
    return tensors
