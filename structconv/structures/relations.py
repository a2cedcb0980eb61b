"""`KnowledgeGraph`: entities joined by typed, directed edges with named relations."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from structconv.arguments import explained
from structconv.derived import derived, is_plain
from structconv.errors import StructureError
from structconv.structures.exchange import samples_of
from structconv.structures.graph import Graph, check_bounds, check_index_tensor, check_samples, check_size
from structconv.structures.values import Structure, structure

__all__ = ["KnowledgeGraph"]

_INVERSE = "^-1"


@structure(init=False)
class KnowledgeGraph(Structure):
    """Triples (head, relation, tail): head is the input entry m, tail the output entry n.

    Args:
        triples: (T, 3), int32 or int64. A duplicate triple counts twice.
        num_entities: M = N.
        relations: the names, all different; the relation of a triple is an index into them.
        entities: names of the entities, or none.
        counts: the number of triples of each relation; counted by default. `None` in an exported program, whose triples
            have no values to count.
        samples: the `Samples` of a `batch` of several graphs: which entities belong to which graph.

    Raises:
        StructureError: a shape or dtype is wrong, an index is negative or out of range, a name occurs twice, or a
            triple joins two samples.

    Example:

        >>> from structconv import KnowledgeGraph
        >>> facts = KnowledgeGraph.from_labels([("Ada", "knows", "Bob"), ("Bob", "likes", "Eve")])
        >>> facts
        KnowledgeGraph(T=2, entities=3, relations=2: knows, likes)
        >>> facts.relation("likes")
        Graph(M=3, N=3, E=1, int64)
    """

    ENTRY_COUNTS = ("num_entities",)
    NAMES = ("relations", "entities")
    DERIVED = ("counts",)

    triples: Tensor
    num_entities: int
    relations: tuple[str, ...]
    entities: tuple[str, ...]
    counts: tuple[int, ...] | None
    samples: Any

    @explained
    def __init__(self, triples: Tensor, num_entities: int, relations: Sequence[str], *, entities: Sequence[str] = (),
                 counts: Sequence[int] | None = None, samples: Any = None) -> None:
        check_index_tensor("KnowledgeGraph", "triples", triples, (None, 3), "(T, 3)")
        for name, names in (("relations", relations), ("entities", entities)):
            if isinstance(names, str):
                raise StructureError("KnowledgeGraph", f"{name} must be a list of names", repr(names))
        relations, entities = tuple(relations), tuple(entities)
        if is_plain(triples):
            num_entities = check_size("KnowledgeGraph", "num_entities", num_entities)
            sizes = (("num_entities", num_entities), ("num_relations", len(relations)), ("num_entities", num_entities))
            _check_names("relations", relations)
            _check_names("entities", entities)
            if entities and type(num_entities) is int and len(entities) != num_entities:
                raise StructureError("KnowledgeGraph", f"entities must have num_entities={num_entities} names",
                                     len(entities))
            check_bounds("KnowledgeGraph", "triples", "triple", triples.T, sizes)
            if samples is not None:
                check_samples("KnowledgeGraph", "triples", triples, (triples[:, 0], triples[:, 2]),
                              (num_entities, num_entities), samples)
            counted = derived(triples, ("counts", len(relations)), lambda: _count(triples, len(relations)))
            if counts is not None and all(type(count) is int for count in counts) and tuple(counts) != counted:
                raise StructureError("KnowledgeGraph", f"counts must be {counted}", tuple(counts), "Leave them out.")
            counts = counted if counts is None else counts
        fields = {"triples": triples, "num_entities": num_entities, "relations": relations, "entities": entities,
                  "counts": None if counts is None else tuple(counts), "samples": samples}
        for name, field in fields.items():
            object.__setattr__(self, name, field)

    @classmethod
    def from_data(cls, data: Any, relations: int | Sequence[str] | None = None) -> KnowledgeGraph:
        """From any object with PyTorch Geometric's `edge_index` and `edge_type` (E,): edge e is the triple e.

        Args:
            data: it is not imported. A batch, with `ptr` or `batch`, gives a `batch` of knowledge graphs.
            relations: their names, or how many there are; by default `num_relations`, or the largest type + 1. Names
                of numbers are "0", "1", ...

        Raises:
            StructureError: no `edge_index` or no `edge_type`.

        Example:

            >>> from structconv import KnowledgeGraph
            >>> from types import SimpleNamespace
            >>> data = SimpleNamespace(edge_index=torch.tensor([[0, 1], [1, 2]]), edge_type=torch.tensor([0, 1]))
            >>> KnowledgeGraph.from_data(data, ["cites", "likes"])
            KnowledgeGraph(T=2, entities=3, relations=2: cites, likes)
        """
        for name in ("edge_index", "edge_type"):
            if getattr(data, name, None) is None:
                raise StructureError("KnowledgeGraph.from_data", f"data must have an {name}", type(data).__name__)
        index, kind, samples = data.edge_index, data.edge_type, samples_of(data)
        if relations is None:
            declared = getattr(data, "num_relations", None)
            relations = int(kind.max()) + 1 if declared is None and kind.numel() else declared or 0
        names = tuple(map(str, range(relations))) if isinstance(relations, int) else relations
        nodes = getattr(data, "num_nodes", None)
        if nodes is None:
            nodes = samples.num_inputs if samples is not None else int(index.max()) + 1 if index.numel() else 0
        return cls(torch.stack([index[0], kind.to(index.dtype), index[1]], 1), nodes, names, samples=samples)

    def to_data(self) -> Any:
        """To a `torch_geometric.data.Data` with `edge_index` and `edge_type`; needs torch_geometric. Names are lost:
        give `relations` to `from_data`."""
        head, kind, tail = self.triples.unbind(1)
        data = Graph(torch.stack([head, tail]), num_nodes=self.num_entities, samples=self.samples).to_data()
        data.edge_type = kind
        return data

    @classmethod
    @explained
    def from_labels(cls, triples: Iterable[tuple[str, str, str]], entities: Sequence[str] | None = None,
                    relations: Sequence[str] | None = None) -> KnowledgeGraph:
        """From (head, relation, tail) by name, for example ("Leonard Nimoy", "played", "Spock").

        Names are numbered in the order in which they first appear, heads before tails, unless their order is given;
        a name that is not in a given order is a `StructureError`.
        """
        labels = list(triples)
        entity_names = _numbering((name for head, _, tail in labels for name in (head, tail)), entities)
        relation_names = _numbering((name for _, name, _ in labels), relations)
        rows = [(_look_up("entity", entity_names, head), _look_up("relation", relation_names, name),
                 _look_up("entity", entity_names, tail)) for head, name, tail in labels]
        return cls(torch.tensor(rows, dtype=torch.int64).reshape(-1, 3), len(entity_names), tuple(relation_names),
                   entities=tuple(entity_names))

    @property
    def num_relations(self) -> int:
        """The number of relations."""
        return len(self.relations)

    @property
    def num_triples(self) -> int:
        """T, repeated triples included."""
        return self.triples.shape[0]

    @explained
    def relation(self, name: str) -> Graph:
        """The graph of one relation, edges in the order of the triples; remembered. An unknown name is an error."""
        number = _look_up("relation", {known: i for i, known in enumerate(self.relations)}, name)
        return self.graphs()[number]

    def graphs(self) -> tuple[Graph, ...]:
        """One graph a relation, in the order of `relations`; traceable. O(T log T) once, then remembered."""
        return derived(self, "graphs", lambda: _split(self))

    @explained
    def entity(self, name: str) -> int:
        """The entry of the entity with this name."""
        return _look_up("entity", {known: i for i, known in enumerate(self.entities)}, name)

    def inverse(self) -> KnowledgeGraph:
        """Every triple turned around; relation "r" becomes "r^-1", and "r^-1" becomes "r"."""
        return KnowledgeGraph(self.triples.flip(1), self.num_entities, tuple(map(_inverted, self.relations)),
                              entities=self.entities, counts=self.counts, samples=self.samples)

    def with_inverses(self) -> KnowledgeGraph:
        """The triples, then their inverses: twice the relations, "r" and "r^-1", in that order."""
        turned = self.triples.flip(1) + self.triples.new_tensor([0, self.num_relations, 0])
        return KnowledgeGraph(torch.cat([self.triples, turned]), self.num_entities,
                              self.relations + tuple(map(_inverted, self.relations)), entities=self.entities,
                              counts=self.counts and self.counts * 2, samples=self.samples)

    def to(self, device: torch.device | str) -> KnowledgeGraph:
        """Return the graph on another device."""
        return KnowledgeGraph(self.triples.to(device), self.num_entities, self.relations, entities=self.entities,
                              counts=self.counts, samples=self.samples)

    def __repr__(self) -> str:
        triples = f"T={self.num_triples}, " if isinstance(self.triples, Tensor) else ""
        names = ", ".join(map(str, self.relations[:3])) + (", ..." if len(self.relations) > 3 else "")
        return f"KnowledgeGraph({triples}entities={self.num_entities}, relations={len(self.relations)}: {names})"


def _count(triples: Tensor, num_relations: int) -> tuple[int, ...]:
    return tuple(torch.bincount(triples[:, 1], minlength=num_relations).tolist())


def _split(graph: KnowledgeGraph) -> tuple[Graph, ...]:
    relation, pairs = graph.triples[:, 1], graph.triples[:, ::2].T
    if graph.counts is None:  # a program for any numbers of triples
        edges = [pairs.index_select(1, (relation == number).nonzero().flatten())
                 for number in range(graph.num_relations)]
    else:
        edges = pairs.index_select(1, torch.argsort(relation, stable=True)).split(list(graph.counts), dim=1)
    return tuple(Graph(part.contiguous(), num_nodes=graph.num_entities, samples=graph.samples) for part in edges)


def _inverted(name: str) -> str:
    return name.removesuffix(_INVERSE) if name.endswith(_INVERSE) else name + _INVERSE


def _check_names(field: str, names: tuple[str, ...]) -> None:
    earlier: set[str] = set()
    for name in names:
        if not isinstance(name, str) or name in earlier:
            raise StructureError("KnowledgeGraph", f"{field} must be different names", f"{name!r}"
                                 + (" twice" if name in earlier else ""))
        earlier.add(name)


def _numbering(names: Iterable[str], order: Sequence[str] | None) -> dict[str, int]:
    return {name: i for i, name in enumerate(dict.fromkeys(names if order is None else order))}


def _look_up(kind: str, numbers: dict[str, int], name: str) -> int:
    if name not in numbers:
        near = difflib.get_close_matches(str(name), numbers, n=1, cutoff=0.0)
        raise StructureError("KnowledgeGraph", f"the {kind} must be one of its {len(numbers)}", repr(name),
                             f"The nearest is {near[0]!r}." if near else "It has no names.")
    return numbers[name]
