"""Times what structconv has for a GPU: against the card's copy bandwidth and PyTorch Geometric on the same card.

    python benchmarks/gpu_attention.py [--edges 2000000] [--length 4096] [--repeats 20] [--only NAME] [--out FILE]

Along the edges of a power-law graph: attention with GAT's scores, with dot products and with GATv2's, and the sparse
product with values. Over all pairs of a sequence: attention with a learned bias of relative positions, by FlexAttention
against torch's operators in blocks. One JSON object a line: the card, the date, a case (heads x channels, float32 or
bfloat16, forward or forward and backward), the medians of both in milliseconds, their ratio, and the fraction of the
measured bandwidth of a copy at which the case moves the bytes it must: every edge reads the rows it gathers, every
entry is read and written once. Where the tables fit the card's cache that fraction may pass 1; dense attention computes
far more than it moves, so that its fraction is small. All are without projections; their numbers are compared before
they are timed. Without a GPU, or without the kernels: one line and exit code 2.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.graphs import power_law
from structconv.bases.base import Basis
from structconv.bases.entrywise import Masked, Normalized, Sum
from structconv.bases.linear import Scaled
from structconv.bases.positions import Lookup
from structconv.bases.scores import Bilinear
from structconv.kernels.blocked_attention import BlockedAttention
from structconv.kernels.flex_attention import FlexAttention
from structconv.kernels.orders import Applied
from structconv.planning.counts import Sizes
from structconv.planning.problem import Call, Problem
from structconv.primitives import triton
from structconv.primitives.csr import spmm
from structconv.primitives.edge_attention import additive_attention, affine_attention, bilinear_attention
from structconv.structures import Causal, Graph
from structconv.weights.whole import ByHead

HEADS = ((4, 32), (8, 64))
COPIED = 2**30  # bytes


class Case(NamedTuple):
    """Two calls with the same inputs and the same result, and the bytes that one must move."""

    name: str
    inputs: tuple[Tensor, ...]
    ours: Callable[[], Tensor]
    peer: Callable[[], Tensor] | None
    forward: int
    both: int
    rival: str = "pyg"


def main() -> int:
    """Parse, measure, print; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--edges", type=int, default=2_000_000)
    parser.add_argument("--length", type=int, default=4096, help="entries of a sequence for dense attention")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    parser.add_argument("--out", type=Path, help="append the lines to this file as well")
    args = parser.parse_args()
    if not torch.cuda.is_available() or triton.usable(torch.ones(1, 1, 1, device="cuda"), args.edges) is None:
        print(f"No GPU kernels to measure: {triton.status()}.")
        return 2
    now = datetime.datetime.now(datetime.UTC).isoformat("T", "seconds")
    common = {"card": torch.cuda.get_device_name(), "date": now,
              "torch": torch.__version__, "kernels": triton.status(), "edges": args.edges,
              "copy_gbs": round(copy_bandwidth(args.repeats) / 1e9, 1)}
    graph = power_law(args.edges).to("cuda")
    for dtype in (torch.float32, torch.bfloat16):
        for case in (*cases(graph, dtype), *dense_cases(args.length, dtype)):
            if args.only not in case.name:
                continue
            for result in measured(case, common["copy_gbs"] * 1e9, args.repeats):
                line = json.dumps({**common, "dtype": str(dtype).removeprefix("torch."), **result})
                print(line, flush=True)
                if args.out:
                    with args.out.open("a") as file:
                        file.write(line + "\n")
    return 0


