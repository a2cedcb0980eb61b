"""Neural relational inference with geometry: symmetries of the encoder and the decoders, and laws that are learned."""

import pytest
import torch
from torch.nn import functional as F

from structconv.structures import Graph
from structconv_systems.data.physics import Oscillators, Springs
from structconv_systems.models.nri import RelationalInference
from structconv_systems.models.nri_pairs import Circle, ForceDecoder, Plane, TurningDecoder, reversed_edges
from systems.tests.models.sequences import check_in_any_order, trained
from tests.support.drawn import slow

GRAPH, T = Graph.complete(4), 12
STARTS = torch.tensor([0, 6])
SPACES = pytest.mark.parametrize("space", [Plane, Circle])


def states_of(space, count=5):
    x = torch.randn(count, T, 4, 4, generator=torch.Generator().manual_seed(0))
    if space is Circle:
        x[..., 1:3] = torch.nn.functional.normalize(x[..., 1:3], dim=-1)
    return x


def model_of(space, **options):
    """A model none of whose weights is zero."""
    torch.manual_seed(0)
    model = RelationalInference.structured(space(), times=T, hidden=16, **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) / 10)
    return model


@SPACES
def test_bodies_may_come_in_any_order(space):
    check_in_any_order(model_of(space), states_of(space), torch.tensor([2, 0, 3, 1]), STARTS, 2)


@SPACES
@pytest.mark.parametrize("symmetric", [True, False])
def test_both_directions_of_a_pair_have_the_same_logits_on_request(space, symmetric):
    logits = model_of(space, symmetric=symmetric).encoder(states_of(space), GRAPH)
    back = reversed_edges(GRAPH)
    assert torch.equal(GRAPH.edge_index[:, back], GRAPH.edge_index.flip(0))
    assert torch.allclose(logits, logits[:, back]) is symmetric


@SPACES
@pytest.mark.parametrize("still", [True, False])
def test_only_the_still_type_sends_nothing(space, still):
    model, x = model_of(space, still=still), states_of(space)[:, :1]
    first = torch.tensor([1.0, 0.0]).expand(5, 12, 2)
    apart = model.decoder(x, GRAPH, first, 2) - model.decoder(x, GRAPH, torch.zeros(5, 12, 2), 2)
    assert (apart.abs().max() < 1e-6).item() is still


def test_forces_turn_with_the_bodies():
    """By any angle, free motion and walls set to zero."""
    decoder, x, edges = model_of(Plane).decoder, states_of(Plane), torch.rand(5, 12, 2)
    with torch.no_grad():
        for parameter in (*decoder.drift.parameters(), *decoder.walls.parameters()):
            parameter.zero_()
    turn = torch.linalg.qr(torch.randn(2, 2)).Q

    def turned(states):
        return (states.unflatten(-1, (2, 2)) @ turn).flatten(-2)

    torch.testing.assert_close(decoder(turned(x), GRAPH, edges, 3), turned(decoder(x, GRAPH, edges, 3)))


def test_turned_phases_stay_on_the_circle():
    x = states_of(Circle)
    later = model_of(Circle).decoder(x, GRAPH, torch.rand(5, 12, 2), 4)
    assert not torch.allclose(later[:, :, 0, :, 1], x[..., 1], atol=1e-2)
    torch.testing.assert_close(later[..., 1:3].norm(dim=-1), torch.ones(later.shape[:-1]))


@slow
def test_a_decoder_with_the_true_graph_learns_the_law_of_springs():
    system = Springs(bodies=4, stiffness=1.0)
    simulations = system.simulate(64, T, seed=0)
    x, joined = simulations.states, simulations.couplings[:, GRAPH.source, GRAPH.target]
    decoder = ForceDecoder(2, hidden=32)
    trained(decoder, lambda: F.mse_loss(
        decoder(x[:, :-1], GRAPH, torch.stack([1 - joined, joined], -1), 1)[:, :, 0], x[:, 1:]), 300, 5e-3)
    distance = torch.linspace(0.4, 1.2, 5)
    force = decoder.law(distance)[0] / (system.step * system.every)
    torch.testing.assert_close(force, -system.stiffness * distance, rtol=0.2, atol=0.0)


def test_the_cosine_is_added_to_the_states_of_oscillators():
    plain, circle = (Oscillators(bodies=3, cosine=cosine).simulate(4, 5, seed=0).states for cosine in (False, True))
    assert torch.equal(circle[..., [0, 1, 3]], plain)
    torch.testing.assert_close(circle[..., 1:3].square().sum(-1), torch.ones(4, 5, 3))


def test_the_decoder_fits_the_space():
    assert isinstance(model_of(Plane).decoder, ForceDecoder)
    assert isinstance(model_of(Circle).decoder, TurningDecoder)
