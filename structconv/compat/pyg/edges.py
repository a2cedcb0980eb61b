"""Edges of PyTorch Geometric's layers as a `Graph`, and back; its rules for self-loops; edges as entries."""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv.bases.matrices import lazy_adjacency
from structconv.bases.sparse import Sparse
from structconv.compat.pyg.linear import project
from structconv.compat.pyg.operator import apply, is_few
from structconv.derived import derived, forget_changed, is_plain, values_known
from structconv.errors import ShapeError, StructureError
from structconv.nn.direct import FEW_NUMBERS
from structconv.structures.exchange import floating
from structconv.structures.graph import Graph, attributes_of_loops, has_loops, listed_edges, looped, with_attributes
from structconv.torch_compat import is_batched, is_functional
from structconv.weights import Eye

__all__ = ["Fill", "edges_to_outputs", "gather", "graph_of", "group_count", "has_repeats", "is_sparse", "matrix_of",
           "memberships", "numbered", "replaced_loops", "warn_of_two_kinds", "with_loops", "with_remaining_loops",
           "without_edges", "without_loops", "without_ones"]

Fill = float | str | Tensor
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)


def is_sparse(edges: Any) -> bool:
    """Return True for a sparse matrix: torch's COO, CSR and CSC, and torch_sparse's `SparseTensor`."""
    if type(edges) is Tensor:
        return edges.layout in _SPARSE
    return hasattr(edges, "coo") or (isinstance(edges, Tensor) and edges.layout in _SPARSE)


def graph_of(owner: str, edges: Any, inputs: int, outputs: int | None, flow: str,
             weight: Tensor | None = None, attr: Tensor | None = None) -> Graph:
    """The graph of `edge_index` (2, E), or of a sparse matrix (N, M) whose rows are the targets.

    Args:
        owner: the layer, for errors.
        inputs: M, the rows of x. outputs: N, or `None` for a sparse matrix's own, else M.
        flow: "target_to_source" turns the edges of an `edge_index` around.
        weight, attr: of the edges. Without them those of a sparse matrix are its values: weights if each is a number,
            attributes if each is a row.
    """
    if is_sparse(edges):
        if flow != "source_to_target":
            raise StructureError(owner, "flow must be 'source_to_target' for a sparse matrix", repr(flow),
                                 "Give the transposed matrix.")
        graph = _of_matrix(edges)
        if graph.num_inputs != inputs or (outputs is not None and outputs != graph.num_outputs):
            raise StructureError(owner, f"the matrix must have shape (N, M={inputs})",
                                 (graph.num_outputs, graph.num_inputs), "Its rows are the targets of the edges.")
        if weight is None and attr is None:
            return graph
        return dataclasses.replace(graph, edge_weight=graph.edge_weight if weight is None else weight,
                                   edge_attr=graph.edge_attr if attr is None else attr)
    if not isinstance(edges, Tensor):
        raise StructureError(owner, "edge_index must be a tensor (2, E) or a sparse matrix", type(edges).__name__)
    index: Tensor = edges if type(edges) is Tensor or not hasattr(edges, "as_tensor") else edges.as_tensor()
    if outputs is None:
        sizes = edges.sparse_size() if hasattr(edges, "sparse_size") else (None, None)
        outputs = inputs if sizes[1] is None else sizes[1]
    # Only what NumPy may share is compared: the test of `forget_changed`, here without a call of it on a new batch.
    if not (is_compiling() or is_functional(index) or is_batched(index) or index.untyped_storage().resizable()):
        forget_changed(index)
    if weight is not None:
        forget_changed(weight)
        if not weight.is_floating_point():
            weight = derived(weight, "floating", partial(floating, weight))
    if flow != "source_to_target":
        index = derived(index, "turned", lambda: index.flip(0))
    if weight is not None and weight.dim() > 1:
        weight = weight.flatten()
    return Graph(index, num_inputs=inputs, num_outputs=outputs, edge_weight=weight, edge_attr=attr)


def without_ones(graph: Graph, matrix: Any) -> Graph:
    """The graph of a sparse matrix of torch, without weights if each is 1: sums and means need none."""
    weight = graph.edge_weight
    if weight is None or not isinstance(matrix, Tensor) or weight.requires_grad or not is_plain(weight):
        return graph
    if not derived(weight, "of ones", lambda: bool((weight == 1).all())):
        return graph
    return derived(matrix, "without weights", lambda: dataclasses.replace(graph, edge_weight=None))


