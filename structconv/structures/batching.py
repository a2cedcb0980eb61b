"""`batch` joins structures of different sizes into one block-diagonal structure; `unbatch` splits the output again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from structconv.arguments import explained
from structconv.derived import derived
from structconv.errors import ShapeError, StructureError
from structconv.primitives.sorting import numbered_by_count
from structconv.structures.graph import Graph, check_samples, edge_axis, rows_to_groups
from structconv.structures.grid import Grid
from structconv.structures.masks import Support
from structconv.structures.relations import KnowledgeGraph
from structconv.structures.samples import Samples
from structconv.structures.values import FrozenValue, structure

__all__ = ["AnyStructure", "GridBatch", "Structure", "StructureBatch", "batch", "membership", "unbatch"]


@structure(eq=True)
class GridBatch(FrozenValue):
    """Grids concatenated along the entries. Shifts stay within each grid.

    Grids of one shape need no batch: a single `Grid` serves x (B, M, P).

    Example:

        >>> from structconv import Conv, Grid, Shifts, batch
        >>> grids = batch([Grid(3), Grid(2)])
        >>> grids
        GridBatch(Grid((3,)), Grid((2,)))
        >>> Conv(Shifts([1]), 4, 4)(torch.randn(5, 4), grids).shape
        torch.Size([5, 4])
    """

    grids: tuple[Grid, ...]

    def __post_init__(self) -> None:
        _check_parts("GridBatch", "grids", self.grids, Grid)

    @property
    def num_entries(self) -> int:
        """M, over all grids."""
        return sum(self.sizes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """(M_1, ..., M_B): the number of entries in each grid."""
        return tuple(grid.num_entries for grid in self.grids)

    @property
    def samples(self) -> Samples:
        """The samples of the batch, one for each grid."""
        return derived(self, "samples", lambda: Samples(self.sizes))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The first entry of each grid, then the total number of entries."""
        return _offsets(self.sizes)

    def __repr__(self) -> str:
        return f"GridBatch({', '.join(map(repr, self.grids))})"


@structure()
class StructureBatch(FrozenValue):
    """Structures of your own class, concatenated along the entries.

    The mechanism computes the basis of each structure by itself. `batch` returns it if the class has no
    method `batched`.

    Example:

        >>> from structconv import batch
        >>> from structconv.structures.values import FrozenValue, structure
        >>> @structure()
        ... class Ring(FrozenValue):
        ...     num_entries: int
        >>> batch([Ring(3), Ring(4)]).samples.num_samples
        2
    """

    parts: tuple[FrozenValue, ...]

    def __post_init__(self) -> None:
        _check_parts("StructureBatch", "parts", self.parts, FrozenValue)

    @property
    def num_inputs(self) -> int:
        """M, over all structures."""
        return self.samples.num_inputs

    @property
    def num_outputs(self) -> int:
        """N, over all structures."""
        return self.samples.num_outputs

    @property
    def samples(self) -> Samples:
        """The samples of the batch, one for each structure."""
        return derived(self, "samples", lambda: Samples(*map(list, zip(*map(_counts_of, self.parts), strict=True))))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"'StructureBatch' object has no attribute {name!r}. To read the structure of a batch, "
                             "define batched() and parts in your structure's class; or leave out batching in the "
                             "mechanism's")

    def __repr__(self) -> str:
        return f"StructureBatch({', '.join(map(repr, self.parts))})"


def _check_parts(owner: str, name: str, parts: Any, kind: type) -> None:
    if not isinstance(parts, tuple | list) or not all(isinstance(part, kind) for part in parts):
        raise StructureError(owner, f"{name} must be a tuple of structures of type {kind.__name__}",
                             type(parts).__name__, "Join structures by batch(structures).")


Structure = Grid | Graph | KnowledgeGraph | GridBatch | StructureBatch | Samples
#: The structure of a call: one, a mask, several by name, or none.
AnyStructure = Structure | Support | Mapping[str, Structure | Support] | None


