"""Layers over graphs: GCN, Chebyshev, GAT, GATv2, dot-product attention, and the sparse product beneath them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.case import Case, Comparison, Entrant, Size, copied, entrant, heads_to_rows, leaf
from benchmarks.graphs import citation, csr, normalized_csr, power_law
from benchmarks.rates import gathers
from structconv.mechanisms import STRUCTURE, DotProduct
from structconv.nn import ChebConv, Conv, GATConv, GATv2Conv, GCNConv
from structconv.primitives.csr import spmm
from structconv.primitives.edge_attention import bilinear_attention
from structconv.primitives.native.build import compiler
from structconv.structures import Graph
from structconv.weights import HeadBlocks

__all__ = ["CASES", "build_gat", "build_gcn", "geometric_gat", "geometric_gatv2", "geometric_gcn"]

_QUICK, _FULL = 100_000, 2_000_000
#: Rows of one number an edge and channel that a library which gathers first holds in training, as measured.
_GATHERED = 5.0


def build_gcn(graph: Graph, in_channels: int, channels: int, uncached: bool = False) -> Comparison:
    """GCN's layer with its normalization, which all that can remember it do remember; with `uncached` PyTorch
    Geometric's also as it is by default, which does not."""
    ours: Any = GCNConv(in_channels, channels)
    theta = ours.weight.theta.detach()[0]
    x = leaf(graph.num_nodes, in_channels)
    result = [_torch_gcn(graph, theta, x.shape), *_geometric_gcn(graph, theta, x.shape, uncached),
             *_dgl_gcn(graph, theta, x.shape)]
    edges = graph.num_edges + graph.num_nodes
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, graph), x), peers=tuple(result),
                      edges=graph.num_edges, size=_size(graph, in_channels, channels),
                      least=gathers(edges, graph.num_nodes, min(in_channels, channels), in_channels * channels))


def _torch_gcn(graph: Graph, theta: Tensor, shape: torch.Size) -> Entrant:
    layer, x, matrix = nn.Linear(*theta.shape), leaf(*shape), normalized_csr(graph)
    copied(layer.weight, theta.mT, layer.bias)
    weight, bias = layer.weight, layer.bias
    narrow = theta.shape[1] <= theta.shape[0]

    def run() -> Tensor:
        return matrix @ (x @ weight.mT) + bias if narrow else (matrix @ x) @ weight.mT + bias

    return entrant("torch csr", layer, run, x)


def _geometric_gcn(graph: Graph, theta: Tensor, shape: torch.Size, uncached: bool) -> list[Entrant]:
    library, result = peers.geometric(), []
    for cached in (True, False)[:1 + uncached] if library is not None else ():
        layer, x = geometric_gcn(library, theta, cached=cached), leaf(*shape)
        result.append(entrant("pyg" if cached else "pyg uncached", layer, partial(layer, x, graph.edge_index), x,
                              needs=_GATHERED * 4 * graph.num_edges * theta.shape[1]))
    return result


def _dgl_gcn(graph: Graph, theta: Tensor, shape: torch.Size) -> list[Entrant]:
    library = peers.dgl()
    if library is None:
        return []
    looped = graph.with_self_loops()
    scale = torch.bincount(looped.target, minlength=looped.num_nodes).float().rsqrt()
    weight, g = (scale[looped.source] * scale[looped.target]), _dgl_graph(library, looped)
    layer, x = library.nn.pytorch.GraphConv(*theta.shape, norm="none"), leaf(*shape)
    copied(layer.weight, theta)
    return [entrant("dgl", layer, lambda: layer(g, x, edge_weight=weight), x)]


def build_gat(graph: Graph, in_channels: int, heads: int, channels: int) -> Comparison:
    """GAT's layer, on the edges as they are."""
    ours: Any = GATConv(in_channels, channels, heads, add_self_loops=False)
    x, wide, result = leaf(graph.num_nodes, in_channels), heads * channels, []
    if (library := peers.geometric()) is not None:
        pyg, x_pyg = geometric_gat(library, ours, add_self_loops=False), leaf(*x.shape)
        needs = _GATHERED * 4 * graph.num_edges * wide
        result.append(entrant("pyg", pyg, lambda: pyg(x_pyg, graph.edge_index), x_pyg, needs=needs))
        if compiler() is not None:  # without one `torch.compile` stops on a CPU
            compiled, x_compiled = torch.compile(pyg), leaf(*x.shape)
            result.append(entrant("pyg compiled", pyg, lambda: compiled(x_compiled, graph.edge_index), x_compiled,
                                 needs=needs, full_only=True))
    if (library := peers.dgl()) is not None:
        dgl = library.nn.pytorch.GATConv(in_channels, channels, heads, allow_zero_in_degree=True)
        x_dgl, g = leaf(*x.shape), _dgl_graph(library, graph)
        copied(dgl.fc.weight, heads_to_rows(ours.weight.theta))
        copied(dgl.attn_l, ours.attention.vector_source[None])
        copied(dgl.attn_r, ours.attention.vector_target[None])
        result.append(entrant("dgl", dgl, lambda: dgl(g, x_dgl).flatten(1), x_dgl))
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, graph), x), peers=tuple(result), edges=graph.num_edges,
                      size=_size(graph, in_channels, f"{heads}x{channels}"),
                      least=gathers(graph.num_edges, graph.num_nodes, wide, in_channels * wide))


