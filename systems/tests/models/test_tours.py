"""The model of tours: it is a distribution over them, the same whatever the order of the points, and it learns."""

import itertools

import pytest
import torch

from structconv_systems.data.tours import uniform, ways
from structconv_systems.models.decoding import greedy, sample
from structconv_systems.models.tours import BEGIN, TourModel


def make(seed=0, **options):
    torch.manual_seed(seed)
    model = TourModel(**{"channels": 16, "layers": 2, "heads": 2, "hidden": 32, **options})
    model(uniform(64, 9, 3), tours(64, 9))  # running statistics of the norms that are not those of a new one
    return model.eval()


def tours(samples, nodes, seed=5):
    return torch.rand(samples, nodes, generator=torch.Generator().manual_seed(seed)).argsort(-1)


def stepwise(model, points, order):
    """log p of each node at its step, by one step of decoding after the other."""
    decoding, last, actual = model.begin(points), torch.full((len(points),), BEGIN), []
    for newest in order.unbind(-1):
        actual.append(decoding.step(last).log_softmax(-1).gather(-1, newest.unsqueeze(-1)))
        last = newest
    return torch.cat(actual, -1)


def test_the_tours_share_the_probability():
    points, every = uniform(1, 5, 0), torch.tensor(list(itertools.permutations(range(5))))
    p = make().double()(points.double().expand(len(every), -1, -1), every).sum(-1).exp()
    assert p.sum().item() == pytest.approx(1, abs=1e-10) and p.min() > 0


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_all_steps_at_once_are_those_of_decoding(nodes):
    model, points, order = make(), uniform(6, nodes, 0), tours(6, nodes)
    torch.testing.assert_close(stepwise(model, points, order), model(points, order), rtol=1e-5, atol=1e-5)


def test_what_was_visited_is_not_chosen_again():
    model, points = make(), uniform(4, 7, 0)
    decoding = model.begin(points)
    decoding.step(torch.full((4,), BEGIN))
    logits = decoding.step(torch.tensor([0, 1, 2, 3]))
    assert torch.equal(logits == -torch.inf, torch.eye(4, 7, dtype=torch.bool)) and logits.amax() <= 10


def test_decoding_goes_on_with_other_samples():
    model, points, order = make(), uniform(3, 6, 0), torch.tensor([2, 0, 0, 1])
    decoding, single = model.begin(points), model.begin(points[order])
    first = torch.tensor([4, 5, 1])
    for each, tokens in ((decoding, first), (single, first[order])):
        each.step(torch.full((len(tokens),), BEGIN))
        each.step(tokens)
    decoding.reorder(order)
    following = torch.tensor([0, 2, 3, 4])
    torch.testing.assert_close(decoding.step(following), single.step(following))


def test_points_in_another_order_give_the_same():
    model, points, order = make(), uniform(4, 7, 0), tours(4, 7)
    places = torch.randperm(7)
    torch.testing.assert_close(model(points[:, places], places.argsort()[order]), model(points, order), rtol=1e-5,
                               atol=1e-5)


def test_reinforced_tours_become_shorter():
    """The gradient of (L - b) log p, b the mean of a batch, in 40 steps."""
    model, random, actual = make().train(), torch.Generator().manual_seed(0), []
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for step in range(40):
        points = uniform(64, 6, step)
        order = torch.tensor(sample(model.begin(points), 64, begin=BEGIN, end=None, most=6, generator=random))
        length = ways(points, order)
        actual.append(float(length.mean()))
        optimizer.zero_grad()
        ((length - length.mean()) * model(points, order).sum(-1)).mean().backward()
        optimizer.step()
    assert sum(actual[-5:]) < 0.92 * sum(actual[:5])


def test_the_likeliest_tours_are_tours():
    actual = torch.tensor(greedy(make().begin(uniform(5, 30, 0)), 5, begin=BEGIN, end=None, most=30))
    assert torch.equal(actual.sort(-1).values, torch.arange(30).expand(5, -1))


def test_logits_are_clipped():
    model = make(clip=3.0)
    with torch.no_grad():
        for parameter in model.pointer.parameters():
            parameter *= 1e4
    logits = model.begin(uniform(16, 6, 0)).step(torch.full((16,), BEGIN))
    torch.testing.assert_close(logits.abs().amax(), torch.tensor(3.0))
