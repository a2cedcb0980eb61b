"""`collate`: samples with structures as one batch, for `torch.utils.data.DataLoader`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from structconv.errors import StructureError
from structconv.structures.batching import batch
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid
from structconv.structures.relations import KnowledgeGraph

__all__ = ["collate"]

_BATCHED = Graph | KnowledgeGraph | Grid
_SIZES = ("num_inputs", "num_outputs", "num_edges", "num_entities", "num_triples", "num_entries")


def collate(samples: Sequence[Any], *, stacked: Collection[str | int] = ()) -> Any:
    """Samples as one: `DataLoader(dataset, batch_size, collate_fn=structconv.collate)`.

    A sample is a tensor, a structure, or a tuple, a list or a mapping of such. Structures become one `batch`; tensors
    that have a row for each entry or edge of the sample's structure, x (..., M, P) or numbers (M,), are concatenated
    along these rows. All else is stacked as `torch.utils.data.default_collate` does. Where all samples share one
    graph, or have equal grids, this structure itself comes back, and x is stacked to (B, M, P).

    Args:
        samples: of one kind.
        stacked: keys or places of tensors that are stacked whatever their sizes, as a label of M numbers is.

    Raises:
        StructureError: no samples, samples of different kinds, structures that `batch` refuses.
    """
    if not samples:
        raise StructureError("collate", "samples must be one or more", "none")
    return _collated(list(samples), _counts(list(samples)), frozenset(stacked))


def _collated(items: list[Any], counts: list[dict[str, int]], stacked: frozenset[Any]) -> Any:
    """The items that stand at one place of the samples as one."""
    first = items[0]
    if any(isinstance(item, _BATCHED) != isinstance(first, _BATCHED) for item in items):
        raise StructureError("collate", "samples must be of one kind", ", ".join(
            sorted({type(item).__name__ for item in items})))
    if isinstance(first, _BATCHED):
        return first if _shared(items) else batch(items)
    if isinstance(first, Tensor):
        rows = -2 if first.dim() > 1 else 0
        return torch.cat(items, rows) if _has_rows(items, rows, counts) else torch.stack(items)
    if isinstance(first, Mapping):
        return {key: _placed(key, [item[key] for item in items], counts, stacked) for key in first}
    if isinstance(first, tuple | list):
        parts = [_placed(place, list(column), counts, stacked)
                 for place, column in enumerate(zip(*items, strict=True))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return torch.utils.data.default_collate(items)


def _placed(place: Any, items: list[Any], counts: list[dict[str, int]], stacked: frozenset[Any]) -> Any:
    return _collated(items, [{} for _ in items] if place in stacked else counts, stacked)


def _shared(items: list[Any]) -> bool:
    """Whether one structure serves all samples."""
    return all(item is items[0] or (isinstance(item, Grid) and item == items[0]) for item in items)


def _has_rows(items: list[Tensor], rows: int, counts: list[dict[str, int]]) -> bool:
    """Whether each tensor has a row for each entry, or each edge, of its sample's structure."""
    if not items[0].dim():
        return False
    names = set.intersection(*(set(count) for count in counts))
    return any(all(item.shape[rows] == count[name] for item, count in zip(items, counts, strict=True))
               for name in names)


def _counts(samples: list[Any]) -> list[dict[str, int]]:
    """How many entries and edges the structures of each sample have, but for those that all samples share."""
    found: list[dict[str, int]] = [{} for _ in samples]
    columns = itertools.zip_longest(*map(_structures, samples))
    for number, column in enumerate(columns):
        if not _shared(list(column)):
            for count, structure in zip(found, column, strict=True):
                count.update({f"{name} {number}": getattr(structure, name) for name in _SIZES
                              if hasattr(structure, name)})
    return found


def _structures(sample: Any) -> Iterator[Any]:
    if isinstance(sample, _BATCHED):
        yield sample
    parts = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple | list) else ()
    for part in parts:
        yield from _structures(part)