def cases(graph: Graph, dtype: torch.dtype) -> Iterator[Case]:
    """GAT's scores, scaled dot products, GATv2's scores, then the sparse product."""
    layouts, edges, nodes = (graph.by_target(), graph.by_source()), graph.num_edges, graph.num_nodes
    for heads, channels in HEADS:
        a, b = (leaf(graph, dtype, heads) for _ in range(2))
        x, q, k = (leaf(graph, dtype, heads, channels) for _ in range(3))
        row, index = heads * channels * x.element_size(), 4
        forward = edges * (row + index + 4 * heads) + nodes * row
        # y2 in the forward; g, y, y2 for D; then the pass by source
        back = 6 * nodes * row + edges * (row + index + 12 * heads)
        yield Case(f"gat {heads}x{channels}", (a, b, x), lambda a=a, b=b, x=x: affine_attention(*layouts, a, b, x),
                   geometric_gat(graph, a, b, x), forward, forward + back)
        forward, scale = edges * (2 * row + index) + 2 * nodes * row, channels**-0.5
        back = edges * (4 * row + 2 * index + 8 * heads) + 9 * nodes * row
        yield Case(f"dot {heads}x{channels}", (q, k, x),
                   lambda q=q, k=k, x=x, scale=scale: bilinear_attention(*layouts, q, k, x, scale=scale),
                   geometric_dot(graph, q, k, x), forward, forward + back)
        yield gatv2(graph, q, k, row)
    for channels in (64, 128):
        yield product(graph, dtype, channels)


def gatv2(graph: Graph, q: Tensor, k: Tensor, row: int) -> Case:
    """GATv2's scores, whose keys are the values: an edge reads a row by target, and q's and g's by source."""
    layouts, index = (graph.by_target(), graph.by_source()), 4
    vector = torch.randn(q.shape[1:], device=q.device, dtype=q.dtype).requires_grad_()
    forward = graph.num_edges * (row + index) + 2 * graph.num_nodes * row
    back = graph.num_edges * (3 * row + 2 * index + 8 * q.shape[1]) + 9 * graph.num_nodes * row
    return Case(f"gatv2 {q.shape[1]}x{q.shape[2]}", (q, k, vector),
                lambda: additive_attention(*layouts, q, k, k, vector), geometric_gatv2(graph, q, k, vector), forward,
                forward + back)


def product(graph: Graph, dtype: torch.dtype, channels: int) -> Case:
    """A x with values: an edge reads its value and a row, backward a row each for x and for the values."""
    layouts, edges = (graph.by_target(), graph.by_source()), graph.num_edges
    x, values = leaf(graph, dtype, channels), torch.rand(edges, device="cuda", dtype=dtype).requires_grad_()
    row, index, number = channels * x.element_size(), 4, x.element_size()
    forward = edges * (row + 2 * index + number) + graph.num_nodes * row
    back = edges * (2 * row + 4 * index + 2 * number) + 3 * graph.num_nodes * row
    return Case(f"spmm {channels}", (x, values), lambda: spmm(*layouts, values, x), geometric_product(graph, values, x),
                forward, forward + back)


