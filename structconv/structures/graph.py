"""`Graph`: entries joined by a list of edges, checked once so that no bad index reaches a kernel."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from structconv.derived import derived, is_plain
from structconv.errors import StructureError
from structconv.primitives.layout import Csr, check_bounds, first_loop, first_wrong_edge, layouts
from structconv.shapes import check_choice, check_device
from structconv.structures.exchange import Exchange
from structconv.structures.values import Structure, key_of, size_class, structure

__all__ = ["Graph"]


@structure(init=False)
class Graph(Exchange, Structure):
    """Edges m -> n between M input entries and N output entries.

    The matrix of the graph is A (M, N), with A[m, n] the weight of the edge m -> n, or 1 without `edge_weight`.
    Duplicate edges stay separate edges, and add up in A.

    Args:
        edge_index: (2, E), int32 or int64; row 0 holds the input entries m, row 1 the output entries n.
        num_nodes: M = N. Default: the largest index + 1 (0 without edges).
        edge_weight: (E,) or (..., E), floating, or none. Leading dimensions are those of x.
        edge_attr: (..., E, A) or (E,), any dtype, or none: features of the edges that mechanisms may read. Leading
            dimensions are those of x, if the samples of a batch share the edges.
        num_inputs, num_outputs: M and N of a bipartite graph; either takes precedence over `num_nodes`.
        samples: the `Samples` of a `batch` of several graphs: which entries belong to which graph.

    Raises:
        StructureError: a shape or dtype is wrong, an index is negative or out of range, or tensors are on two devices.

    The edges are checked here, in O(E) with one synchronization on a GPU, and again after a change in place. A graph is
    frozen; `dataclasses.replace(graph, edge_weight=w)` is the same graph with other weights, and shares its sorted
    layouts. Row 0 as source and row 1 as target is PyTorch Geometric's convention too.

    Example:

        >>> from structconv import Graph
        >>> graph = Graph(torch.tensor([[0, 1, 2], [1, 2, 0]]), num_nodes=3, edge_weight=torch.tensor([1.0, 2.0, 3.0]))
        >>> graph.to_torch_sparse(torch.sparse_coo).to_dense()
        tensor([[0., 1., 0.],
                [0., 0., 2.],
                [3., 0., 0.]])
    """

    ENTRY_COUNTS = ("num_inputs", "num_outputs")

    edge_index: Tensor
    num_inputs: int
    num_outputs: int
    edge_weight: Tensor | None
    edge_attr: Tensor | None
    samples: Any

    def _static(self) -> Hashable:
        index, loops = listed_edges(self)
        inputs, outputs, weight, attr, samples = (self.num_inputs, self.num_outputs, self.edge_weight, self.edge_attr,
                                                  self.samples)
        rows = size_class(inputs)
        listed = ((index.dtype, index.device, size_class(index.shape[1] + inputs if loops else index.shape[1]))
                  if isinstance(index, Tensor) else (key_of(index),))
        return (type(self), rows, rows if inputs == outputs else size_class(outputs), *listed,
                key_of(weight) if isinstance(weight, Tensor) else weight,
                key_of(attr) if isinstance(attr, Tensor) else attr,
                None if samples is None else (size_class(samples.num_samples), samples.square))

    def __getattr__(self, name: str) -> Any:
        """Build the edges of a graph with self-loops at their first use, and remember them."""
        base = self.__dict__.get("_base")
        if name != "edge_index" or base is None:
            raise AttributeError(name)
        return _edges_and_loops(base, self.num_inputs)

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        return state if "_base" not in self.__dict__ else {**state, "edge_index": self.edge_index}

    def __init__(self, edge_index: Tensor, *, num_nodes: int | None = None, edge_weight: Tensor | None = None,
                 edge_attr: Tensor | None = None, num_inputs: int | None = None,
                 num_outputs: int | None = None, samples: Any = None) -> None:
        check_index_tensor("Graph", "edge_index", edge_index, (2, None), "(2, E)")
        inputs = num_nodes if num_inputs is None else num_inputs
        outputs = num_nodes if num_outputs is None else num_outputs
        if inputs is None or outputs is None:
            inputs, outputs = _infer_sizes(edge_index, inputs, outputs)
        plain = is_plain(edge_index)
        if plain and not (type(inputs) is type(outputs) is int  # a compiler cannot compare symbolic sizes
                          and min(inputs, outputs) >= 0 and max(inputs, outputs) < _TOO_MANY):
            inputs, outputs = check_size("Graph", "num_inputs", inputs), check_size("Graph", "num_outputs", outputs)
        self.__dict__.update(edge_index=edge_index, num_inputs=inputs, num_outputs=outputs, edge_weight=edge_weight,
                             edge_attr=edge_attr, samples=samples)
        if plain:
            if first_wrong_edge(edge_index, inputs, outputs, samples) != -1:
                check_bounds("Graph", "edge_index", "edge", edge_index, self._sizes())
                if samples is not None and type(inputs) is type(outputs) is int:
                    ends = edge_index[0], edge_index[1]
                    check_samples("Graph", "edges", edge_index, ends, (inputs, outputs), samples)
            if edge_weight is not None or edge_attr is not None:
                check_edge_values(self)

    @classmethod
    def complete(cls, num_nodes: int, *, self_loops: bool = False, device: torch.device | str | None = None) -> Graph:
        """Every ordered pair m -> n of `num_nodes` entries, sorted by m, then n; n -> n only with `self_loops`.

        Int64 indices. N (N - 1) edges, or N^2: attention over all pairs needs none of them, `Conv` without a structure
        is that.
        """
        nodes = check_size("Graph.complete", "num_nodes", num_nodes)
        if not isinstance(nodes, int | torch.SymInt):
            raise StructureError("Graph.complete", "num_nodes must be an integer >= 0", repr(num_nodes))
        device = None if device is None else check_device("Graph.complete", device)
        targets = nodes if self_loops else max(nodes - 1, 0)
        edge = torch.arange(nodes * targets, device=device)
        source, target = edge // max(targets, 1), edge % max(targets, 1)
        if not self_loops:
            target = target + (target >= source)
        return cls(torch.stack([source, target]), num_nodes=nodes)

    @property
    def num_edges(self) -> int:
        """E, duplicates included."""
        index, loops = listed_edges(self)
        return index.shape[1] + self.num_inputs if loops else index.shape[1]

    @property
    def num_nodes(self) -> int:
        """M = N; `StructureError` on a bipartite graph, which has two numbers."""
        self._check_square("num_nodes", "Use num_inputs or num_outputs.")
        return self.num_inputs

    @property
    def source(self) -> Tensor:
        """(E,): the input entry m of each edge. `StructureError` if an index is out of range after a change."""
        self._check_bounds()
        return self.edge_index[0]

    @property
    def target(self) -> Tensor:
        """(E,): the output entry n of each edge. `StructureError` if an index is out of range after a change."""
        self._check_bounds()
        return self.edge_index[1]

    def layouts(self) -> tuple[Csr, Csr]:
        """The edges sorted by target and by source: `by_target()` and `by_source()`. O(E + M + N), once.

        The indices are checked again while the layouts are built, because `edge_index` may have been changed since:
        `StructureError`.
        """
        sizes = self.num_inputs, self.num_outputs
        return derived(self.edge_index, ("layouts", *sizes), lambda: layouts(self.edge_index, *sizes))

    def by_target(self) -> Csr:
        """The edges grouped by output entry: N rows, indices are inputs m, in int32."""
        return self.layouts()[0]

    def by_source(self) -> Csr:
        """The edges grouped by input entry: M rows, indices are outputs n, in int32."""
        return self.layouts()[1]

    def in_degree(self) -> Tensor:
        """(..., N): the sum over m of A[m, n], in the dtype of `edge_weight`; int64 counts without one. O(E)."""
        return derived(self, "in degree", lambda: self._degree(1, self.num_outputs))

    def out_degree(self) -> Tensor:
        """(..., M): the sum over n of A[m, n], in the dtype of `edge_weight`; int64 counts without one. O(E)."""
        return derived(self, "out degree", lambda: self._degree(0, self.num_inputs))

    def reversed(self) -> Graph:
        """Every edge turned around, in the same edge order: the graph of A^T. Remembered."""
        return derived(self, "reversed", lambda: Graph(
            derived(self.edge_index, "reversed", lambda: self.edge_index.flip(0)), num_inputs=self.num_outputs,
            num_outputs=self.num_inputs, edge_weight=self.edge_weight, edge_attr=self.edge_attr,
            samples=None if self.samples is None else self.samples.transpose()))

    def with_self_loops(self, weight: float = 1.0, attr: float | str = 0.0) -> Graph:
        """One edge n -> n for each entry, appended after the input edges: the graph of A + weight I. Remembered.

        Self-loops that are there already stay, and add up with the new ones. An unweighted graph stays so where
        `weight` is 1, and has weights of the default dtype otherwise. The new edges' attributes are filled with
        `attr`, a number, or made of those of the edges into the entry: their "mean", "add" (sum), "min", "max" or "mul"
        (product), zero (of "mul" one) where there are none. Refuses a bipartite graph, whose inputs are not its
        outputs. O(E + N).
        """
        if isinstance(attr, str):
            check_choice("with_self_loops", "attr", attr, _LOOP_REDUCTIONS)
        attr = 0.0 if self.edge_attr is None else attr
        if self.num_inputs != self.num_outputs:
            self._check_square("with_self_loops", "Only a graph of M = N entries has self-loops. "
                               "Pass add_self_loops=False to the layer, or self_loops=False to its mechanism.")
        return derived(self, ("self-loops", weight, attr), lambda: _with_self_loops(self, weight, attr))

    def select(self, keep: Tensor) -> Graph:
        """The graph of some of the edges: `keep` is a mask (E,) of booleans, or the positions of the edges, in order.

        Entries stay. Under `torch.compile` use positions: the number of edges that a mask keeps is not known there.
        """
        if keep.dtype == torch.bool and keep.shape != (self.num_edges,):
            raise StructureError("Graph.select", f"keep must be a mask of length E={self.num_edges}",
                                 tuple(keep.shape))
        return dataclasses.replace(
            self, edge_index=self.edge_index[:, keep],
            edge_weight=None if self.edge_weight is None else self.edge_weight[..., keep],
            edge_attr=None if self.edge_attr is None else _selected(self.edge_attr, keep))

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> Graph:
        """Return the graph on another device or in another dtype; a dtype may be first, as in `Tensor.to`.

        A floating dtype converts `edge_weight` and a floating `edge_attr`; an integer one converts `edge_index`.
        """
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        floating = dtype if dtype is not None and dtype.is_floating_point else None
        integer = dtype if floating is None else None
        attr_dtype = floating if self.edge_attr is not None and self.edge_attr.is_floating_point() else None
        return dataclasses.replace(
            self, edge_index=self.edge_index.to(device=device, dtype=integer),
            edge_weight=None if self.edge_weight is None else self.edge_weight.to(device=device, dtype=floating),
            edge_attr=None if self.edge_attr is None else self.edge_attr.to(device=device, dtype=attr_dtype))

    def _sizes(self) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("num_inputs", self.num_inputs), ("num_outputs", self.num_outputs)

    def _check_bounds(self) -> None:
        """Check the indices once, and again after each change in place that torch counts."""
        index, sizes = self.edge_index, self._sizes()
        if is_plain(index) and all(type(size) is int for _, size in sizes):
            derived(index, ("bounds", sizes), lambda: check_bounds("Graph", "edge_index", "edge", index, sizes))

    def _degree(self, row: int, size: int) -> Tensor:
        entries, weight = self.target if row else self.source, self.edge_weight
        if weight is None:
            weight = torch.ones(entries.shape, dtype=torch.int64, device=entries.device)
        return weight.new_zeros(*weight.shape[:-1], size).index_add(-1, entries, weight)

    @property
    def is_square(self) -> bool:
        """True if M = N, in each graph of a batch."""
        return self.num_inputs == self.num_outputs and (self.samples is None or bool(self.samples.square))

    def _check_square(self, member: str, remedy: str) -> None:
        if not self.is_square:
            raise StructureError(f"Graph.{member}", "the graph must have as many inputs as outputs",
                                 f"M={self.num_inputs}, N={self.num_outputs}", remedy)

    def __repr__(self) -> str:
        parts = [f"M={self.num_inputs}, N={self.num_outputs}"]
        if isinstance(self.edge_index, Tensor):
            parts.append(f"E={self.num_edges}, {str(self.edge_index.dtype).removeprefix('torch.')}")
        if isinstance(self.edge_weight, Tensor):
            parts.append("weighted")
        if isinstance(self.edge_attr, Tensor):
            parts.append(f"A={self.edge_attr.shape[-1] if self.edge_attr.dim() > 1 else 1}")
        return f"Graph({', '.join(parts)})"


def listed_edges(graph: Graph) -> tuple[Tensor, bool]:
    """Return the edges that a graph lists, and True if a loop at each entry comes after them."""
    attrs: dict[str, Any] = graph.__dict__
    base = attrs.get("_base")
    return (graph.edge_index, False) if base is None else (base, True)


def tensor_ids(graph: Graph) -> tuple[int, ...]:
    """Return the identities of a graph's tensors; edges with self-loops differ from edges without."""
    index, loops = listed_edges(graph)
    ids: tuple[int, ...] = (-id(index) if loops else id(index),)
    if graph.edge_weight is not None:
        ids += (id(graph.edge_weight),)
    if graph.edge_attr is not None:
        ids += (id(graph.edge_attr),)
    if graph.samples is not None:
        ids += id(graph.samples.input_starts), id(graph.samples.output_starts)
    return ids