def _of_matrix(matrix: Any) -> Graph:
    if isinstance(matrix, Tensor) and matrix.layout is torch.sparse_coo and matrix.dense_dim():
        rows = matrix if matrix.is_coalesced() else matrix.coalesce()
        return Graph(derived(matrix, "edges", lambda: rows.indices().flip(0)), num_inputs=matrix.shape[1],
                     num_outputs=matrix.shape[0], edge_attr=rows.values())
    if isinstance(matrix, Tensor):  # whose values, as views, would hold it
        graph = derived(matrix, "graph", lambda: Graph.from_torch_sparse(
            matrix if matrix.requires_grad else matrix.detach()).reversed())
        if graph.edge_weight is not None:
            forget_changed(graph.edge_weight)
        return graph
    row, col, value = matrix.coo()
    numbers = value is None or value.dim() == 1
    return Graph(torch.stack([col, row]), num_inputs=matrix.size(1), num_outputs=matrix.size(0),
                 edge_weight=value if numbers else None, edge_attr=None if numbers else value)


def matrix_of(values: Tensor, graph: Graph, layout: torch.layout) -> tuple[Tensor, Tensor]:
    """The values (E, ...) of the edges as a sparse matrix (N, M, ...) whose rows are the targets, and in its order."""
    order = (graph.target.long() * graph.num_inputs + graph.source).argsort(stable=True)
    target, source, values = graph.target[order].long(), graph.source[order].long(), values[order]
    shape = (graph.num_outputs, graph.num_inputs, *values.shape[1:])
    if layout is torch.sparse_csr:
        starts = torch.searchsorted(target, torch.arange(graph.num_outputs + 1, device=target.device))
        return torch.sparse_csr_tensor(starts, source, values, shape), values
    return torch.sparse_coo_tensor(torch.stack([target, source]), values, shape, is_coalesced=True), values


def _parts(graph: Graph) -> tuple[Tensor, Tensor, Tensor] | None:
    """The positions of the edges that are no loops, their index, and the positions of loops; `None` without loops."""
    def split() -> tuple[Tensor, Tensor, Tensor]:
        loop = graph.source == graph.target
        kept = (~loop).nonzero().squeeze(-1)
        return kept, graph.edge_index[:, kept], loop.nonzero().squeeze(-1)

    return derived(graph.edge_index, "split at loops", split) if has_loops(graph.edge_index) else None


def has_repeats(graph: Graph) -> bool:
    """Return True if several edges are known to lead from one entry to another. O(E log E) once."""
    index, outputs = listed_edges(graph)[0], graph.num_outputs

    def repeats() -> bool:
        pairs = index[0].long() * outputs + index[1]
        return len(pairs.unique()) < len(pairs)

    return values_known(index) and derived(index, ("repeats", outputs), repeats)


def without_loops(graph: Graph) -> Graph:
    """The graph without edges n -> n. Under `torch.compile` they stay, with weight 0: see `with_remaining_loops`."""
    if is_compiling():
        loop, weight = graph.source == graph.target, graph.edge_weight
        weight = torch.ones(loop.shape, device=loop.device) if weight is None else weight
        return dataclasses.replace(graph, edge_weight=weight.masked_fill(loop, 0.0))
    return _without_loops(graph)


def _without_loops(graph: Graph) -> Graph:
    parts = _parts(graph)
    if parts is None:
        return graph
    kept, index, _ = parts
    weight, attr = graph.edge_weight, graph.edge_attr
    return dataclasses.replace(graph, edge_index=index, edge_weight=None if weight is None else weight[kept],
                               edge_attr=None if attr is None else attr[kept])


