"""Filters on the graph of pixels, and the CNN of the same size."""

import torch
from torch import nn
from torch.nn import functional as F

from structconv.structures import Graph
from structconv_systems.models.mnist_cheb import GraphLeNet, GridLeNet, pixel_graph
from systems.tests.models.images import drawn

SIDE, CLASSES = 12, 3
SIZES = {"channels": (4, 8), "hidden": 16, "dropout": 0.0}


def make(kind, seed=0, **options):
    torch.manual_seed(seed)
    if kind == "graph":
        return GraphLeNet(pixel_graph(SIDE, SIDE), CLASSES, order=4, **{**SIZES, **options})
    return GridLeNet((SIDE, SIDE), CLASSES, kernel=3, **{**SIZES, **options})


def test_they_are_of_the_same_size():
    """LeNet-5-like, 32 and 64 filters of 25 numbers each: what differs is how many clusters are left."""
    graph, grid = GraphLeNet(pixel_graph(28, 28), 10), GridLeNet((28, 28), 10)
    filters = [sum(p.numel() for p in model.filters.parameters()) for model in (graph, grid)]
    assert filters == [25 * 32 + 32 + 25 * 32 * 64 + 64] * 2
    last = graph.graphs[-1]().num_nodes, graph.classify[0].in_features // 64
    assert last[0] <= 210 and last[1] <= 56
    assert grid.classify[0].in_features == 49 * 64


def test_the_numbers_are_those_of_the_paper():
    """Eq. 4 by dense polynomials of the scaled Laplacian, ReLU, and the maximum of each cluster."""
    model, (images, _) = make("graph", channels=(4,)).double(), drawn()
    x, graph = images.double().flatten(1), model.graphs[0]()
    a = torch.zeros(SIDE ** 2, SIDE ** 2, dtype=torch.float64)
    a[graph.source, graph.target] = graph.edge_weight
    scale = a.sum(0).rsqrt()
    laplacian = -scale[:, None] * a * scale
    terms = [x, x @ laplacian]
    while len(terms) < 4:
        terms.append(2 * terms[-1] @ laplacian - terms[-2])
    theta = model.filters[0].weight.theta
    y = F.relu(sum(term.unsqueeze(-1) * theta[k, 0] for k, term in enumerate(terms)) + model.filters[0].bias)
    cluster = model.clusters[0]().target
    pooled = torch.stack([y[:, cluster == g].amax(1) for g in range(int(cluster.max()) + 1)], 1)
    torch.testing.assert_close(model(images.double()), model.classify(pooled.flatten(1)), rtol=0, atol=1e-9)


def test_filters_do_not_know_the_numbers_of_pixels():
    """Where pixels, edges and clusters are numbered anew, so is what the filters and the pool give."""
    model, (images, _) = make("graph"), drawn()
    graph, clusters = model.graphs[0](), model.clusters[0]()
    order = torch.randperm(SIDE ** 2, generator=torch.Generator().manual_seed(0))
    places = order.argsort()
    moved = Graph(places[graph.edge_index], num_nodes=SIDE ** 2, edge_weight=graph.edge_weight)
    groups = Graph(torch.stack([torch.arange(SIDE ** 2), clusters.target[order]]), num_inputs=SIDE ** 2,
                   num_outputs=clusters.num_outputs)
    x = images.flatten(1).unsqueeze(-1)
    y = model.pools[0](model.filters[0](x, graph), clusters)
    torch.testing.assert_close(model.pools[0](model.filters[0](x[:, order], moved), groups), y, rtol=1e-5, atol=1e-5)


def test_signals_of_any_graph():
    graph = Graph.complete(9)
    model = GraphLeNet(graph, 2, channels=(3,), order=3, hidden=4)
    assert model(torch.randn(5, 9)).shape == (5, 2)
    assert isinstance(model.classify, nn.Sequential)
