"""`of_samples`: select elements of a batch in a structure whose tensors have leading dimensions."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from structconv.errors import StructureError
from structconv.structures.graph import Graph
from structconv.structures.output_positions import OutputPositions
from structconv.structures.supports import DenseMask, Padding
from structconv.structures.values import FrozenValue, altered, field_names, fields
from structconv.structures.windows import Window

__all__ = ["of_samples"]

#: Axes of a tensor after those of the batch.
_RANKS: dict[type, dict[str, int]] = {Padding: {"keep": 1}, DenseMask: {"keep": 2}, Window: {"center": 1},
                                      OutputPositions: {"positions": 1}, Graph: {"edge_weight": 1, "edge_attr": 2}}


def of_samples(structure: Any, index: Tensor, lead: int) -> Any:
    """The structure of a call, or those by name, with element index[b] of the batch as element b, (B,) integers;
    unchanged if all elements share it. x has `lead` leading dimensions; those of a structure must be known."""
    if isinstance(structure, dict):
        return {name: of_samples(own, index, lead) for name, own in structure.items()}
    if not isinstance(structure, FrozenValue):
        return structure
    values = dict(zip(field_names(structure), fields(structure), strict=True))
    ranks = _RANKS.get(type(structure))
    if ranks is not None:
        own = {name: values[name] for name, rank in ranks.items() if _has_parts(values[name], rank, lead)}
        new = {name: t.index_select(0, index.to(t.device)) for name, t in own.items()}
        return altered(structure, **new) if new else structure
    inside = {name: value for name, value in values.items() if isinstance(value, FrozenValue)}
    shape: tuple[int, ...] = getattr(structure, "batch_shape", ())
    if not inside and len(shape) == lead and shape[0] != 1:
        raise StructureError(type(structure).__name__, "a structure with a part for each element of a batch must be "
                             "given again in each call once they are reordered", repr(structure), "Give structure= in "
                             "each call.")
    changed = {name: of_samples(value, index, lead) for name, value in inside.items()}
    return altered(structure, **changed) if any(changed[name] is not inside[name] for name in inside) else structure


def _has_parts(values: Any, rank: int, lead: int) -> bool:
    """Return True if the tensor has a part for each element of the batch."""
    return isinstance(values, Tensor) and values.dim() - rank == lead and values.shape[0] != 1
