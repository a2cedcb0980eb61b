"""Shared parts of the graph suites: leaves, copied weights, and DGL's attention written with its operators."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.rates import Work
from structconv.nn import Linear
from structconv.structures import Graph

__all__ = ["Projections", "copied", "dgl_attention", "dgl_graph", "dgl_projected", "geometric_attention",
           "heads_to_rows", "in_torch", "layers_least", "leaf"]


def leaf(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers that want a gradient, the same for the same shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


@torch.no_grad()
def copied(parameter: Tensor, value: Tensor, zeroed: Tensor | None = None) -> None:
    """Give a peer's parameter our numbers, and its bias zeros."""
    if parameter.shape != value.shape:
        raise ValueError(f"the peer's parameter has shape {tuple(parameter.shape)}, ours {tuple(value.shape)}")
    parameter.copy_(value)
    if zeroed is not None:
        zeroed.zero_()


def in_torch(module: nn.Module) -> Any:
    """A copy whose linear layers are torch's, which have no activation."""
    made = copy.deepcopy(module)
    for part in made.modules():
        if type(part) is Linear:
            if part.activation is not None:
                raise ValueError(f"torch's linear layers have no activation, got {part}")
            part.__class__ = nn.Linear  # type: ignore[assignment]
    return made


def layers_least(multiplications: int) -> dict[str, Work]:
    """The least cost of linear layers with so many multiplications forward, and twice as many backward."""
    return {"forward": Work(flops=2.0 * multiplications), "both": Work(flops=6.0 * multiplications)}


def heads_to_rows(values_KPD: Tensor) -> Tensor:
    """(K, P, D) as a linear layer's weight (K D, P)."""
    return values_KPD.detach().mT.flatten(0, 1)


def dgl_graph(library: Any, graph: Graph) -> Any:
    """The graph as DGL's, with 32-bit indices and both sorted layouts made."""
    g = library.graph((graph.source, graph.target), num_nodes=graph.num_nodes).int()
    g.create_formats_()
    return g


class Projections(nn.Module):
    """Queries, keys and values of K heads by linear maps without bias, for libraries that have only the operators."""

    def __init__(self, in_channels: int, heads: int, dim: int, weights: tuple[Tensor, Tensor, Tensor]) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        layers = [nn.Linear(in_channels, heads * dim, bias=False) for _ in weights]
        for layer, weight in zip(layers, weights, strict=True):
            copied(layer.weight, weight)
        self.parts = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> list[Tensor]:
        """(M, P) -> three times (M, K, D)."""
        return [part(x).unflatten(-1, (self.heads, self.dim)) for part in self.parts]


def dgl_projected(library: Any, g: Any, layer: Projections, x: Tensor) -> Tensor:
    """Scaled dot-product attention along edges by DGL's operators: (M, P) -> (N, K D)."""
    return dgl_attention(library, g, *layer(x)).flatten(1)


def dgl_attention(library: Any, g: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of given queries (N, K, D), keys and values (M, K, D) -> (N, K, D)."""
    scores = library.ops.u_dot_v(g, key, query * query.shape[-1]**-0.5)
    return library.ops.u_mul_e_sum(g, value, library.ops.edge_softmax(g, scores))


def geometric_attention(layer: Any, edge_index: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Compute `TransformerConv` from its projections, (N, K, D) and twice (M, K, D) -> (N, K, D)."""
    y = layer.propagate(edge_index, query=query, key=key, value=value, edge_attr=None)
    layer._alpha = None
    return y