@overload
def batch(structures: Sequence[Graph]) -> Graph: ...
@overload
def batch(structures: Sequence[KnowledgeGraph]) -> KnowledgeGraph: ...
@overload
def batch(structures: Sequence[Grid]) -> GridBatch: ...
@explained
def batch(structures: Sequence[Any]) -> Structure:
    """Join structures into one block-diagonal structure; entries, edges and triples keep the order of the list.

    Inputs are concatenated along entries, x (sum M, P); a layer gives the same values as on each structure by
    itself. `unbatch(y, structures)` splits its output again. Graphs give a `Graph`, knowledge graphs a
    `KnowledgeGraph` with the relations of all in the order in which they first appear (equal names are one relation;
    names of entities are dropped), grids a `GridBatch`. O(sum E).

    Structures of a class of your own, made by `@structure`, join a batch if they have `num_entries`, or `num_inputs`
    and `num_outputs`. They give a `StructureBatch`, or what the classmethod `batched(structures)` of their class
    returns: a structure with `samples`, the `Samples` of the batch, and `parts`, the tuple of structures. Mechanisms
    that compute each sample by itself read `parts`.

    Raises:
        StructureError: the list is empty, the kinds differ, only some graphs have weights or attributes, dtypes or
            devices differ, or a knowledge graph has all relations in another order: a layer with a matrix for each
            relation, for example `RelationalConv`, reads them by their order.

    Example:

        >>> from structconv import Grid, batch
        >>> batch([Grid((2, 2)).graph(), Grid((3, 3)).graph()])
        Graph(M=13, N=13, E=32, int64)
    """
    parts = list(structures)
    kinds = {type(part) for part in parts}
    names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "an empty list"
    if len(kinds) != 1 or not is_batchable(parts[0]):
        own = ("A structure of your own is made by @structure() and has num_entries, or num_inputs and num_outputs."
               if len(kinds) == 1 else "")
        raise StructureError("batch", "structures must be graphs, knowledge graphs, grids or samples, all of one kind",
                             names, own)
    kind = kinds.pop()
    return _BATCHERS[kind](parts) if kind in _BATCHERS else _batch_own(kind, parts)


def is_batchable(value: Any) -> bool:
    """Return True if `batch` takes the value: a graph, grid, samples or a user's structure with sizes."""
    if type(value) in _BATCHERS:
        return True
    own = isinstance(value, FrozenValue) and value.is_structure and not isinstance(value, Support | GridBatch)
    return own and (hasattr(value, "num_entries") or (hasattr(value, "num_inputs") and hasattr(value, "num_outputs")))


def _batch_own(kind: Any, parts: list[Any]) -> Any:
    """Join structures of the user's class: by its method `batched`, else as a `StructureBatch`."""
    if not hasattr(kind, "batched"):
        if any(getattr(part, "samples", None) is not None for part in parts):
            raise StructureError("batch", f"{kind.__name__} must have a classmethod batched(structures), for its "
                                 "structures are batches", "none")
        return StructureBatch(tuple(parts))
    batch = kind.batched(parts)
    if not isinstance(getattr(batch, "samples", None), Samples):
        raise StructureError(f"{kind.__name__}.batched", "the batch must have samples, its Samples",
                             type(batch).__name__)
    return batch


def _counts_of(structure: Any) -> tuple[int, int]:
    """M and N."""
    if hasattr(structure, "num_inputs"):
        return structure.num_inputs, structure.num_outputs
    count = structure.num_entities if isinstance(structure, KnowledgeGraph) else structure.num_entries
    return count, count


@explained
def unbatch(y: Tensor, parts: Sequence[Structure | int]) -> tuple[Tensor, ...]:
    """Split y (..., sum N, Q) into one (..., N, Q) for each structure of a batch.

    Args:
        parts: the structures that were batched, or their numbers of outputs.

    Example:

        >>> from structconv import Grid, unbatch
        >>> [part.shape for part in unbatch(torch.randn(13, 8), [Grid((2, 2)), Grid((3, 3))])]
        [torch.Size([4, 8]), torch.Size([9, 8])]
    """
    sizes = _output_sizes(parts)
    if y.dim() < 2 or y.shape[-2] != sum(sizes):
        raise ShapeError("unbatch", f"y must have shape (..., N={sum(sizes)}, Q)", tuple(y.shape),
                         "Entries are dim -2, channels dim -1.")
    return y.split(sizes, dim=-2)


@explained
def membership(parts: Sequence[Structure | int], device: torch.device | str | None = None) -> Tensor:
    """(sum N,): for each output entry of a batch, which of the structures it belongs to; what a readout sums over.

    Example:

        >>> from structconv import Grid
        >>> from structconv.structures import membership
        >>> membership([Grid(2), Grid(3)])
        tensor([0, 0, 1, 1, 1])
    """
    sizes = _output_sizes(parts)
    return numbered_by_count(torch.tensor(sizes, dtype=torch.int64, device=device), sum(sizes))


