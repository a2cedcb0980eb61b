"""Neural relational inference: it learns, bodies may come in any order, batches and single ones agree, save, export."""

import pytest
import torch
from torch.nn import functional as F

from structconv import ConfigError, Graph
from structconv_systems.data.physics import Springs
from structconv_systems.models.nri import Correlation, Decoder, RecurrentDecoder, RelationalInference, SeriesEncoder
from systems.tests.models.sequences import check_in_any_order, trained

GRAPH, T, HORIZON = Graph.complete(4), 14, 4
STARTS = torch.tensor([0, 6])


def make(seed=0, **options):
    torch.manual_seed(seed)
    model = RelationalInference.paper(times=T, channels=4, hidden=16, **options)
    with torch.no_grad():
        model.decoder.rest[-1].weight.normal_(std=0.1)
    return model.eval()


def drawn(count=5, bodies=4, seed=0, times=T):
    return torch.randn(count, times, bodies, 4, generator=torch.Generator().manual_seed(seed))


def test_a_decoder_that_is_told_the_graph_learns_springs():
    """One-step predictions become far better with the true graph than without any."""
    system = Springs(bodies=4, stiffness=2.0)
    simulations = system.simulate(64, 12, seed=0)
    x, couplings = simulations.states, simulations.couplings
    joined = couplings[:, GRAPH.source, GRAPH.target]
    true = torch.stack([1 - joined, joined], -1)
    errors = []
    for edges in (true, torch.zeros_like(true)):
        torch.manual_seed(0)
        decoder = Decoder(4, 2, hidden=32)
        errors.append(trained(decoder, lambda decoder=decoder, edges=edges: F.mse_loss(
            decoder(x[:, :-1], GRAPH, edges, 1)[:, :, 0], x[:, 1:]), 150, 5e-3)[-1])
    assert errors[0] < errors[1] / 4


def test_the_motion_is_that_of_the_formula():
    """x + W x + g(sum over edges of z relu(W [x_m, x_n]), x_n), written out."""
    model, x, edges = make(messages=2, types=3), drawn()[:, :2], torch.rand(5, 12, 3)
    decoder, reached = model.decoder, [torch.zeros(5, 2, 4, 16) for _ in range(2)]
    for place, (m, n) in enumerate(GRAPH.edge_index.T.tolist()):
        for k in range(2):
            theta = decoder.messages[k].weight.theta
            message = (x[:, :, m] @ theta[0] + x[:, :, n] @ theta[1] + decoder.messages[k].bias).relu()
            reached[k][:, :, n] += edges[:, None, place, k + 1:k + 2] * decoder.deeper[k](message)
    own, *thetas = (part.theta[0] for part in decoder.update.weight.weights)
    total = x @ own + decoder.update.bias + sum(r @ theta for r, theta in zip(reached, thetas, strict=True))
    torch.testing.assert_close(decoder(x, GRAPH, edges, 1)[:, :, 0], x + decoder.drift(x) + decoder.rest(total))


def test_a_recurrent_decoder_is_a_gru_of_what_edges_send():
    """Written out with torch's GRUCell: true states are read up to each start, predicted ones from there on."""
    decoder, x, edges = RecurrentDecoder(4, 3, hidden=8, messages=2).eval(), drawn(), torch.rand(5, 12, 3)
    torch.nn.init.normal_(decoder.rest[-1].weight)
    cell = torch.nn.GRUCell(4 + 2 * 8, 8)
    with torch.no_grad():
        cell.weight_ih.copy_(torch.cat([part.theta[0] for part in decoder.inputs.weight.weights]).T)
        cell.bias_ih.copy_(decoder.inputs.bias)
        cell.weight_hh.copy_(decoder.state.weight)
        cell.bias_hh.copy_(decoder.state.bias)

    def step(h, states):
        reached = [torch.zeros(5, 4, 8) for _ in range(2)]
        for place, (m, n) in enumerate(GRAPH.edge_index.T.tolist()):
            for k, (first, deeper) in enumerate(zip(decoder.messages, decoder.deeper, strict=True)):
                message = deeper(h[:, m] @ first.weight.theta[0] + h[:, n] @ first.weight.theta[1] + first.bias)
                reached[k][:, n] += edges[:, place, k + 1:k + 2] * message
        return cell(torch.cat([states, *reached], -1).flatten(0, 1), h.flatten(0, 1)).unflatten(0, (5, 4))

    actual = decoder(x, GRAPH, edges, 3, torch.tensor([4, 2]))
    for place, start in enumerate([4, 2]):
        h = torch.zeros(5, 4, 8)
        for t in range(start + 1):
            h = step(h, x[:, t])
        state = x[:, start]
        for ahead in range(3):
            state = state + decoder.rest(h)
            torch.testing.assert_close(actual[:, place, ahead], state, rtol=1e-4, atol=1e-5)
            h = step(h, state)


