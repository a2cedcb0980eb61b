"""Graphs of nearest neighbors, and graphs made coarser."""

import math

import pytest
import torch

from structconv import ConfigError, Graph, Grid, StructureError
from structconv.structures.coarsening import coarsened, nearest_neighbors
from tests.support.graphs import matrix

F64 = torch.float64


def test_neighbors_on_a_line():
    graph = nearest_neighbors(torch.tensor([[0.0], [1.0], [3.0], [3.5]], dtype=F64), 1)
    width = (1 + 1 + 0.5 + 0.5) / 4
    assert graph.edge_index.T.tolist() == [[0, 1], [1, 0], [2, 3], [3, 2]]
    expected = [math.exp(-(d / width) ** 2) for d in (1, 1, 0.5, 0.5)]
    assert graph.edge_weight.tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("points", "neighbors", "error"), [
    (torch.zeros(3), 1, StructureError), (torch.zeros(3, 2).long(), 1, StructureError),
    (torch.zeros(3, 2), 3, StructureError), (torch.zeros(3, 2), 0, ConfigError)])
def test_points_without_such_neighbors(points, neighbors, error):
    with pytest.raises(error):
        nearest_neighbors(points, neighbors)


def weighted(nodes, edges):
    """A symmetric graph of {(m, n): weight}."""
    index = torch.tensor(list(edges)).T
    weight = torch.tensor(list(edges.values()), dtype=F64)
    return Graph(torch.cat([index, index.flip(0)], 1), num_nodes=nodes, edge_weight=torch.cat([weight, weight]))


def test_the_heavy_pairs_are_found():
    """A way whose edges weigh 5, 1, 5, 1, 5 falls into its heavy pairs, and these into two clusters."""
    graph = weighted(6, {(0, 1): 5.0, (1, 2): 1.0, (2, 3): 5.0, (3, 4): 1.0, (4, 5): 5.0})
    once = coarsened(graph)
    assert once.clusters.target.tolist() == [0, 0, 1, 1, 2, 2]
    assert matrix(once.graph).tolist() == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]
    twice = coarsened(graph, 2)
    assert twice.clusters.target.tolist() == [0, 0, 0, 0, 1, 1]
    assert matrix(twice.graph).tolist() == [[0, 1], [1, 0]]


def test_clusters_of_a_grid_are_nearly_even():
    graph = nearest_neighbors(Grid((28, 28)).coordinates().float(), 8)
    clusters, coarser = coarsened(graph, 2)
    sizes = clusters.target.bincount()
    assert len(sizes) == coarser.num_nodes <= 210
    assert sizes.min() >= 1 and sizes.max() == 4
    again = coarsened(graph, 2)
    assert torch.equal(again.clusters.edge_index, clusters.edge_index)
    assert torch.equal(again.graph.edge_weight, coarser.edge_weight)


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_weights_between_clusters_are_those_between_their_nodes(levels):
    torch.manual_seed(levels)
    pairs = {tuple(sorted(pair)): float(weight) + 0.1 for pair, weight in
             zip(torch.randint(15, (40, 2)).tolist(), torch.rand(40), strict=True) if pair[0] != pair[1]}
    graph = weighted(16, pairs)
    clusters, coarser = coarsened(graph, levels)
    share = torch.nn.functional.one_hot(clusters.target, coarser.num_nodes).to(F64)
    expected = share.T @ matrix(graph) @ share
    torch.testing.assert_close(matrix(coarser), expected - expected.diagonal().diag(), rtol=0, atol=1e-12)
    assert share.sum(0).max() <= 2 ** levels
    assert clusters.source.tolist() == list(range(16))


@pytest.mark.parametrize("nodes", [0, 3])
def test_what_relates_nothing_stays_alone(nodes):
    graph = Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=nodes)
    assert coarsened(graph, 2).clusters.target.tolist() == list(range(nodes))


def test_graphs_that_cannot_be_paired():
    with pytest.raises(StructureError, match="as many inputs"):
        coarsened(Graph(torch.tensor([[0], [1]]), num_inputs=1, num_outputs=2))
    with pytest.raises(StructureError, match="positive"):
        coarsened(Graph(torch.tensor([[0, 1], [1, 0]]), num_nodes=2, edge_weight=torch.tensor([1.0, -1.0])))
