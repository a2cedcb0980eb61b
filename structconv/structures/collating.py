"""`collate`: samples with structures as one batch, for `torch.utils.data.DataLoader`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from structconv.errors import ConfigError, StructureError
from structconv.structures.batching import batch, is_batchable
from structconv.structures.samples import Samples
from structconv.structures.values import FrozenValue, fields

__all__ = ["collate"]

_SIZES = ("num_inputs", "num_outputs", "num_edges", "num_entities", "num_triples", "num_entries")


def collate(samples: Sequence[Any], *, stacked: Collection[str | int] = (), shared: Collection[str | int] = ()) -> Any:
    """Join samples into one: `DataLoader(dataset, batch_size, collate_fn=structconv.collate)`.

    A sample is a tensor, a structure, or a tuple, a list or a mapping of such. Structures become one `batch`, a single
    one too; tensors that have a row for each entry or edge of the sample's structure, x (..., M, P) or numbers (M,),
    are concatenated along these rows. All else is stacked as `torch.utils.data.default_collate` does.

    If one structure serves the whole dataset, name it in `shared`: the result has it unchanged, and x is stacked to
    (B, M, P). Nothing else is shared, so that the ranks of the result depend neither on the number of samples nor on
    whether two samples are the same object.

    Args:
        samples: of one kind.
        stacked: keys or positions of tensors that are always stacked, for example a label of M numbers.
        shared: keys or positions of structures that are the same in all samples.

    Raises:
        StructureError: no samples, samples of different kinds, structures that `batch` refuses, or `shared` ones that
            differ.
        ConfigError: a name in `stacked` or `shared` that samples do not have.

    ::

        DataLoader(dataset, batch_size, collate_fn=functools.partial(collate, shared=("graph",)))

    Example:

        >>> from structconv import Grid, collate
        >>> x, graph = collate([(torch.randn(4, 8), Grid((2, 2)).graph()), (torch.randn(9, 8), Grid((3, 3)).graph())])
        >>> x.shape, graph.num_nodes
        (torch.Size([13, 8]), 13)
    """
    if not samples:
        raise StructureError("collate", "samples must be one or more", "none")
    items = list(samples)
    known = _names(items[0])
    for option, names in (("stacked", stacked), ("shared", shared)):
        if unknown := [name for name in names if name not in known]:
            raise ConfigError("collate", f"{option} must have keys or positions of a sample, "
                              f"{', '.join(map(repr, known)) or 'which has none'}", ", ".join(map(repr, unknown)))
    names_of_shared = frozenset(shared)
    return _collated(items, _counts(items, names_of_shared), frozenset(stacked), names_of_shared)


def _collated(items: list[Any], counts: list[dict[str, int]], stacked: frozenset[Any], shared: frozenset[Any]) -> Any:
    """Join the items at one place of the samples."""
    first = items[0]
    if any(_is_batched(item) != _is_batched(first) for item in items):
        raise StructureError("collate", "samples must be of one kind", ", ".join(
            sorted({type(item).__name__ for item in items})))
    if _is_batched(first):
        return batch(items)
    if isinstance(first, Tensor):
        rows = -2 if first.dim() > 1 else 0
        return torch.cat(items, rows) if _has_rows(items, rows, counts) else torch.stack(items)

    def of(place: Any, column: list[Any]) -> Any:
        if place in shared:
            return _check_shared(place, column)
        return _collated(column, [{} for _ in column] if place in stacked else counts, stacked, shared)

    if isinstance(first, Mapping):
        if any(item.keys() != first.keys() for item in items):
            raise StructureError("collate", "all samples must have the same keys", ", ".join(
                sorted({repr(list(item)) for item in items})))
        return {key: of(key, [item[key] for item in items]) for key in first}
    if isinstance(first, tuple | list):
        if any(len(item) != len(first) for item in items):
            raise StructureError("collate", "all samples must have the same number of parts", ", ".join(
                map(str, sorted({len(item) for item in items}))))
        parts = [of(place, list(column)) for place, column in enumerate(zip(*items, strict=True))]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    return torch.utils.data.default_collate(items)


def _names(sample: Any) -> list[str | int]:
    """The keys and positions in a sample, nested ones included."""
    parts = sample if isinstance(sample, Mapping) else dict(
        enumerate(sample) if isinstance(sample, tuple | list) else ())
    return [*parts, *(name for part in parts.values() for name in _names(part))]


def _is_batched(item: Any) -> bool:
    return is_batchable(item) and not isinstance(item, Samples)


def _check_shared(place: Any, items: list[Any]) -> Any:
    """Return the structure that all samples share; raise `StructureError` if they differ."""
    if not all(isinstance(item, FrozenValue) and _same(item, items[0]) for item in items):
        raise StructureError("collate", f"shared structures must be the same in all samples, at {place!r}",
                             ", ".join(map(repr, items)), "Leave it out of shared=: they become a batch.")
    return items[0]


def _same(one: Any, other: Any) -> bool:
    """Return True if two structures are the same object or have equal fields."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)
    if isinstance(one, FrozenValue):
        return all(_same(*pair) for pair in zip(fields(one), fields(other), strict=True))
    return bool(one == other)


def _has_rows(items: list[Tensor], rows: int, counts: list[dict[str, int]]) -> bool:
    """Return True if each tensor has one row for each entry, or for each edge, of its sample's structure."""
    if not items[0].dim():
        return False
    names = set.intersection(*(set(count) for count in counts))
    return any(all(item.shape[rows] == count[name] for item, count in zip(items, counts, strict=True))
               for name in names)


def _counts(samples: list[Any], shared: frozenset[Any]) -> list[dict[str, int]]:
    """Return the numbers of entries and edges of each sample's own structures."""
    return [{f"{name} {number}": getattr(structure, name)
             for number, structure in enumerate(_structures(sample, shared)) for name in _SIZES
             if hasattr(structure, name)} for sample in samples]


def _structures(sample: Any, shared: frozenset[Any]) -> Iterator[Any]:
    if _is_batched(sample):
        yield sample
    parts = sample.items() if isinstance(sample, Mapping) else enumerate(
        sample if isinstance(sample, tuple | list) else ())
    for place, part in parts:
        if place not in shared:
            yield from _structures(part, shared)