def with_remaining_loops(graph: Graph, fill: float, summed: bool = False) -> Graph:
    """One loop for each entry, after the other edges: an entry that has one keeps its weight, others get `fill`.

    With `summed` the weight of a loop and `fill` add up. Edges without weights stay so.

    Under `torch.compile` the loops that exist stay, with weight 0, so that the number of edges depends only on sizes.
    Sums are right then; for aggregations that count edges see `replaced_loops`.
    """
    if is_compiling():
        return _of_fixed_size(graph, fill, summed)
    weight, parts = graph.edge_weight, _parts(graph)
    bare = _without_loops(graph) if parts else graph
    if weight is None or parts is None:
        return bare.with_self_loops(fill) if weight is not None else looped(bare)
    loops = parts[2]
    loop_weight = weight[loops] + fill if summed else weight[loops]
    own = weight.new_full((graph.num_inputs,), fill).index_put((graph.source[loops].long(),), loop_weight)
    square = dataclasses.replace(bare, edge_weight=None).with_self_loops()
    return dataclasses.replace(square, edge_weight=torch.cat([weight[parts[0]], own]))


def _of_fixed_size(graph: Graph, fill: float, summed: bool) -> Graph:
    """`with_remaining_loops` under `torch.compile`."""
    edge_weight, loop, entries = graph.edge_weight, graph.source == graph.target, graph.num_inputs
    weight = torch.ones(loop.shape, device=loop.device) if edge_weight is None else edge_weight
    own = weight.new_full((entries + 1,), 1.0 if edge_weight is None else fill)  # the last: edges that are no loops
    if edge_weight is not None:
        own = own.index_put((torch.where(loop, graph.source.long(), entries),), weight + fill if summed else weight)
    square = dataclasses.replace(graph, edge_weight=None).with_self_loops()
    return dataclasses.replace(square, edge_weight=torch.cat([weight.masked_fill(loop, 0.0), own[:entries]]))


def replaced_loops(graph: Graph) -> Tensor:
    """The edges (E,) that `with_remaining_loops` keeps under `torch.compile`, and that later loops replace."""
    position = torch.arange(graph.num_edges, device=graph.edge_index.device)
    return (graph.source == graph.target) & (position < graph.num_edges - graph.num_inputs)


def without_edges(graph: Graph, absent: Tensor) -> Graph:
    """The graph whose edges where `absent` (E,) is true lead to one more output, the last, which the caller drops, so
    that the number of edges does not depend on them."""
    index = torch.stack([graph.source, torch.where(absent, graph.num_outputs, graph.target)])
    return Graph(index, num_inputs=graph.num_inputs, num_outputs=graph.num_outputs + 1)


def warn_of_two_kinds(owner: str, x: Tensor, z: Tensor | None, graph: Graph) -> None:
    """Warn that loops join the sources x to other targets z, unless these are the first of the sources."""
    if is_compiling() or (z is None and graph.is_square):
        return
    plain = z is not None and not any(test(t) for test in (is_batched, is_functional) for t in (x, z))
    if not plain or cast(Tensor, z).data_ptr() != x.data_ptr():
        warnings.warn(f"{owner} joins source n to target n, as PyTorch Geometric does, where both may be nodes of two "
                      "kinds. Say add_self_loops=False, or, if the targets are the first N sources, pass (x, x[:N]).",
                      stacklevel=3)


def with_loops(graph: Graph, fill: Fill = "mean") -> Graph:
    """Edges n -> n in place of those that exist, after the others, for each n below both M and N.

    `fill` says what attributes they have, as in `Graph.with_self_loops`, or is a tensor of them.

    Under `torch.compile` the loops that exist stay, so that the number of edges depends only on sizes, and
    `edge_weight` is what to add to the scores of a softmax: minus infinity for these loops, else 0.
    """
    inputs, outputs = graph.num_inputs, graph.num_outputs
    count = min(inputs, outputs)
    if is_compiling():
        loop = graph.source == graph.target
        absent = torch.zeros(loop.shape, device=loop.device).masked_fill(loop, -torch.inf)
        moved = torch.where(loop, max(inputs, outputs), graph.edge_index)  # loops join an entry that does not exist
        return Graph(_followed_by_loops(graph.edge_index, count), num_inputs=inputs, num_outputs=outputs,
                     edge_weight=torch.cat([absent, absent.new_zeros(count)]),
                     edge_attr=_attributes(graph.edge_attr, moved, inputs, outputs, fill))
    if graph.edge_attr is None and inputs == outputs:
        bare = _without_loops(graph)
        return looped(bare if bare.edge_weight is None else dataclasses.replace(bare, edge_weight=None))
    attr, (kept, index, _) = graph.edge_attr, _parts(graph) or (None, graph.edge_index, None)
    joined = derived(index, ("with loops", inputs, outputs), lambda: Graph(
        _followed_by_loops(index, count), num_inputs=inputs, num_outputs=outputs))
    if attr is not None and attr.dim() == 2 and type(fill) is str and fill in ("mean", "add") and (
            attr.is_floating_point() and is_few(graph, attr.shape[1])):
        sums = derived(graph.edge_index, ("loops of", inputs, outputs),
                       lambda: _sums_of_loops(graph, kept, index, count))
        attr = project(attr, lazy_adjacency(sums, "row" if fill == "mean" else None, attr.dtype), None)
    else:
        attr = attr if attr is None or kept is None else attr.index_select(0, kept)
        attr = _attributes(attr, index, inputs, outputs, fill)
    return with_attributes(joined, attr)