def dense_cases(length: int, dtype: torch.dtype) -> Iterator[Case]:
    """softmax(q k / sqrt(D) + a learned bias of the clipped offset), all pairs and causal, 8 heads of 64."""
    heads, depth, clip = 8, 64, 128
    q, k, v = (torch.randn(heads, length, depth, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    table = torch.randn(heads, 1, 2 * clip + 1, device="cuda", dtype=dtype).requires_grad_()
    once = q.numel() * q.element_size()
    for name, causal in (("bias", False), ("causal bias", True)):
        def expression(causal: bool = causal) -> Basis:
            scores: Basis = Sum(Scaled(Bilinear(q, k), depth**-0.5), Lookup(table, "clip", clip, length, length))
            return Normalized(Masked(scores, Causal()) if causal else scores, "softmax", "inputs")

        ours, peer = (by_kernel(kernel, expression(), v) for kernel in (FlexAttention(), BlockedAttention()))
        if ours is not None:
            yield Case(f"flex {name} {heads}x{depth} n={length}", (q, k, v, table), ours, peer, 4 * once, 12 * once,
                       "blocks")


def by_kernel(kernel: Applied, basis: Basis, r: Tensor) -> Callable[[], Tensor] | None:
    """A_k^T r_k by this kernel, (K, M, C) -> (K, N, C), or `None` where it is not for this basis."""
    theta = ByHead.of(basis.size, r.shape[-1])
    call = Call(r[0], basis, theta, None, r)
    match = kernel.match(Problem(call.spec(), theta, call.x, Sizes(1, r.element_size())))
    return None if match is None else lambda: match.apply(r, call)


def leaf(graph: Graph, dtype: torch.dtype, *sizes: int) -> Tensor:
    """Standard normal numbers for every node."""
    return torch.randn(graph.num_nodes, *sizes, device=graph.edge_index.device, dtype=dtype).requires_grad_()


def geometric_gat(graph: Graph, a: Tensor, b: Tensor, x: Tensor) -> Callable[[], Tensor] | None:
    """Compute GATConv after its projection."""
    library = peers.geometric()
    if library is None:
        return None
    layer = library.GATConv(1, x.shape[2], x.shape[1], add_self_loops=False)
    size = (graph.num_nodes, graph.num_nodes)

    def run() -> Tensor:
        alpha = layer.edge_updater(graph.edge_index, alpha=(a, b), edge_attr=None, size=size)
        return layer.propagate(graph.edge_index, x=(x, x), alpha=alpha, size=size)

    return run


def geometric_dot(graph: Graph, q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor] | None:
    """Compute TransformerConv after its projections; it divides by the square root of the channels."""
    library = peers.geometric()
    if library is None:
        return None
    layer = library.TransformerConv(1, v.shape[2], v.shape[1])
    return lambda: layer.propagate(graph.edge_index, query=q, key=k, value=v, edge_attr=None)


def geometric_gatv2(graph: Graph, q: Tensor, k: Tensor, vector: Tensor) -> Callable[[], Tensor] | None:
    """Compute GATv2Conv after its projections."""
    library = peers.geometric()
    if library is None:
        return None
    layer = library.GATv2Conv(1, k.shape[2], k.shape[1], add_self_loops=False)
    del layer.att
    layer.att = vector.unsqueeze(0)

    def run() -> Tensor:
        alpha = layer.edge_updater(graph.edge_index, x=(k, q), edge_attr=None)
        return layer.propagate(graph.edge_index, x=(k, q), alpha=alpha)

    return run


def geometric_product(graph: Graph, values: Tensor, x: Tensor) -> Callable[[], Tensor] | None:
    """Compute a layer with edge weights after its projection."""
    library = peers.geometric()
    if library is None:
        return None
    layer = library.GraphConv(1, 1)
    size = (graph.num_nodes, graph.num_nodes)
    return lambda: layer.propagate(graph.edge_index, x=(x, x), edge_weight=values, size=size)


def measured(case: Case, bandwidth: float, repeats: int) -> Iterator[dict[str, object]]:
    """Forward without gradients, then forward and backward."""
    check(case)
    grad = torch.randn_like(case.ours().detach())
    for name, least, backward in (("f", case.forward, False), ("f+b", case.both, True)):
        calls = [step(call, case.inputs, grad if backward else None) for call in (case.ours, case.peer) if call]
        ours, *others = medians(calls, repeats)
        yield {"case": case.name, "pass": name, "ours_ms": round(ours, 4), "least_gb": round(least / 1e9, 4),
               "bandwidth_fraction": round(least / (ours * 1e-3) / bandwidth, 4),
               **({f"{case.rival}_ms": round(others[0], 4), "ratio": round(others[0] / ours, 3)} if others else {})}


def check(case: Case) -> None:
    """Raise where the two differ by more than their dtype explains."""
    if case.peer is not None:
        tol = 1e-3 if case.inputs[0].dtype == torch.float32 else 5e-2
        torch.testing.assert_close(case.ours(), case.peer().view(case.ours().shape), rtol=tol, atol=tol)


def step(call: Callable[[], Tensor], inputs: tuple[Tensor, ...], grad: Tensor | None) -> Callable[[], object]:
    """One forward, or a forward and its gradients."""
    def run() -> object:
        if grad is None:
            with torch.no_grad():
                return call()
        y = call()
        return torch.autograd.grad(y, inputs, grad.view(y.shape))

    return run


def medians(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """Milliseconds of each, in turns, by the device's clock."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 3):
        for call, result in zip(calls, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            if turn >= 3:
                result.append(start.elapsed_time(end))
    return [statistics.median(result) for result in times]


def copy_bandwidth(repeats: int) -> float:
    """Bytes a second that a large copy reads and writes."""
    source = torch.ones(COPIED // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPIED / (medians([lambda: target.copy_(source)], repeats)[0] * 1e-3)


if __name__ == "__main__":
    sys.exit(main())