def rows_to_groups(group: Tensor, count: int) -> Graph:
    """Return the graph with an edge from each of M rows to its group: `group` (M,) holds numbers below `count`."""
    rows = torch.arange(group.shape[0], dtype=group.dtype, device=group.device)
    return Graph(torch.stack([rows, group]), num_inputs=group.shape[0], num_outputs=count)


def edges_to_receivers(graph: Graph) -> Graph:
    """Return the graph from the edges of a graph to the nodes that they reach; remembered."""
    return derived(graph.edge_index, ("edges to receivers", graph.num_outputs), lambda: rows_to_groups(
        graph.target, graph.num_outputs))


def check_index_tensor(owner: str, name: str, index: Any, shape: tuple[int | None, ...], pattern: str) -> None:
    """Raise `StructureError` unless `index` is an int32 or int64 tensor of `shape`, where `None` leaves a size free.

    A tracer's stand-in passes; `None`, a list or an array does not.
    """
    if not isinstance(index, Tensor):
        return _check_no_data(owner, f"{name} must be a tensor of shape {pattern}", name, index)
    if index.layout != torch.strided:
        raise StructureError(owner, f"{name} must be a dense tensor of shape {pattern}", index.layout,
                             "A sparse matrix becomes a graph by Graph.from_torch_sparse(matrix).")
    if index.dtype not in (torch.int32, torch.int64):
        raise StructureError(owner, f"{name} must be an index of dtype int32 or int64", index.dtype,
                             "Convert it with .long().")
    fits = index.dim() == len(shape)
    for size, expected in zip(index.shape, shape, strict=False):
        fits = fits and (expected is None or size == expected)
    if not fits:
        turned = index.dim() == 2 and len(shape) == 2 and shape[0] == index.shape[1] and shape[1] is None
        raise StructureError(owner, f"{name} must have shape {pattern}", tuple(index.shape),
                             f"Pass {name}.T." if turned else "")


