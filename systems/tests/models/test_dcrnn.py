"""DCRNN: it learns, what it says goes with the sensors' numbers, is a graph's own, is sampled as told, and exported."""

import pytest
import torch

from structconv import Graph, Identity, batch
from structconv_systems.models.dcrnn import DCRNN, Persistence, diffusion, sampled_share, width_without_graph

T, HORIZON = 4, 3


def make(seed=0, mechanism=None, **options):
    torch.manual_seed(seed)
    return DCRNN(mechanism or diffusion(2), horizon=HORIZON,
                 **{"hidden": 8, "known": 1, "mean": 3.0, "deviation": 2.0, **options})


def ring(sensors, seed=0):
    """Each sensor leads to the next one, and to the one behind that."""
    index = torch.arange(sensors)
    edges = torch.cat([torch.stack([index, (index + step) % sensors]) for step in (1, 2)], 1)
    weights = 0.5 + torch.rand(edges.shape[1], generator=torch.Generator().manual_seed(seed))
    return Graph(edges, num_nodes=sensors, edge_weight=weights)


def drawn(sensors, count=2, seed=0):
    """Readings (B, T, S), the time of day, and what follows."""
    generator = torch.Generator().manual_seed(seed)
    readings = 3 + 2 * torch.randn(count, T + HORIZON, sensors, generator=generator)
    known = torch.rand(count, T, 1, 1, generator=generator).expand(-1, -1, sensors, 1)
    return readings[:, :T], known, readings[:, T:]


def test_the_basis_is_both_walks_and_their_powers():
    """D_O^-1 W and D_I^-1 W^T (Li et al. 2018, eq. 2), the walk without a step once."""
    graph = ring(4)
    weights = graph.to_torch_sparse().to_dense()
    forward, backward = weights / weights.sum(1, keepdim=True), weights.T / weights.T.sum(1, keepdim=True)
    dense = make().encoder[0].gates.basis(torch.zeros(4, 10), structure=graph).dense()
    expected = torch.stack([torch.eye(4), forward, forward @ forward, backward, backward @ backward])
    torch.testing.assert_close(dense, expected)


def test_a_forecast_has_no_order_of_sensors():
    model, graph, (readings, known, _) = make(), ring(6), drawn(6)
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    turned = Graph(order.argsort()[graph.edge_index], num_nodes=6, edge_weight=graph.edge_weight)
    torch.testing.assert_close(model(readings[..., order], turned, known[:, :, order]),
                               model(readings, graph, known)[..., order])


def test_graphs_side_by_side_have_what_they_have_alone():
    model, graphs, samples = make(), (ring(3), ring(5)), (drawn(3), drawn(5, seed=1))
    readings, known = torch.cat([own[0] for own in samples], -1), torch.cat([own[1] for own in samples], -2)
    together = model(readings, batch(graphs), known).split((3, 5), -1)
    for actual, graph, own in zip(together, graphs, samples, strict=True):
        torch.testing.assert_close(actual, model(own[0], graph, own[1]))
    torch.testing.assert_close(model(readings[:1], batch(graphs), known[:1]), torch.cat(together, -1)[:1])


def test_the_decoder_sees_what_it_is_told_to():
    model, graph, (readings, known, expected) = make(), ring(5), drawn(5)
    own, other = model(readings, graph, known), expected + 1
    assert torch.equal(model(readings, graph, known, target=expected, share=0.0), own)
    taught = [model(readings, graph, known, target=seen, share=1.0) for seen in (expected, other)]
    assert torch.equal(taught[0][:, 0], own[:, 0]) and not torch.allclose(taught[0][:, 1], taught[1][:, 1])
    last = torch.cat([expected[:, :-1], other[:, -1:]], 1)
    assert torch.equal(model(readings, graph, known, target=last, share=1.0), taught[0])
    torch.testing.assert_close(model(readings, graph, known, target=own, share=1.0), own)  # it sees what it said


def test_it_sees_less_and_less_of_what_was_observed():
    shares = [sampled_share(step, 100.0) for step in (0, 100, 461, 1000, 10**6)]
    assert shares[0] > 0.98 and abs(shares[2] - 0.5) < 0.01 and shares[-1] == pytest.approx(0)
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize(("hidden", "layers", "known", "order"), [(8, 2, 1, 2), (32, 1, 0, 1), (5, 3, 1, 0)])
def test_without_a_graph_it_has_as_many_parameters(hidden, layers, known, order):
    width = width_without_graph(hidden, layers, known, order)
    counts = [sum(parameter.numel() for parameter in DCRNN(mechanism, horizon=1, hidden=size, layers=layers,
                                                           known=known).parameters())
              for mechanism, size in ((diffusion(order), hidden), *((Identity(), width + by) for by in (-1, 0, 1)))]
    aim, below, actual, above = counts
    assert abs(actual - aim) <= min(abs(below - aim), abs(above - aim)) and abs(actual - aim) < 0.05 * aim


def test_persistence_says_the_last_reading():
    readings, known, _ = drawn(5)
    assert torch.equal(Persistence(2)(readings, ring(5), known), readings[:, -1:].expand(-1, 2, -1))


def test_no_edge_is_no_error():
    lonely = Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=3)
    readings, known, _ = drawn(3)
    assert make()(readings, lonely, known).isfinite().all()