def _gat_kernel(heads: int, channels: int, size: Size) -> Comparison:
    """The attention alone, after the projection: for the roofline of gathered rows."""
    from structconv.primitives.edge_attention import affine_attention

    graph = power_law(size.pick(_QUICK, _FULL))
    source, target = leaf(graph.num_nodes, heads, seed=1), leaf(graph.num_nodes, heads, seed=2)
    x = leaf(graph.num_nodes, heads, channels)
    ours = Entrant(name="ours", inputs=(x, source, target), run=lambda: affine_attention(
        graph.by_target(), graph.by_source(), source, target, x))
    return Comparison(ours=ours, peers=(), edges=graph.num_edges, size=_size(graph, "", f"{heads}x{channels}"),
                      least=gathers(graph.num_edges, graph.num_nodes, heads * channels, 0))


def _gatv2(in_channels: int, heads: int, channels: int, size: Size) -> Comparison:
    """Additive attention with a leaky ReLU along edges; the values are the projected sources."""
    graph, wide = power_law(size.pick(_QUICK, _FULL)), heads * channels
    ours: Any = GATv2Conv(in_channels, channels, heads, add_self_loops=False, bias=False)
    nn.init.zeros_(ours.attention.target.bias)
    x, result = leaf(graph.num_nodes, in_channels), []
    if (library := peers.geometric()) is not None:
        pyg, x_pyg = geometric_gatv2(library, ours, add_self_loops=False, bias=False), leaf(*x.shape)
        result.append(entrant("pyg", pyg, lambda: pyg(x_pyg, graph.edge_index), x_pyg,
                             needs=2 * _GATHERED * 4 * graph.num_edges * wide))
    if (library := peers.dgl()) is not None:
        dgl = library.nn.pytorch.GATv2Conv(in_channels, channels, heads, bias=False, allow_zero_in_degree=True)
        x_dgl, g = leaf(*x.shape), _dgl_graph(library, graph)
        copied(dgl.fc_src.weight, heads_to_rows(ours.weight.theta))
        copied(dgl.fc_dst.weight, ours.attention.target.weight)
        copied(dgl.attn, ours.attention.vector[None])
        result.append(entrant("dgl", dgl, lambda: dgl(g, x_dgl).flatten(1), x_dgl, needs=_GATHERED * 4
                             * graph.num_edges * wide))
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, graph), x), peers=tuple(result),
                      edges=graph.num_edges, size=_size(graph, in_channels, f"{heads}x{channels}"),
                      least=gathers(graph.num_edges, graph.num_nodes, wide, 2 * in_channels * wide))


def _dot_product(in_channels: int, heads: int, channels: int, size: Size) -> Comparison:
    """Scaled dot-product attention along edges, projections included."""
    graph, wide = power_law(size.pick(_QUICK, _FULL)), heads * channels
    attention = DotProduct(heads, channels).scaled().masked(keep=STRUCTURE).softmax()
    ours: Any = Conv(attention, in_channels, wide, weight=HeadBlocks(), bias=False)
    query, key = ours.attention.query.weight.detach(), ours.attention.key.weight.detach()
    rows, x, result = heads_to_rows(ours.weight.theta), leaf(graph.num_nodes, in_channels), []
    if (library := peers.geometric()) is not None:
        pyg, x_pyg = library.TransformerConv(in_channels, channels, heads, root_weight=False), leaf(*x.shape)
        for part, weight in ((pyg.lin_query, query), (pyg.lin_key, key), (pyg.lin_value, rows)):
            copied(part.weight, weight, part.bias)
        used = [part for name, part in pyg.named_parameters() if "skip" not in name and "beta" not in name]
        result.append(Entrant(name="pyg", run=lambda: pyg(x_pyg, graph.edge_index), inputs=(x_pyg,),
                             parameters=tuple(used), needs=2 * _GATHERED * 4 * graph.num_edges * wide))
    if (library := peers.dgl()) is not None:
        layers, x_dgl = [nn.Linear(in_channels, wide, bias=False) for _ in range(3)], leaf(*x.shape)
        for layer, weight in zip(layers, (query, key, rows), strict=True):
            copied(layer.weight, weight)
        g = _dgl_graph(library, graph)

        def run() -> Tensor:
            projected = [layer(x_dgl).unflatten(-1, (heads, channels)) for layer in layers]
            return _dgl_attention(library, g, *projected).flatten(1)

        result.append(entrant("dgl", nn.ModuleList(layers), run, x_dgl))
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, structure=graph), x), peers=tuple(result),
                      edges=graph.num_edges, size=_size(graph, in_channels, f"{heads}x{channels}"),
                      least=gathers(2 * graph.num_edges, graph.num_nodes, wide, 3 * in_channels * wide))