#: The plain types of tensors and numbers, which no tracer's symbolic value has.
_DATA = (str, bytes, bool, float, complex, list, tuple, dict, set, frozenset, torch.nn.Module, type, type(None))
_TOO_MANY = 2 ** 63
_ONE_GRAPH = "dataclasses.replace(graph, samples=None) makes it one graph."
_CONVERSIONS = {"edge_index": "Graph.from_data(data)", "tocoo": "Graph.from_scipy(matrix)",
                "is_directed": "Graph.from_networkx(graph)"}


def _check_no_data(owner: str, expected: str, name: str, value: Any) -> None:
    """Raise `StructureError` if the value is plain data or another library's object, and no tensor or number."""
    remedy_of_kind = next((remedy for attribute, remedy in _CONVERSIONS.items() if hasattr(value, attribute)), None)
    arrays = isinstance(value, (list, tuple)) or hasattr(value, "__array_interface__")
    if arrays or remedy_of_kind is not None or isinstance(value, _DATA):
        remedy = "" if remedy_of_kind is None else f"Convert it: {remedy_of_kind}."
        raise StructureError(owner, expected, type(value).__name__,
                             f"Convert it, for example torch.as_tensor({name})." if arrays else remedy)


def distinct(graph: Graph) -> Graph | None:
    """Return the graph with each pair once, without weights; the graph itself if no pair repeats. `None` while
    compiling, when the number of distinct pairs is unknown. O(E log E) once, then remembered."""
    if torch.compiler.is_compiling():
        return None
    key = ("each pair once", graph.num_inputs, graph.num_outputs)
    return derived(graph.edge_index, key, lambda: _without_repeats(graph)) or graph