def test_an_encoder_of_series_convolves_each_pair_over_time():
    """Written out with torch's convolutions of [x_s, x_r]."""
    encoder, x = SeriesEncoder(4, 2, hidden=8).eval(), drawn(times=15)
    series = torch.cat([x[:, :, GRAPH.source], x[:, :, GRAPH.target]], -1).movedim(1, -1).flatten(0, 1)  # (B E, 8, T)
    first = encoder.first.edge.first
    sender, receiver = (part.theta[0].view(4, 5, 8) for part in first.weight.weights)
    kernel = torch.cat([sender, receiver]).permute(2, 0, 1)
    c = encoder.first_norm(F.conv1d(series, kernel, first.bias).relu())
    c = F.conv1d(F.max_pool1d(c, 2), encoder.second.weight, encoder.second.bias)
    c = encoder.second_norm(c.relu()).mT
    pooled = ((c @ encoder.score.weight.T).softmax(1) * (c @ encoder.value.weight.T + encoder.value.bias)).sum(1)
    torch.testing.assert_close(encoder._over_time(encoder.first(
        x.unfold(1, 5, 1).flatten(-2), GRAPH).edges.relu()), pooled.unflatten(0, (5, 12)), rtol=1e-4, atol=1e-5)


def test_an_encoder_of_series_needs_enough_times():
    with pytest.raises(ConfigError, match="times must be at least 14 for encoder='cnn'; got 13"):
        RelationalInference.paper(times=13, channels=4, encoder="cnn")
    assert SeriesEncoder(4, 2, hidden=8)(drawn(), GRAPH).shape == (5, 12, 2)


@pytest.mark.parametrize("decoder", ["mlp", "rnn"])
@pytest.mark.parametrize("still", [True, False])
def test_a_type_that_sends_nothing_has_no_network(still, decoder):
    model, x = make(still=still, decoder=decoder), drawn()[:, :1]
    nothing = torch.tensor([1.0, 0.0]).expand(5, 12, 2)
    single = model.decoder(x[:, :, :1], Graph.complete(1), torch.zeros(5, 0, 2), 3)
    together = model.decoder(x, GRAPH, nothing, 3)
    assert torch.allclose(together[:, :, :, :1], single, atol=1e-5) is still
    assert len(model.decoder.messages) == (1 if still else 2)


@pytest.mark.parametrize(("encoder", "decoder"), [("mlp", "mlp"), ("cnn", "rnn")])
def test_bodies_may_come_in_any_order(encoder, decoder):
    check_in_any_order(make(encoder=encoder, decoder=decoder), drawn(), torch.tensor([2, 0, 3, 1]), STARTS, HORIZON)


def test_edges_are_drawn_while_it_trains_and_chosen_else():
    model, logits = make(), torch.tensor([[[0.0, 1.0], [3.0, -1.0]]])
    assert model.edges(logits).tolist() == [[[0, 1], [1, 0]]]
    model.train()
    drawn = torch.stack([model.edges(logits.expand(400, 2, 2)) for _ in range(2)])
    torch.testing.assert_close(drawn.sum(-1), torch.ones(2, 400, 2))
    assert not torch.equal(drawn[0], drawn[1])
    chosen = (drawn[..., 1] > 0.5).float().mean((0, 1))
    torch.testing.assert_close(chosen, torch.tensor([0.731, 0.018]), rtol=0, atol=0.06)


def test_correlations_find_what_moves_alike_by_the_best_threshold():
    common, own = torch.randn(60, T, 1, 2), torch.randn(60, T, 4, 2)
    x = own.clone()
    x[:, :, :2] = common + 0.1 * own[:, :, :2]
    joined = ((GRAPH.source < 2) & (GRAPH.target < 2)).long().expand(60, -1)
    for sign in (1, -1):
        moved = x.clone()
        moved[:, :, 1] *= sign
        model = Correlation().fit(moved, GRAPH, joined)
        assert model.sign == sign
        assert (model(moved, GRAPH).argmax(-1) == joined).float().mean() > 0.99


def test_a_channel_that_does_not_change_is_correlated_with_none():
    """Not with the rounding errors of another one, although 0.1 is not its own mean in float32."""
    x = torch.randn(20, T, 4, 2)
    still = (0.1 * torch.arange(1.0, 5.0)).view(1, 1, 4, 1).expand(20, T, 4, 1)
    actual = Correlation.correlation(torch.cat([x, still], -1), GRAPH)
    torch.testing.assert_close(actual, Correlation.correlation(x, GRAPH) * 2 / 3)