def _dot_kernel(heads: int, channels: int, size: Size) -> Comparison:
    """The attention alone, of given queries, keys and values."""
    graph, wide = power_law(size.pick(_QUICK, _FULL)), heads * channels

    def inputs() -> tuple[Tensor, ...]:
        return tuple(leaf(graph.num_nodes, heads, channels, seed=seed) for seed in range(3))

    ours, result = inputs(), []
    if (library := peers.geometric()) is not None:
        pyg, of_pyg = library.TransformerConv(wide, channels, heads, root_weight=False), inputs()
        result.append(Entrant(name="pyg", run=lambda: _geometric_attention(pyg, graph.edge_index, *of_pyg),
                              inputs=of_pyg, needs=2 * _GATHERED * 4 * graph.num_edges * wide))
    if (library := peers.dgl()) is not None:
        g, of_dgl = _dgl_graph(library, graph), inputs()
        result.append(Entrant(name="dgl", run=lambda: _dgl_attention(library, g, *of_dgl), inputs=of_dgl))
    run = partial(bilinear_attention, graph.by_target(), graph.by_source(), *ours, scale=channels**-0.5)
    return Comparison(ours=Entrant(name="ours", run=run, inputs=ours), peers=tuple(result), edges=graph.num_edges,
                      size=_size(graph, "", f"{heads}x{channels}"),
                      least=gathers(2 * graph.num_edges, graph.num_nodes, wide, 0))


def build_chebyshev(graph: Graph, in_channels: int, channels: int, terms: int) -> Comparison:
    """Chebyshev polynomials of the symmetric Laplacian; the graph comes with its reverse edges."""
    ours: Any = ChebConv(in_channels, channels, terms)
    theta, x, result = ours.weight.theta.detach(), leaf(graph.num_nodes, in_channels), []
    if (library := peers.geometric()) is not None:
        pyg, x_pyg = library.ChebConv(in_channels, channels, terms), leaf(*x.shape)
        for part, weight in zip(pyg.lins, theta, strict=True):
            copied(part.weight, weight.mT)
        result.append(entrant("pyg", pyg, lambda: pyg(x_pyg, graph.edge_index), x_pyg,
                             needs=2 * 4 * graph.num_edges * in_channels))
    if (library := peers.dgl()) is not None:
        dgl = library.nn.pytorch.ChebConv(in_channels, channels, terms, activation=None)
        x_dgl, g = leaf(*x.shape), _dgl_graph(library, graph)
        copied(dgl.linear.weight, theta.flatten(0, 1).mT, dgl.linear.bias)
        result.append(entrant("dgl", dgl, lambda: dgl(g, x_dgl, lambda_max=[2.0]), x_dgl))
    narrow = min(in_channels, channels)
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, graph), x), peers=tuple(result), edges=graph.num_edges,
                      size=f"{_size(graph, in_channels, channels)}, K={terms}",
                      least=gathers((terms - 1) * graph.num_edges, graph.num_nodes, narrow,
                                   terms * in_channels * channels))