def _followed_by_loops(index: Tensor, count: int) -> Tensor:
    return derived(index, ("followed by loops", count), lambda: torch.cat(
        [index, torch.arange(count, dtype=index.dtype, device=index.device).expand(2, count)], 1))


def _sums_of_loops(graph: Graph, kept: Tensor | None, index: Tensor, count: int) -> Graph:
    """The graph from all edges to those that are no loops, at the positions `kept`, and to loops at their targets."""
    edges = index.shape[1]
    positions = torch.arange(edges, device=index.device)
    kept, loops = positions if kept is None else kept, (index[1] < count).nonzero().squeeze(-1)
    ends = torch.cat([positions, index[1, loops] + edges])
    return Graph(torch.stack([torch.cat([kept, kept[loops]]), ends]), num_inputs=graph.num_edges,
                 num_outputs=edges + count)


def _attributes(attr: Tensor | None, index: Tensor, inputs: int, outputs: int, fill: Fill) -> Tensor | None:
    """The attributes of edges, then those of loops, which `fill` computes from those of the edges `index`."""
    count = min(inputs, outputs)
    if attr is None:
        return None
    if isinstance(fill, Tensor):
        return torch.cat([attr, fill.to(attr).expand(count, *attr.shape[1:])])
    rows = max(inputs, outputs) + 1
    return torch.cat([attr, attributes_of_loops(attr, index, rows, fill)[:count]])


def group_count(index: Tensor) -> int:
    """The number of groups that the entries (E,) name: the largest plus one."""
    forget_changed(index)
    return derived(index, "groups", lambda: int(index.max()) + 1 if index.numel() else 0)


def numbered(ends: Tensor) -> Tensor:
    """Edges (2, E) that join entry e to ends[e]."""
    return torch.stack([torch.arange(ends.shape[0], dtype=ends.dtype, device=ends.device), ends])


def memberships(owner: str, groups: Tensor, rows: int, size: int | None) -> Graph:
    """The graph that joins each row to its group (E,); `rows` and `size` are the numbers of both, the last if known."""
    if groups.shape != (rows,):
        raise ShapeError(owner, f"the groups must have shape (E={rows},), one for each row of x", tuple(groups.shape))
    if groups.dtype not in (torch.int32, torch.int64):
        raise StructureError(owner, "the groups must be of dtype int32 or int64", groups.dtype,
                             "Convert them with .long().")
    forget_changed(groups)
    return Graph(derived(groups, "members", lambda: numbered(groups)), num_inputs=rows,
                 num_outputs=group_count(groups) if size is None else size)


def edges_to_outputs(graph: Graph) -> Graph:
    """The graph whose inputs are the edges, each joined to its target: E entries to N."""
    return derived(graph.edge_index, ("edges to outputs", graph.num_outputs), lambda: Graph(
        numbered(graph.target), num_inputs=graph.num_edges, num_outputs=graph.num_outputs))


def gather(x: Tensor, graph: Graph, targets: bool = False) -> Tensor:
    """The row of x (..., M, C) at the source of each edge, or of x (..., N, C) at its target: (..., E, C)."""
    if not is_compiling() and graph.num_edges * x.shape[-1] <= FEW_NUMBERS:
        return x.index_select(-2, graph.edge_index[int(targets)])  # which the call has checked
    graph = graph.reversed() if targets else graph
    joined = derived(graph.edge_index, "inputs to edges", lambda: numbered(graph.source).flip(0))
    to_edges = Graph(joined, num_inputs=graph.num_inputs, num_outputs=graph.num_edges)
    return apply(x, Sparse(to_edges), Eye.of(1, x.shape[-1]))