def parts_of(structure: Structure) -> tuple[Any, ...]:
    """Return the structure of each sample of a batch, in order; `None` for `Samples`, which have no structure inside.

    Raises:
        StructureError: an edge or a triple joins two samples.
    """
    if isinstance(structure, Samples):
        return (None,) * structure.num_samples
    if isinstance(structure, GridBatch):
        return structure.grids
    if isinstance(parts := getattr(structure, "parts", None), tuple):
        return parts
    if isinstance(structure, KnowledgeGraph):
        return derived(structure, "parts", lambda: _knowledge_parts(structure))
    if not isinstance(structure, Graph):
        raise StructureError("batch", "structure must be a batch of graphs or grids, or Samples, if a mechanism "
                             "computes each sample alone", repr(structure), "A batch of structures of your own has "
                             "parts, a tuple of them.")
    return derived(structure, "parts", lambda: _graph_parts(structure))


def _graph_parts(graph: Graph) -> tuple[Graph, ...]:
    samples: Samples = graph.samples
    device = graph.edge_index.device
    ends = graph.source, graph.target
    check_samples("Graph", "edges", graph.edge_index, ends, (graph.num_inputs, graph.num_outputs), samples)
    order, counts = _by_sample(samples, graph.target)
    index = graph.edge_index.index_select(1, order)
    index = torch.stack([position[own] for position, own in zip(samples.positions(device), index, strict=True)])
    weight, attr = (None if t is None else t.index_select(axis, order).split(counts, axis)
                    for t, axis in ((graph.edge_weight, -1), (graph.edge_attr, _axis(graph.edge_attr))))
    sizes = zip(*samples.sizes(), strict=True)
    return tuple(Graph(own.to(graph.edge_index.dtype), num_inputs=m, num_outputs=n,
                       edge_weight=None if weight is None else weight[i], edge_attr=None if attr is None else attr[i])
                 for i, (own, (m, n)) in enumerate(zip(index.split(counts, 1), sizes, strict=True)))


def _knowledge_parts(graph: KnowledgeGraph) -> tuple[KnowledgeGraph, ...]:
    samples: Samples = graph.samples
    head, relation, tail = graph.triples.unbind(1)
    check_samples("KnowledgeGraph", "triples", graph.triples, (head, tail), (graph.num_entities,) * 2, samples)
    order, counts = _by_sample(samples, tail)
    position, _ = samples.positions(head.device)
    triples = torch.stack([position[head], relation, position[tail]], 1).index_select(0, order)
    return tuple(KnowledgeGraph(own.to(graph.triples.dtype), size, graph.relations)
                 for own, size in zip(triples.split(counts), samples.sizes()[0], strict=True))


def _by_sample(samples: Samples, target: Tensor) -> tuple[Tensor, list[int]]:
    """Return the order that sorts the edges by sample, and the number of edges in each sample."""
    owner = samples.members(target.device)[1][target.long()]
    return owner.argsort(stable=True), torch.bincount(owner, minlength=samples.num_samples).tolist()


def _batch_graphs(graphs: list[Graph]) -> Graph:
    inputs = _offsets([graph.num_inputs for graph in graphs])
    outputs = _offsets([graph.num_outputs for graph in graphs])
    attributes = [graph.edge_attr for graph in graphs]
    index = [graph.edge_index for graph in graphs]
    _check_alike("edge_index", index)
    joined, starts = torch.cat(index, 1), index[0].new_tensor([inputs[:-1], outputs[:-1]])
    counts = torch.tensor([t.shape[1] for t in index], device=joined.device)
    moved = joined + starts.index_select(1, numbered_by_count(counts, joined.shape[1]))
    return Graph(moved, num_inputs=inputs[-1], num_outputs=outputs[-1],
                 edge_weight=_joined("edge_weight", [graph.edge_weight for graph in graphs], -1),
                 edge_attr=_joined("edge_attr", attributes, _axis(attributes[0])), samples=_samples(graphs))


