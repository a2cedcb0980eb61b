"""`NamedStructures`: the structures of a call by name, with the samples of their entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Self

from structconv.derived import derived
from structconv.errors import StructureError
from structconv.structures.batching import batch, is_batchable, parts_of
from structconv.structures.masks import Support
from structconv.structures.samples import Samples, same_samples
from structconv.structures.values import FrozenValue

__all__ = ["NamedStructures", "Place", "agreed", "behind", "listed_names"]


class Place(NamedTuple):
    """The samples of inputs and outputs at one node of an expression, set by a named structure."""

    name: str
    samples: Samples


class NamedStructures(NamedTuple):
    """Several structures of one call by name, with the samples of the entries at this place of the expression, if they
    are batches."""

    by_name: Mapping[str, Any]
    samples: Samples | None = None

    @classmethod
    def of(cls, by_name: Mapping[str, Any]) -> Self:
        """Collect the structures of a call. If some are batches, they must have as many samples, and share a single
        graph or grid."""
        for name, structure in by_name.items():
            if not isinstance(structure, FrozenValue):
                raise StructureError("structure", f"{name!r} must be a structure", type(structure).__name__,
                                     "A structure is a Graph, a Grid, a KnowledgeGraph, a batch of them or a Support.")
        counts = {name: structure.samples.num_samples for name, structure in by_name.items() if _is_batch(structure)}
        if len(set(counts.values())) > 1:
            raise StructureError("structure", "named structures must be batches of as many samples", repr(counts))
        if not counts:
            return cls(by_name)
        batch = next(iter(counts.values()))
        return cls({name: _for_each(name, structure, batch) for name, structure in by_name.items()})

    @property
    def batched(self) -> bool:
        """True if at least one structure is a batch."""
        return any(map(_is_batch, self.by_name.values()))

    def named(self, owner: str, name: str | None, reads: bool) -> Any:
        """Return the structure of this name. Without a name: the only structure, or the samples of the entries if the
        caller does not read a structure."""
        if name is not None:
            return self.by_name[name]
        if len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        if reads:
            raise StructureError(owner, "it must name the structure that it reads, where a call has several",
                                 listed_names(self.by_name), f"Say {owner}(..., structure=NAME), masked(keep=NAME) or "
                                 "expression.on(NAME).")
        return self.samples

    def leading(self, name: str | None, output: Any) -> Self:
        """Return the structures after a part that maps from the structure `name` to `output`."""
        name = next(iter(self.by_name)) if name is None and len(self.by_name) == 1 else name
        by_name = self.by_name if name is None else {**self.by_name, name: output}
        samples = getattr(output, "samples", None)
        return self._replace(by_name=by_name, samples=self.samples if samples is None else samples)

    def merged(self, others: Iterable[Self]) -> Self:
        """Return the structures with the changes that `others` have made; of two changes of a structure the first."""
        by_name, samples = dict(self.by_name), self.samples
        for other in reversed(list(others)):
            by_name.update({name: new for name, new in other.by_name.items() if new is not self.by_name[name]})
            samples = samples if other.samples is self.samples else other.samples
        same = samples is self.samples and all(by_name[name] is own for name, own in self.by_name.items())
        return self if same else type(self)(by_name, samples)

    def at(self, named_samples: list[Place]) -> Self:
        """Return the structures at a node whose samples are `named_samples`; an error if some are batches and nothing
        determines the samples."""
        if not self.batched:
            return self
        if named_samples:
            result = agreed(named_samples)
            known = self.samples is not None and same_samples(result, self.samples)
            return self if known else self._replace(samples=result)
        if self.samples is None:
            raise StructureError("structure", "where structures are batches, one that some part names must tell the "
                                 "samples of x", listed_names(self.by_name), "Say expression.on(NAME).")
        return self

    def parts(self) -> list[Self]:
        """Return the structures of each sample."""
        assert self.samples is not None
        count = self.samples.num_samples
        parts = [parts_of(structure) if _is_batch(structure) else (structure,) * count
                 for structure in self.by_name.values()]
        return [type(self)(dict(zip(self.by_name, own, strict=True))) for own in zip(*parts, strict=True)]


def agreed(named_samples: list[Place]) -> Samples:
    """Return the samples on which all these agree, or raise `StructureError`."""
    first, *others = named_samples
    for other in others:
        if not same_samples(first.samples, other.samples):
            raise _differing(first, other, first.samples.sizes(), other.samples.sizes())
    return first.samples


def behind(first: list[Place], second: list[Place]) -> list[Place]:
    """Return the samples of a composition: the inputs of the first part and the outputs of the second."""
    if not (first and second):
        return first or second
    (name, one), (_, other) = first[0], second[0]
    if one.square and other.square and same_samples(one, other):
        return first[:1]
    (before, after), (inputs, outputs) = one.sizes(), other.sizes()
    if after != inputs:
        raise _differing(first[0], second[0], after, inputs)
    return [Place(name, Samples(before, outputs))]


def _differing(first: Place, second: Place, one: Any, other: Any) -> StructureError:
    return StructureError("structure", f"each sample must have as many entries in {first.name!r} as in "
                          f"{second.name!r}, for parts of one expression read them", f"{one} and {other}")


def listed_names(names: Iterable[str]) -> str:
    """Return the names as text for an error."""
    return ", ".join(map(repr, names)) or "none"


def _is_batch(structure: Any) -> bool:
    return getattr(structure, "samples", None) is not None


def _for_each(name: str, structure: Any, count: int) -> Any:
    """Return the structure for a call with batches of `count` samples."""
    if _is_batch(structure) or isinstance(structure, Support):
        return structure
    if not is_batchable(structure):
        raise StructureError("structure", f"{name!r} must be a batch, as others are", type(structure).__name__)
    copies: list[Any] = [structure] * count
    return derived(structure, ("of each sample", count), lambda: batch(copies))
