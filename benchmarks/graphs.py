"""Random structures to measure on, the same on every machine."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from structconv.structures import Graph, KnowledgeGraph

__all__ = ["citation", "csr", "knowledge", "molecules", "normalized_csr", "power_law"]

#: Nodes and directed edges of the citation graph Cora.
CORA = (2708, 10556)


def power_law(edges: int, nodes: int | None = None) -> Graph:
    """A directed graph whose in- and out-degrees fall as rank^-0.6, without self-loops; 20 edges a node.

    At 100,000 nodes and 2,000,000 edges the largest expected degree is about 8,000 of a mean of 20.
    """
    nodes = max(edges // 20, 16) if nodes is None else nodes
    generator = torch.Generator().manual_seed(0)
    weights = torch.arange(1, nodes + 1, dtype=torch.float64).pow(-0.6)
    below = (weights.cumsum(0) / weights.sum()).contiguous()
    ranks = torch.searchsorted(below, torch.rand(2, edges, generator=generator, dtype=torch.float64))
    names = torch.randperm(nodes, generator=generator)
    source, target = names[ranks.clamp(max=nodes - 1)]
    target = torch.where(source == target, (target + 1) % nodes, target)
    return Graph(torch.stack([source, target]), num_nodes=nodes)


def citation() -> Graph:
    """A graph of Cora's size: each edge comes with its reverse."""
    nodes, edges = CORA
    half = power_law(edges // 2, nodes).edge_index
    return Graph(torch.cat([half, half.flip(0)], 1), num_nodes=nodes)


def knowledge(triples: int, relations: int, nodes: int | None = None) -> KnowledgeGraph:
    """A power-law graph whose edges carry relations, the r-th of which is as frequent as 1 / r; 10 triples a node."""
    graph = power_law(triples, max(triples // 10, 16) if nodes is None else nodes)
    weights = 1.0 / torch.arange(1, relations + 1, dtype=torch.float64)
    below = (weights.cumsum(0) / weights.sum()).contiguous()
    draws = torch.rand(triples, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    relation = torch.searchsorted(below, draws).clamp(max=relations - 1)
    rows = torch.stack([graph.source, relation, graph.target], 1)
    return KnowledgeGraph(rows, graph.num_nodes, [f"r{number}" for number in range(relations)])


def molecules(count: int, seed: int = 0) -> Graph:
    """So many random graphs of the size of small molecules, as one: 16 to 30 nodes, a tree and three more bonds each.

    ZINC's have 23 nodes and 50 directed edges in the mean, and so have these.
    """
    generator, edges, first = torch.Generator().manual_seed(seed), [], 0
    for nodes in torch.randint(16, 31, (count,), generator=generator).tolist():
        child = torch.arange(1, nodes)
        parent = (torch.rand(nodes - 1, generator=generator) * child).long()
        one = torch.randint(nodes - 2, (3,), generator=generator)
        bonds = torch.stack([torch.cat([child, one]), torch.cat([parent, one + 2])])
        edges += [bonds + first, bonds.flip(0) + first]
        first += nodes
    return Graph(torch.cat(edges, 1), num_nodes=first)


def normalized_csr(graph: Graph) -> Tensor:
    """D^-1/2 (W + I)^T D^-1/2 as torch's CSR matrix (N, M): what multiplies x from the left in GCN."""
    graph = graph.with_self_loops()
    scale = torch.bincount(graph.target, minlength=graph.num_nodes).float().rsqrt()
    return csr(graph, scale[graph.source] * scale[graph.target])


def csr(graph: Graph, values: Tensor) -> Tensor:
    """A^T (N, M) as torch's CSR matrix."""
    order = torch.argsort(graph.target, stable=True)
    starts = torch.zeros(graph.num_outputs + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(graph.target, minlength=graph.num_outputs), 0, out=starts[1:])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return torch.sparse_csr_tensor(starts, graph.source[order].contiguous(), values[order],
                                       (graph.num_outputs, graph.num_inputs), check_invariants=False)
