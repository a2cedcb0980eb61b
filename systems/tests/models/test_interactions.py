"""Interaction networks: they learn, bodies may come in any order and number, batches and single ones agree, saved and
exported; what bodies see of one another."""

import pytest
import torch

from structconv.structures import Graph
from structconv_systems.data.physics import Balls, Gravity, String
from structconv_systems.models.interaction_features import BoxFeatures, SpaceFeatures, StringFeatures
from structconv_systems.models.interactions import InteractionNetwork

SYSTEMS = {"gravity": (Gravity(bodies=4, softening=5.0), SpaceFeatures(1e-3)),
           "balls": (Balls(bodies=4), BoxFeatures(0.01, 1.0)),
           "string": (String(bodies=4), StringFeatures(0.01, 0.2, 0.3))}
EACH = pytest.mark.parametrize("name", SYSTEMS)


def make(name, seed=0):
    """With effects, which are at first 0."""
    torch.manual_seed(seed)
    model = InteractionNetwork(SYSTEMS[name][1], hidden=32, effects=8, layers=2)
    torch.nn.init.normal_(model.network.edge.rest[-1].weight, std=0.1)
    return model


def drawn(name, count=6, bodies=4, seed=0):
    """States after a few steps, properties, the graph, and the next change."""
    system, features = SYSTEMS[name]
    simulations = type(system)(bodies=bodies).simulate(count, 12, seed=seed)
    before, after = simulations.states[:, -2].contiguous(), simulations.states[:, -1]
    return before, simulations.properties, features.graph(bodies), (after - before)[..., 2:]


def fitted(name):
    states, properties, graph, changes = drawn(name)
    changes = torch.randn(changes.shape, generator=torch.Generator().manual_seed(1))
    return make(name).fit(states, properties, graph, changes), states, properties, graph, changes