def _batch_knowledge(graphs: list[KnowledgeGraph]) -> KnowledgeGraph:
    _check_alike("triples", [graph.triples for graph in graphs])
    relations = tuple(dict.fromkeys(name for graph in graphs for name in graph.relations))
    for i, graph in enumerate(graphs):
        if len(graph.relations) == len(relations) and graph.relations != relations:
            at, expected, got = next((k, *pair) for k, pair in enumerate(zip(relations, graph.relations, strict=True))
                                     if pair[0] != pair[1])
            raise StructureError("batch", f"relation {at} of structure {i} must be {expected!r}, as in the structures "
                                 "before it", repr(got), "Give the relations of all in one order, for example by "
                                 "KnowledgeGraph.from_labels(triples, relations=names).")
    number = {name: i for i, name in enumerate(relations)}
    offsets = _offsets([graph.num_entities for graph in graphs])
    counts: list[int] | None = None if any(graph.counts is None for graph in graphs) else [0] * len(relations)
    moved = []
    for graph, offset in zip(graphs, offsets, strict=False):
        numbers = [number[name] for name in graph.relations]
        if counts is not None and graph.counts is not None:
            for i, count in zip(numbers, graph.counts, strict=True):
                counts[i] += count
        head, relation, tail = graph.triples.unbind(1)
        moved.append(torch.stack([head + offset, relation.new_tensor(numbers)[relation], tail + offset], dim=1))
    return KnowledgeGraph(torch.cat(moved), offsets[-1], relations, counts=counts,
                          samples=_samples(graphs))


def _samples(graphs: Sequence[Graph | KnowledgeGraph]) -> Samples:
    """Return the samples of all graphs; a graph that is a batch itself contributes each of its own."""
    return _joined_samples([([[count] for count in _counts_of(graph)] if graph.samples is None  # without `Samples`
                             else graph.samples.sizes()) for graph in graphs])


def _joined_samples(sizes: list[Sequence[list[int]]]) -> Samples:
    inputs, outputs = ([size for own in sizes for size in own[i]] for i in (0, 1))
    return Samples(inputs, outputs)


_BATCHERS: dict[type, Callable[[list[Any]], Structure]] = {
    Graph: _batch_graphs, KnowledgeGraph: _batch_knowledge, Grid: lambda grids: GridBatch(tuple(grids)),
    Samples: lambda members: _joined_samples([samples.sizes() for samples in members])}


def samples_of(structure: Any) -> Samples:
    """Return the `Samples` of a batch; a single graph or grid is one sample."""
    samples: Samples | None = getattr(structure, "samples", None)
    if samples is not None:
        return samples
    if not is_batchable(structure):
        raise StructureError("batch", "structure must be a batch, or Samples", type(structure).__name__,
                             "Call it as layer(x, structure=batch(graphs)).")
    inputs, outputs = _counts_of(structure)
    return Samples([inputs], [outputs])


def num_samples_of(structure: Any) -> int:
    """Return B, the number of samples; 1 for a single structure."""
    samples: Samples | None = getattr(structure, "samples", None)
    return 1 if samples is None else samples.num_samples


def entries_to_samples(structure: Any, device: torch.device) -> Graph:
    """Return the graph with an edge from each entry of a batch to its sample; a single graph is one sample."""
    if isinstance(structure, Graph) and structure.samples is None:  # of any number of nodes, where it is traced
        count = structure.num_inputs
        return derived(structure.edge_index, ("to one sample", count, str(device)), lambda: rows_to_groups(
            torch.zeros(count, dtype=torch.int64, device=device), 1))
    samples = samples_of(structure)
    return derived(samples, ("incidence", str(device)), lambda: rows_to_groups(
        samples.members(device)[0], samples.num_samples))


def _axis(attr: Tensor | None) -> int:
    return 0 if attr is None else edge_axis(attr)


def _joined(name: str, values: list[Tensor | None], axis: int) -> Tensor | None:
    """Concatenate an attribute of all graphs along `axis`, the axis of the edges."""
    present = [value for value in values if value is not None]
    if not present:
        return None
    if len(present) < len(values):
        raise StructureError("batch", f"either all graphs or none must have {name}",
                             f"{len(present)} of {len(values)} with")
    _check_alike(name, present)
    others = [(*value.shape[:axis], *value.shape[axis:][1:]) for value in present]
    if len({(value.dim(), other) for value, other in zip(present, others, strict=True)}) > 1:
        expected = f"the {name} of all graphs must have one number of channels, and the same samples"
        raise StructureError("batch", expected, [tuple(value.shape) for value in present])
    return torch.cat(present, axis)


def _check_alike(name: str, tensors: list[Tensor]) -> None:
    kinds = sorted({f"{t.dtype} on {t.device}" for t in tensors})
    if len(kinds) > 1:
        raise StructureError("batch", f"the {name} of all structures must share one dtype and device",
                             " and ".join(kinds), "Convert them with .to().")


def _output_sizes(parts: Sequence[Structure | int]) -> list[int]:
    return [_counts_of(part)[1] if isinstance(part, FrozenValue) else part for part in parts]


def _offsets(sizes: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(sizes, initial=0))