def _chebyshev(in_channels: int, channels: int, terms: int, size: Size) -> Comparison:
    edges = size.pick(_QUICK, _FULL // 2)
    half = power_law(edges // 2, max(edges // 10, 16))
    graph = Graph(torch.cat([half.edge_index, half.edge_index.flip(0)], 1), num_nodes=half.num_nodes)
    return build_chebyshev(graph, in_channels, channels, terms)


def _spmm(channels: int, size: Size) -> Comparison:
    """The sparse product with given values; the gradient goes to x."""
    graph = power_law(size.pick(_QUICK, _FULL))
    values = torch.rand(graph.num_edges, generator=torch.Generator().manual_seed(3))
    x, x_torch, matrix = leaf(graph.num_nodes, channels), leaf(graph.num_nodes, channels), csr(graph, values)
    result = [Entrant(name="torch csr", run=lambda: matrix @ x_torch, inputs=(x_torch,))]
    if (library := peers.dgl()) is not None:
        x_dgl, g, column = leaf(*x.shape), _dgl_graph(library, graph), values[:, None]
        result.append(Entrant(name="dgl", run=lambda: library.ops.u_mul_e_sum(g, x_dgl, column), inputs=(x_dgl,)))
    ours = Entrant(name="ours", run=lambda: spmm(graph.by_target(), graph.by_source(), values, x), inputs=(x,))
    return Comparison(ours=ours, peers=tuple(result), edges=graph.num_edges, size=_size(graph, "", channels),
                      least=gathers(graph.num_edges, graph.num_nodes, channels, 0))


def geometric_gcn(library: Any, theta: Tensor, **options: Any) -> Any:
    """PyTorch Geometric's `GCNConv` with Theta (P, Q)."""
    layer = library.GCNConv(*theta.shape, **options)
    copied(layer.lin.weight, theta.mT)
    return layer


def geometric_gat(library: Any, ours: Any, **options: Any) -> Any:
    """PyTorch Geometric's `GATConv` with our numbers."""
    heads, in_channels, channels = ours.weight.theta.shape
    layer = library.GATConv(in_channels, channels, heads, **options)
    copied(layer.lin.weight, heads_to_rows(ours.weight.theta))
    copied(layer.att_src, ours.attention.vector_source[None])
    copied(layer.att_dst, ours.attention.vector_target[None])
    return layer


def geometric_gatv2(library: Any, ours: Any, **options: Any) -> Any:
    """PyTorch Geometric's `GATv2Conv` with our numbers; the bias of our targets must be zero."""
    heads, in_channels, channels = ours.weight.theta.shape
    layer = library.GATv2Conv(in_channels, channels, heads, **options)
    copied(layer.lin_l.weight, heads_to_rows(ours.weight.theta), layer.lin_l.bias)
    copied(layer.lin_r.weight, ours.attention.target.weight, layer.lin_r.bias)
    copied(layer.att, ours.attention.vector[None])
    return layer


def _dgl_graph(library: Any, graph: Graph) -> Any:
    """The graph as DGL's, with 32-bit indices and both sorted layouts made."""
    g = library.graph((graph.source, graph.target), num_nodes=graph.num_nodes).int()
    g.create_formats_()
    return g


def _dgl_attention(library: Any, g: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of given queries (N, K, D), keys and values (M, K, D) -> (N, K, D)."""
    scores = library.ops.u_dot_v(g, key, query * query.shape[-1]**-0.5)
    return library.ops.u_mul_e_sum(g, value, library.ops.edge_softmax(g, scores))


def _geometric_attention(layer: Any, edge_index: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute `TransformerConv` from its projections, (N, K, D) and twice (M, K, D) -> (N, K, D)."""
    y = layer.propagate(edge_index, query=query, key=key, value=value, edge_attr=None)
    layer._alpha = None
    return y


def _size(graph: Graph, in_channels: object, channels: object) -> str:
    arrow = f", {in_channels} to {channels}" if in_channels != "" else f", {channels} channels"
    return f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges{arrow}"


def _sized(build: Any, in_channels: int, *channels: int) -> Any:
    return lambda size: build(power_law(size.pick(_QUICK, _FULL)), in_channels, *channels)


CASES = (
    Case(suite="graph", name="spmm-64", build=partial(_spmm, 64), swept=True),
    Case(suite="graph", name="spmm-128", build=partial(_spmm, 128), headline=False),
    Case(suite="graph", name="gcn-64-64", build=_sized(build_gcn, 64, 64), swept=True),
    Case(suite="graph", name="gat-4x32", build=_sized(build_gat, 128, 4, 32), swept=True),
    Case(suite="graph", name="gat-8x64", build=_sized(build_gat, 128, 8, 64), headline=False),
    Case(suite="graph", name="gat-kernel-4x32", build=partial(_gat_kernel, 4, 32)),
    Case(suite="graph", name="gat-kernel-8x64", build=partial(_gat_kernel, 8, 64), headline=False),
    Case(suite="graph", name="gatv2-4x32", build=partial(_gatv2, 128, 4, 32)),
    Case(suite="graph", name="transformer-4x32", build=partial(_dot_product, 128, 4, 32), swept=True),
    Case(suite="graph", name="dot-kernel-4x32", build=partial(_dot_kernel, 4, 32), headline=False),
    Case(suite="graph", name="cheb-128-16", build=partial(_chebyshev, 128, 16, 5)),
    Case(suite="graph", name="cheb-64-64", build=partial(_chebyshev, 64, 64, 5), headline=False),
    Case(suite="graph", name="cora-gcn", build=lambda size: build_gcn(citation(), 1433, 16)),
    Case(suite="graph", name="cora-cheb", build=lambda size: build_chebyshev(citation(), 1433, 16, 3), headline=False),
    Case(suite="graph", name="cora-gat", build=lambda size: build_gat(citation(), 1433, 8, 8)),
)