@EACH
def test_the_change_is_that_of_the_formula(name):
    """Edge by edge: f([r, o_s, o_r]) summed at the receiver, g of the sum, o and h, written out."""
    model, states, properties, graph, _ = fitted(name)
    features, network = model.features, model.network
    own = features.own(properties) / model.own_scale
    pairs = features.pairs(states, properties, graph) / model.pair_scale
    first = {part: weight.theta[0] for part, weight in zip(("edges", "senders", "receivers"),
                                                           network.edge.first.weight.weights, strict=True)}
    reached = torch.zeros(6, 4, 8)
    for place, (m, n) in enumerate(graph.edge_index.T.tolist()):
        read = pairs[:, place] @ first["edges"] + own[:, m] @ first["senders"] + own[:, n] @ first["receivers"]
        reached[:, n] += network.edge.rest(read + network.edge.first.bias)
    of_effects, of_own = (weight.theta[0] for weight in network.node.first.weight.weights)
    hidden = reached @ of_effects + own @ of_own + network.node.first.bias
    if model.outside is not None:
        around = features.outside(states, properties) / model.outside_scale
        hidden = hidden + model.outside(torch.cat([around, own], -1))
    expected = model.rest(hidden) * model.change_scale
    if name == "string":
        expected = expected * (1 - properties[..., 1:2])
    torch.testing.assert_close(model(states, properties, graph), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gravity", "balls"])
def test_bodies_may_come_in_any_order(name):
    model, states, properties, graph, _ = fitted(name)
    order = torch.tensor([2, 0, 3, 1])
    actual = model(states, properties, graph)
    torch.testing.assert_close(model(states[:, order], properties[:, order], graph), actual[:, order], rtol=1e-4,
                               atol=1e-5)


def test_a_string_may_be_numbered_otherwise():
    model, states, properties, graph, _ = fitted("string")
    order = torch.tensor([2, 0, 3, 1])
    turned = Graph(order.argsort()[graph.edge_index], num_nodes=4)
    torch.testing.assert_close(model(states[:, order], properties[:, order], turned),
                               model(states, properties, graph)[:, order], rtol=1e-4, atol=1e-5)


@EACH
@pytest.mark.parametrize("bodies", [2, 7])
def test_it_works_on_other_numbers_of_bodies(name, bodies):
    model, *_ = fitted(name)
    states, properties, graph, _ = drawn(name, 3, bodies)
    actual = model.rollout(states, properties, graph, 4)
    assert actual.shape == (3, 4, bodies, 4)
    assert actual.isfinite().all()


def test_it_is_the_same_elsewhere_and_while_all_move():
    """Among bodies that nothing is around; to 1e-3 of the greatest, as distances are then differences of great ones."""
    model, states, properties, graph, _ = fitted("gravity")
    moved = states + torch.tensor([50.0, -80.0, 300.0, 100.0])
    torch.testing.assert_close(model(moved, properties, graph), model(states, properties, graph), rtol=0, atol=1e-3)


@EACH
def test_without_relations_a_body_is_what_it_is_alone(name):
    states, properties, graph, changes = drawn(name)
    model = InteractionNetwork(SYSTEMS[name][1], hidden=8, relations=False)
    torch.nn.init.normal_(model.network.edge.rest[-1].weight)
    model.fit(states, properties, graph, torch.randn_like(changes))
    actual = model(states, properties, graph)
    torch.testing.assert_close(model(states[:, 1:2], properties[:, 1:2], Graph.complete(1)), actual[:, 1:2])
    assert not torch.equal(model(states + 0.01, properties, graph), actual)


def test_one_body_in_space_is_alone():
    model, *_ = fitted("gravity")
    actual = model(torch.randn(2, 1, 4), torch.ones(2, 1, 1), Graph.complete(1))
    assert actual.isfinite().all()
    assert torch.equal(actual[0], actual[1])


def test_what_is_held_stays_where_it_is():
    model, states, properties, graph, _ = fitted("string")
    rolled = model.rollout(states, properties, graph, 5)
    assert torch.equal(rolled[:, -1, 0], states[:, 0])
    assert not torch.equal(rolled[:, -1, 1], states[:, 1])


def test_a_rollout_moves_by_the_mean_velocity():
    model, states, properties, graph, _ = fitted("balls")
    after, change = model.rollout(states, properties, graph, 1)[:, 0], model(states, properties, graph)
    torch.testing.assert_close(after[..., 2:], states[..., 2:] + change)
    torch.testing.assert_close(after[..., :2], states[..., :2] + 0.01 * (states[..., 2:] + after[..., 2:]) / 2)


def test_what_balls_see():
    """Two of radius 0.1, 0.3 apart, that come closer by 2 in a second; the first is 0.05 from a wall, and leaves it."""
    features, states = BoxFeatures(0.01, 1.0), torch.tensor([[-0.85, 0.0, 1.0, 0.0], [-0.55, 0.0, -1.0, 0.0]])
    properties = torch.tensor([[1.0, 0.1], [1.0, 0.1]])
    pair = features.pairs(states, properties, Graph(torch.tensor([[1], [0]]), num_nodes=2))[0]
    gaps = torch.tensor([0.1, 0.08, 0.8]) / features.reach
    torch.testing.assert_close(pair, torch.cat([torch.tensor([0.3, 0, -2, 0, 1, 0, 2]), gaps.tanh()]))
    wall = features.outside(states, properties)[0, :6]
    gaps = torch.tensor([0.05, 0.06, 0.6]) / features.reach
    torch.testing.assert_close(wall, torch.cat([torch.tensor([-1.0, 0, -1]), gaps.tanh()]))


def test_what_a_string_sees():
    """Only neighbors; springs at rest have no gap, and the disk is below."""
    features, (states, properties, graph, _) = SYSTEMS["string"][1], drawn("string")
    assert graph.edge_index.T.tolist() == [[0, 1], [1, 2], [2, 3], [1, 0], [2, 1], [3, 2]]
    rest = torch.zeros(4, 4)
    rest[:, 0] = 0.2 * torch.arange(4)
    pairs = features.pairs(rest, properties[0], graph)
    torch.testing.assert_close(pairs[:, 7:], torch.zeros(6, 3), rtol=0, atol=1e-5)
    assert features.own(properties).shape == (6, 4, 2)
    assert (features.outside(states, properties)[..., 1] < 0).all()
