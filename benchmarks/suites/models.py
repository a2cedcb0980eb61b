"""Whole models: two graph networks, an image network, a transformer block, and those of `sequences`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks import peers
from benchmarks.case import Case, Comparison, Entrant, Size, entrant, leaf
from benchmarks.graphs import citation
from benchmarks.suites.graph import geometric_gat, geometric_gcn
from benchmarks.suites.sequences import CASES as SEQUENCES
from structconv.nn import Conv2d, GATConv, GCNConv, MultiheadAttention

__all__ = ["CASES"]


class _Stack(nn.Module):
    """Layers in a row with an activation between them, each called with the structure."""

    def __init__(self, layers: list[nn.Module], activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layers, self.activation = nn.ModuleList(layers), activation

    def forward(self, x: Tensor, structure: Any) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = layer(self.activation(x) if index else x, structure)
        return x


def _citation(gat: bool, size: Size) -> Comparison:
    """1433 words, 7 classes: GCN with 16 hidden channels, or GAT with 8 heads of 8, as published, without dropout."""
    graph, words, classes = citation(), 1433, 7
    layers: list[Any] = ([GATConv(words, 8, 8, add_self_loops=False), GATConv(64, classes, add_self_loops=False)]
                         if gat else [GCNConv(words, 16), GCNConv(16, classes)])
    activation = nn.functional.elu if gat else nn.functional.relu
    ours, x, result = _Stack(layers, activation), leaf(graph.num_nodes, words), []
    if (library := peers.geometric()) is not None:
        others = [geometric_gat(library, layer, add_self_loops=False) if gat
                  else geometric_gcn(library, layer.weight.theta[0], cached=True) for layer in layers]
        peer, x_peer = _Stack(others, activation), leaf(graph.num_nodes, words)
        result.append(entrant("pyg", peer, lambda: peer(x_peer, graph.edge_index), x_peer))
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, graph), x), peers=tuple(result), edges=graph.num_edges,
                      size=f"{graph.num_nodes:,} nodes, {graph.num_edges:,} edges, {words} to {classes}")


def _images(size: Size) -> Comparison:
    """Three 3x3 convolutions with ReLUs, the second of stride 2, and a mean over the image."""
    plain = [nn.Conv2d(3, 32, 3, padding=1), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.Conv2d(64, 64, 3, padding=1)]
    batch, side = (4, 32) if size.quick else (32, 32)

    def network(layers: list[nn.Module]) -> nn.Module:
        steps = [step for layer in layers for step in (layer, nn.ReLU())]
        return nn.Sequential(*steps, nn.AdaptiveAvgPool2d(1), nn.Flatten())

    ours, peer = network([Conv2d.from_torch(layer) for layer in plain]), network([*plain])
    x, x_peer = leaf(batch, 3, side, side), leaf(batch, 3, side, side)
    return Comparison(ours=entrant("ours", ours, lambda: ours(x), x), size=f"{batch}x3x{side}x{side}",
                      peers=(entrant("torch", peer, lambda: peer(x_peer), x_peer),))


def _transformer(size: Size) -> Comparison:
    """Torch's encoder layer, normalized first, and the same around our attention."""
    batch, length, channels, heads = 2, size.pick(128, 512), 256, 8
    peer = nn.TransformerEncoderLayer(channels, heads, 4 * channels, dropout=0.0, batch_first=True, norm_first=True)
    attention = MultiheadAttention.from_torch(peer.self_attn).eval()
    x, x_peer = leaf(batch, length, channels), leaf(batch, length, channels)

    def run() -> Tensor:
        h = x + attention(peer.norm1(x))
        return h + peer.linear2(torch.relu(peer.linear1(peer.norm2(h))))

    rest = [part for name, part in peer.named_parameters() if not name.startswith("self_attn")]
    ours = Entrant(name="ours", run=run, inputs=(x,), parameters=(*attention.parameters(), *rest))
    return Comparison(ours=ours, peers=(entrant("torch", peer, lambda: peer(x_peer), x_peer),),
                      size=f"B={batch}, N={length}, {channels} channels, {heads} heads")


CASES = (
    Case(suite="models", name="cora-gcn", build=lambda size: _citation(False, size)),
    Case(suite="models", name="cora-gat", build=lambda size: _citation(True, size), headline=False),
    Case(suite="models", name="image-network", build=_images),
    Case(suite="models", name="transformer-block", build=_transformer),
    *SEQUENCES,
)
