"""Times the native kernels against torch's CSR product and PyTorch Geometric, and against what gathering rows costs.

    python benchmarks/native_kernels.py [--nodes 100000] [--edges 2000000] [--repeats 7] [--no-peers]
        [--only 4x32] [--graph power]

Ours and the peer alternate in one process; medians. The roofline is the time in which the gathered rows alone are
read and added up, at random, by the same machine in the same minutes: `gathers` of them a case. A fraction of 1
means that nothing but the gather is left.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from structconv.primitives.csr import spmm
from structconv.primitives.layout import Csr, compress
from structconv.primitives.native import status
from structconv.primitives.native.edge_attention import affine_attention, bilinear_attention

Call = Callable[[], object]


def main() -> None:
    """Parse, build the graphs, print one line a case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--graph", choices=("random", "power"), action="append")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message="Sparse")
    print(status())
    print(f"{'graph':<8}{'case':<30}{'ours ms':>10}{'peer ms':>10}{'ratio':>8}{'roofline':>10}")
    for name in args.graph or ("random", "power"):
        torch.manual_seed(0)
        source = torch.randint(args.nodes, (args.edges,))
        spread = torch.rand(args.edges) ** (1 if name == "random" else 3)
        target = (spread * args.nodes).long()
        graph = Graph(source, target, args.nodes)
        for case, gathers, width, ours, peer in cases(graph, not args.no_peers):
            if args.only not in case:
                continue
            probe = gather_probe(args.nodes, args.edges, width)
            own, other, read = medians(args.repeats, ours, peer, probe)
            ratio = f"{other / own:8.2f}" if peer else f"{'':8}"
            print(f"{name:<8}{case:<30}{own:10.1f}{other:10.1f}{ratio}{gathers * read / own:10.0%}", flush=True)


class Graph:
    """Edges, and their two layouts."""

    def __init__(self, source: Tensor, target: Tensor, nodes: int) -> None:
        self.nodes, self.edge_index = nodes, torch.stack([source, target])
        self.layouts: tuple[Csr, Csr] = (compress(target, source, nodes), compress(source, target, nodes))


def cases(graph: Graph, peers: bool):
    """(name, gathered rows an edge, floats a row, ours, peer)."""
    for channels in (64, 128):
        x = torch.randn(graph.nodes, channels)
        by_target = graph.layouts[0]
        matrix = torch.sparse_csr_tensor(by_target.indptr, by_target.indices, torch.ones(graph.edge_index.shape[1]),
                                         size=(graph.nodes, graph.nodes))
        yield (f"product {channels}", 1, channels, lambda x=x: spmm(*graph.layouts, None, x),
               lambda x=x, m=matrix: torch.sparse.mm(m, x))
    for heads, channels in ((4, 32), (8, 64), (8, 8)):
        yield from attention_cases(graph, heads, channels, peers)


def attention_cases(graph: Graph, heads: int, channels: int, peers: bool):
    """The two attentions: the kernel alone, forward and both ways, and as a layer against its peer's."""
    width, n = heads * channels, graph.nodes
    a, b = (torch.randn(n, heads, requires_grad=True) for _ in range(2))
    q, k, v = (torch.randn(n, heads, channels, requires_grad=True) for _ in range(3))
    grad = torch.randn(n, heads, channels)

    def affine() -> Tensor:
        return affine_attention(*graph.layouts, a, b, v)

    def bilinear() -> Tensor:
        return bilinear_attention(*graph.layouts, q, k, v, scale=channels**-0.5)

    yield f"affine {heads}x{channels} forward", 1, width, affine, None
    yield f"affine {heads}x{channels} both", 2, width, lambda: torch.autograd.grad(affine(), (a, b, v), grad), None
    yield f"bilinear {heads}x{channels} forward", 2, width, bilinear, None
    yield f"bilinear {heads}x{channels} both", 6, width, lambda: torch.autograd.grad(bilinear(), (q, k, v), grad), None
    x = torch.randn(n, 64)
    theirs = peer_layers(64, heads, channels) if peers else {}
    for name, ours in own_layers(graph, 64, heads, channels).items():
        peer = theirs.get(name)
        yield (f"{name} layer {heads}x{channels} both", 2 if name == "GAT" else 6, width, lambda f=ours: f(x),
               None if peer is None else lambda f=peer: f(x, graph.edge_index).sum().backward())


def own_layers(graph: Graph, inputs: int, heads: int, channels: int) -> dict[str, Callable[[Tensor], object]]:
    """A projection, scores and the kernel, forward and backward."""
    project = torch.nn.Linear(inputs, heads * channels, bias=False)
    fused = torch.nn.Linear(inputs, 3 * heads * channels)
    vectors = torch.nn.Parameter(torch.randn(2, heads, channels) * 0.1)

    def gat(x: Tensor) -> None:
        h = project(x).view(-1, heads, channels)
        affine_attention(*graph.layouts, (h * vectors[0]).sum(-1), (h * vectors[1]).sum(-1), h).sum().backward()

    def dot(x: Tensor) -> None:
        q, k, v = fused(x).view(-1, 3, heads, channels).unbind(1)
        bilinear_attention(*graph.layouts, q, k, v, scale=channels**-0.5).sum().backward()

    return {"GAT": gat, "dot-product": dot}


def peer_layers(inputs: int, heads: int, channels: int) -> dict[str, torch.nn.Module]:
    """PyTorch Geometric's layers, if it is installed."""
    try:
        from torch_geometric.nn import GATConv, TransformerConv
    except ImportError:
        return {}
    return {"GAT": GATConv(inputs, channels, heads, add_self_loops=False),
            "dot-product": TransformerConv(inputs, channels, heads, root_weight=False)}


def gather_probe(nodes: int, edges: int, width: int) -> Call:
    """Reads `edges` random rows of `width` floats and adds them up into few: next to nothing is written."""
    rows = min(256, edges)
    source, target = torch.randint(nodes, (edges,)), torch.arange(edges) % rows
    layouts = (compress(target, source, rows), compress(source, target, nodes))
    x = torch.randn(nodes, width)
    return lambda: spmm(*layouts, None, x)


def medians(repeats: int, *calls: Call | None) -> list[float]:
    """Milliseconds of each, taken in turn after one round of warming up; nan for None."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, taken in zip(calls, times, strict=True):
            if call is not None:
                start = time.perf_counter()
                call()
                if turn:
                    taken.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(taken) if taken else float("nan") for taken in times]


if __name__ == "__main__":
    main()