def _without_repeats(graph: Graph) -> Graph | None:
    keys = torch.unique(graph.source.long() * graph.num_outputs + graph.target.long())
    if keys.shape[0] == graph.num_edges:
        return None
    pairs = torch.stack([keys // max(graph.num_outputs, 1), keys % max(graph.num_outputs, 1)])
    return Graph(pairs.to(graph.edge_index.dtype), num_inputs=graph.num_inputs, num_outputs=graph.num_outputs,
                 samples=graph.samples)


def check_size(owner: str, name: str, size: Any) -> int:
    """Return `size` as an integer >= 0, or raise `StructureError`; a symbolic size is returned unchanged."""
    if torch.compiler.is_compiling():
        return size
    stand_in = isinstance(size, torch.SymInt) or not (hasattr(size, "__index__") or isinstance(size, _DATA))
    number = size if stand_in or type(size) is int else _whole(size)
    if not stand_in and not 0 <= number < _TOO_MANY:
        raise StructureError(owner, f"{name} must be an integer {'>= 0' if number < 0 else 'below 2^63'}", repr(size))
    return size if isinstance(size, int) else number


def _whole(size: Any) -> int:
    """Return the value as an integer; -1 if it is none."""
    try:
        return -1 if isinstance(size, bool) else operator.index(size)
    except TypeError:
        return -1


def _infer_sizes(edge_index: Tensor, inputs: int | None, outputs: int | None) -> tuple[int, int]:
    if not is_plain(edge_index):
        raise StructureError("Graph", "num_nodes must be given where edge_index has no values to read", "none",
                             "Say Graph(edge_index, num_nodes=...).")
    above = (edge_index.amax(1) + 1).tolist() if edge_index.shape[1] else [0, 0]
    if inputs is None and outputs is None:
        return max(above), max(above)
    return above[0] if inputs is None else inputs, above[1] if outputs is None else outputs


def check_samples(owner: str, item: str, held: Tensor, ends: tuple[Tensor, Tensor], sizes: tuple[int, int],
                  samples: Any) -> None:
    """Raise `StructureError` if the samples are of other numbers of entries, or an edge joins two samples.

    Args:
        item: "edges" or "triples", for the error.
        held: the tensor of edges; the result is remembered for it.
        ends: the inputs and outputs of the edges, (E,) each.
        sizes: M and N.
    """
    own = getattr(samples, "num_inputs", None), getattr(samples, "num_outputs", None)
    if own != sizes:
        raise StructureError(owner, f"samples must be Samples of M={sizes[0]} inputs and N={sizes[1]} outputs",
                             repr(samples), _ONE_GRAPH)

    def joined() -> bool:
        inputs, outputs = samples.members(held.device)
        return torch.equal(inputs[ends[0].long()], outputs[ends[1].long()])

    if not derived((held, samples.input_starts, samples.output_starts), "within samples", joined):
        raise StructureError(owner, f"{item} must join entries of one sample", "one that joins entries of two",
                             _ONE_GRAPH)


def check_edge_values(graph: Graph) -> None:
    edges, device = graph.num_edges, graph.edge_index.device
    weight, attr = graph.edge_weight, graph.edge_attr
    for name, value in (("edge_weight", weight), ("edge_attr", attr)):
        if value is not None and not isinstance(value, Tensor):
            raise StructureError("Graph", f"{name} must be a tensor", type(value).__name__,
                                 f"Convert it, for example torch.as_tensor({name}, dtype=torch.float32).")
    if weight is not None:
        if weight.dim() < 1 or weight.shape[-1] != edges:
            raise StructureError("Graph", f"edge_weight must have shape (E={edges},) or (..., E={edges})",
                                 tuple(weight.shape))
        if not weight.is_floating_point():
            raise StructureError("Graph", "edge_weight must be floating", weight.dtype, "Convert it with .float().")
    if attr is not None and (attr.dim() < 1 or attr.shape[edge_axis(attr)] != edges):
        raise StructureError("Graph", f"edge_attr must have shape (..., E={edges}, A) or (E={edges},)",
                             tuple(attr.shape))
    for name, value in (("edge_weight", weight), ("edge_attr", attr)):
        if value is not None and value.device != device:
            raise StructureError("Graph", f"{name} must be on the device of edge_index, {device}", value.device)


def edge_axis(attr: Tensor) -> int:
    """Return the axis of `edge_attr` that counts the edges: the last one before the channels."""
    return max(attr.dim() - 2, 0)


def _selected(attr: Tensor, keep: Tensor) -> Tensor:
    return attr[(slice(None),) * edge_axis(attr) + (keep,)]


#: Reductions of the attributes of the edges into an entry to those of its loop, and torch's names of some.
_REDUCTIONS = {"min": "amin", "max": "amax", "mul": "prod"}
_LOOP_REDUCTIONS = ("mean", "add", *_REDUCTIONS)


def attributes_of_loops(edge_attr: Tensor, index: Tensor, nodes: int, attr: float | str) -> Tensor:
    """Attributes (..., N, A) or (N) of loops, from those of the edges (2, E) into each entry; see `with_self_loops`."""
    axis = edge_axis(edge_attr)
    shape = (*edge_attr.shape[:axis], nodes, *edge_attr.shape[axis + 1:])
    if not isinstance(attr, str):
        return edge_attr.new_full((), attr).expand(shape)
    check_choice("with_self_loops", "attr", attr, _LOOP_REDUCTIONS)
    if attr == "mean" and not (edge_attr.is_floating_point() or edge_attr.is_complex()):
        edge_attr = edge_attr.to(torch.get_default_dtype())
    along, target = (*[1] * axis, -1, *[1] * (edge_attr.dim() - axis - 1)), index[1].long()
    if attr in _REDUCTIONS:
        index_of_edges, initial = target.view(along).expand(edge_attr.shape), int(attr == "mul")
        return edge_attr.new_full(shape, initial).scatter_reduce(axis, index_of_edges, edge_attr, _REDUCTIONS[attr],
                                                                 include_self=False)
    loops = edge_attr.new_zeros(shape).index_add(axis, target, edge_attr)
    if attr == "add":
        return loops
    # divided here: ONNX translates torch's own mean wrongly
    def count() -> Tensor:
        ones = torch.ones((), dtype=torch.float32, device=index.device).expand(target.shape)
        return ones.new_zeros(nodes).index_add(0, target, ones).clamp(min=1)

    counts = derived(index, ("edges into each", nodes), count)
    return loops / counts.to(edge_attr.real.dtype).view(along)


def looped(graph: Graph, attr: float | str = 0.0) -> Graph:
    """Return `graph.with_self_loops(attr=attr)` for use inside of a layer.

    Without weights and attributes the loops are listed only when `edge_index` is read: kernels add them themselves.
    Later changes of the graph's edges show in this graph too, so users get `with_self_loops`.
    """
    own = graph.__dict__
    graph_with_loops: Graph | None = own.get("_looped")
    if graph_with_loops is not None:
        return graph_with_loops
    bare = graph.edge_weight is None and graph.edge_attr is None and "_base" not in own
    square = graph.num_inputs == graph.num_outputs and (graph.samples is None or graph.samples.square)
    if not (bare and square and is_plain(graph.edge_index)):
        return graph.with_self_loops(attr=attr)
    own["_looped"] = graph_with_loops = object.__new__(Graph)
    graph_with_loops.__dict__.update(_base=graph.edge_index, num_inputs=graph.num_inputs, num_outputs=graph.num_outputs,
                                     edge_weight=None, edge_attr=None, samples=graph.samples)
    return graph_with_loops


def with_attributes(graph: Graph, attr: Tensor | None) -> Graph:
    """Return the graph without weights and with other attributes, unchecked: for use inside of a layer."""
    new: Graph = object.__new__(Graph)
    new.__dict__.update({name: getattr(graph, name) for name in Graph.__dataclass_fields__}, edge_weight=None,
                        edge_attr=attr)
    return new


def has_loops(index: Tensor) -> bool:
    """Return True if one of the edges (2, E) is a self-loop; remembered."""
    native = first_loop(index) if is_plain(index) else None
    if native is None:
        return derived(index, "has loops", lambda: bool((index[0] == index[1]).any()))
    return native >= 0


def with_listed_edges(graph: Graph) -> Graph:
    """Return the graph with a copy of `edge_index`, because a cache entry of a tensor must not hold that tensor."""
    return dataclasses.replace(graph, edge_index=graph.edge_index) if "_base" in graph.__dict__ else graph


def _edges_and_loops(index: Tensor, nodes: int) -> Tensor:
    """The edges, then a loop at each entry; remembered."""
    def appended() -> Tensor:
        loops = torch.arange(nodes, dtype=index.dtype, device=index.device)
        return torch.cat([index, loops.expand(2, nodes)], dim=1)

    return derived(index, ("self-loops", nodes), appended)


def _with_self_loops(graph: Graph, weight: float, attr: float | str) -> Graph:
    index, nodes = graph.edge_index, graph.num_inputs
    edge_weight, edge_attr = graph.edge_weight, graph.edge_attr
    if edge_weight is None and weight != 1.0:
        edge_weight = torch.ones(graph.num_edges, device=index.device)
    if edge_weight is not None:
        edge_weight = torch.cat([edge_weight, edge_weight.new_full((*edge_weight.shape[:-1], nodes), weight)], -1)
    if edge_attr is not None:
        edge_attr = torch.cat([edge_attr, attributes_of_loops(edge_attr, index, nodes, attr)],
                              edge_axis(edge_attr))
    return Graph(_edges_and_loops(index, nodes), num_nodes=nodes, edge_weight=edge_weight, edge_attr=edge_attr,
                 samples=graph.samples)
