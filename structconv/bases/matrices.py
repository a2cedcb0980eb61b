"""The matrices of a graph: its adjacency, its random walk and its Laplacian, as `Sparse` bases.

Degrees are summed in float32 or wider for every dtype; entries of degree 0 have weight 0. Values are computed once for
each graph and dtype, unless the graph's weights require a gradient.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv.bases.sparse import Sparse
from structconv.bases.tree import NormalizedWeights
from structconv.derived import derived, is_plain
from structconv.primitives.functions import sum_dtype
from structconv.structures.graph import Graph, listed_edges

__all__ = ["adjacency", "random_walk", "scaled_laplacian"]

NORMALIZATIONS = ("sym", "row", None)
#: The divisors of the entries of one side.
OF_A_SIDE = ("sum", "sqrt", "count", "sqrt_count", None)
Normalize = str | tuple[str | None, str | None] | None
#: Nodes up to which eigenvalues are those of the dense matrix, and products of an iteration beyond.
_DENSE_NODES, _ITERATIONS = 512, 1000
#: An eigenvalue of L that is smaller, beside its degrees, is zero but for rounding.
_ROUNDING = 1e-12


def adjacency(graph: Graph, normalize: Normalize, dtype: torch.dtype, weighted: bool = True) -> Sparse:
    """W, the weights of the edges, normalized; with weights (..., E) one W for each sample. O(E).

    Args:
        graph: A[m, n] is the weight of m -> n, 1 where it has none.
        normalize: "sym" for D^-1/2 W D^-1/2 with D_n = sum_m W_mn (of a graph with M != N, D_m = sum_n W_mn on the
            side of the inputs), "row" for W D^-1, the weights into each output summing to one, None for W. A pair says
            by what each side is divided, inputs first: "sum" of an entry's weights, "count" of its edges, their roots
            "sqrt" and "sqrt_count", or None.
        weighted: whether the values are the weights, or ones. A pair's "sum" and "sqrt" are of the weights anyway.
        dtype: of the values; unweighted edges without normalization stay ones, in the dtype of x.

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import adjacency
        >>> graph = Graph(torch.tensor([[0, 1], [2, 2]]), num_nodes=3)
        >>> adjacency(graph, "row", torch.float32).dense()[0, :, 2]
        tensor([0.5000, 0.5000, 0.0000])
    """
    if normalize in (None, (None, None)) and (graph.edge_weight is None or not weighted):
        return Sparse(graph)
    if normalize is None and cast(Tensor, graph.edge_weight).dtype is dtype and not is_compiling():
        return _over(graph, cast(Tensor, graph.edge_weight))
    return _over(graph, _values(graph, normalize, dtype, weighted))


def lazy_adjacency(graph: Graph, normalize: Normalize, dtype: torch.dtype, weighted: bool = True) -> Sparse:
    """`adjacency` with values that a kernel may make itself, where it can read the edges and no gradient is wanted."""
    weight = graph.edge_weight if weighted else None
    known = normalize in ("sym", "row") if weight is None else (
        normalize in (None, "sym", "row") and weight.dim() == 1 and weight.dtype is dtype and is_plain(weight)
        and not weight.requires_grad)
    if not (known and dtype is torch.float32 and is_plain(listed_edges(graph)[0])):
        return adjacency(graph, normalize, dtype, weighted)
    return Sparse(graph, cast(Tensor, NormalizedWeights(graph, cast(Any, normalize), weighted, dtype, _values)))


def _values(graph: Graph, normalize: Normalize, dtype: torch.dtype, weighted: bool) -> Tensor:
    """The weights of the edges, normalized; remembered."""
    build = _by_sides if isinstance(normalize, tuple) else _normalized
    return derived(graph, ("adjacency", normalize, dtype, weighted),
                   lambda: build(graph, normalize, sum_dtype(dtype), weighted).to(dtype))


def random_walk(graph: Graph, dtype: torch.dtype) -> Sparse:
    """D_O^-1 W: each input's outgoing weights divided by their sum. O(E).

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import random_walk
        >>> random_walk(Graph(torch.tensor([[0, 0], [1, 2]]), num_nodes=3), torch.float32).dense()[0, 0]
        tensor([0.0000, 0.5000, 0.5000])
    """
    def build() -> Tensor:
        weight = _weights(graph, sum_dtype(dtype))
        degree = _sums(graph.source, weight, graph.num_inputs)
        return (weight * _power(degree, -1.0).index_select(-1, graph.source)).to(dtype)

    return _over(graph, derived(graph, ("random walk", dtype), build))


def scaled_laplacian(graph: Graph, normalize: str | None, lambda_max: float, dtype: torch.dtype) -> Sparse:
    """2 L / lambda_max - I with L = I - W', W' the normalized adjacency, or D - W where `normalize` is None.

    The diagonal is one more edge a node, after the others, unless it is zero: lambda_max = 2 and L = I - W'. O(E).

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import scaled_laplacian
        >>> graph = Graph(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
        >>> scaled_laplacian(graph, "sym", 2.0, torch.float32).dense()[0]
        tensor([[ 0., -1.],
                [-1.,  0.]])
    """
    scale = 2.0 / lambda_max
    bare = normalize is not None and scale == 1.0

    def build() -> Tensor:
        values = _normalized(graph, normalize, sum_dtype(dtype))
        if bare:
            return -values.to(dtype)
        diagonal = values.new_full((*values.shape[:-1], graph.num_nodes), scale - 1.0)
        if normalize is None:
            diagonal = scale * _sums(graph.target, values, graph.num_outputs) - 1.0
        return torch.cat([-scale * values, diagonal], -1).to(dtype)

    values = derived(graph, ("laplacian", normalize, lambda_max, dtype), build)
    return _over(graph if bare else graph.with_self_loops(), values)


def _over(graph: Graph, values: Tensor) -> Sparse:
    """One matrix of values (E,), or of (..., E) one for each sample."""
    return Sparse(graph, values if values.dim() == 1 else values.unsqueeze(-2))


@torch.no_grad()
def laplacian_bound(graph: Graph, normalize: str | None) -> float:
    """The largest absolute value of an eigenvalue of L, remembered with the graph; 2 where L is zero up to rounding, as
    that of a graph without edges. Where samples have their own weights it is that of all.

    Of up to 512 nodes it is that of the dense matrix; beyond, at most 1000 products with L by power iteration, whose
    result, which is reached from below, is raised by 1e-5.
    """
    def build() -> float:
        laplacian = scaled_laplacian(graph, normalize, 2.0, torch.float64)  # L - I
        if graph.num_nodes <= _DENSE_NODES:
            a = laplacian.dense(torch.float64).squeeze(-3)
            eigenvalues = torch.linalg.eigvals(a + torch.eye(a.shape[-1], dtype=a.dtype, device=a.device))
            return float(eigenvalues.abs().max()) if a.numel() else 0.0
        assert laplacian.values is not None
        rows = laplacian.values.reshape(-1, laplacian.values.shape[-1])
        return max(_largest(Sparse(laplacian.graph, row)) for row in rows)

    def bound() -> float:
        result, degree = build(), 1.0
        if normalize is None:  # the sum of absolute weights measures the rounding of L
            weight = _weights(graph, torch.float64).abs()
            degree = float(_sums(graph.target, weight, graph.num_outputs).amax()) if graph.num_nodes else 0.0
        return result if result > _ROUNDING * degree else 2.0

    return derived(graph, ("lambda", normalize), bound)


def _largest(shifted: Sparse) -> float:
    """The length that L = `shifted` + I gives to a vector of length one, after many products."""
    generator = torch.Generator().manual_seed(0)
    vector = torch.randn(shifted.num_inputs, 1, generator=generator, dtype=torch.float64).to(shifted.device)
    result = 0.0
    for _ in range(_ITERATIONS):
        vector = vector / torch.linalg.vector_norm(vector)
        vector = shifted.analysis(vector).squeeze(-3) + vector
        before, result = result, float(torch.linalg.vector_norm(vector))
        if abs(result - before) <= 1e-7 * result:
            break
    return result * (1 + 1e-5)


def _by_sides(graph: Graph, normalize: Any, dtype: torch.dtype, weighted: bool) -> Tensor:
    weight = _weights(graph, dtype)
    ones = torch.ones_like(weight)
    values = weight if weighted else ones
    for side, entries, size in zip(normalize, (graph.source, graph.target), (graph.num_inputs, graph.num_outputs),
                                   strict=True):
        if side is not None:
            degree = _sums(entries, ones if side.endswith("count") else weight, size)
            values = values * _power(degree, -0.5 if side.startswith("sqrt") else -1.0).index_select(-1, entries)
    return values


def _normalized(graph: Graph, normalize: Any, dtype: torch.dtype, weighted: bool = True) -> Tensor:
    weight = _weights(graph, dtype)
    weight = weight if weighted else torch.ones_like(weight)
    if normalize is None:
        return weight
    target = _sums(graph.target, weight, graph.num_outputs)
    if normalize == "row":
        return weight * _power(target, -1.0).index_select(-1, graph.target)
    of_target = _power(target, -0.5)
    of_source = (of_target if graph.is_square
                 else _power(_sums(graph.source, weight, graph.num_inputs), -0.5))
    return of_source.index_select(-1, graph.source) * weight * of_target.index_select(-1, graph.target)


def _weights(graph: Graph, dtype: torch.dtype) -> Tensor:
    if not is_compiling():
        graph.layouts()  # refuses an index out of range before anything is gathered by it
    if graph.edge_weight is None:
        return torch.ones(graph.num_edges, dtype=dtype, device=graph.edge_index.device)
    return graph.edge_weight.to(dtype)


def _sums(entries: Tensor, weight: Tensor, size: int) -> Tensor:
    return weight.new_zeros(*weight.shape[:-1], size).index_add(-1, entries, weight)


def _power(degree: Tensor, exponent: float) -> Tensor:
    """degree^exponent, and 0 (with gradient 0) where the degree is 0."""
    empty = degree == 0
    if not degree.requires_grad:
        return degree.pow(exponent).masked_fill_(empty, 0.0)
    return torch.where(empty, torch.zeros_like(degree), torch.where(empty, 1.0, degree).pow(exponent))
