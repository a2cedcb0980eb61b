"""Forecasters of series: they learn what lies a period back, do not see what is missing, and are saved and exported."""

import pytest
import torch
from torch.nn import functional as F

from structconv.errors import ConfigError
from structconv_systems.data.series import gaps
from structconv_systems.models.series import ATTENTION, Forecaster, History, LastValue

ALL = pytest.mark.parametrize("attention", ATTENTION)
T, HORIZON = 24, 4


def make(attention="period", seed=0, **options):
    torch.manual_seed(seed)
    return Forecaster(history=T, horizon=HORIZON, attention=attention, hidden=16, heads=2,
                      **{"patch": 2, "mean": 1.0, "deviation": 2.0, **options})


def drawn(count=5, seed=0):
    """Readings (B, T), of which about a fifth are missing, and what follows."""
    generator = torch.Generator().manual_seed(seed)
    series = 3 * torch.randn(count, T + HORIZON, generator=generator)
    observed = torch.rand(count, T, generator=generator) < 0.8
    return series[:, :T], observed, series[:, T:]


def test_a_period_is_found_by_its_distance():
    """White noise with the period 10 is forecast by what lies 10 back, which plain attention cannot tell."""
    def batch(seed):
        noise = torch.randn(48, 10, generator=torch.Generator().manual_seed(seed))
        series = noise.repeat(1, 3)[:, :T + HORIZON]
        return series[:, :T], torch.ones(48, T, dtype=torch.bool), series[:, T:]

    errors = {}
    for attention in ("content", "period"):
        model = make(attention, patch=1, mean=0.0, deviation=1.0)
        optimizer = torch.optim.Adam(model.parameters(), 2e-2)
        for seed in range(120):
            values, observed, expected = batch(seed)
            optimizer.zero_grad()
            F.l1_loss(model(values, observed), expected).backward()
            optimizer.step()
        values, observed, expected = batch(1000)
        errors[attention] = F.l1_loss(model(values, observed), expected).item()
    assert errors["period"] < 0.6 * errors["content"]
    furthest = model.weights(values, observed).mean(0).argmax(-1)
    assert ((torch.arange(T, T + HORIZON) - furthest) % 10 == 0).any(0).all()


@ALL
def test_what_is_missing_has_no_share(attention):
    """What stands where nothing was observed changes nothing, even if it is no number."""
    model, (values, observed, _) = make(attention), drawn()
    y = model(values, observed)
    assert torch.equal(model(values.masked_fill(~observed, torch.nan), observed), y)
    other = torch.where(observed, values, -values)
    other[observed] += 1
    assert not torch.allclose(model(other, observed), y)


def test_a_history_goes_on_with_its_last_reading():
    values, observed = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[1, 0, 0, 1], [0, 1, 0, 0]]).bool()
    history = History.of(values, observed)
    assert history.filled.tolist() == [[1, 1, 1, 4], [0, 6, 6, 6]]
    assert history.gap.tolist() == [[0, 1, 2, 0], [1, 0, 1, 2]]
    assert LastValue(3)(values, observed).tolist() == [[4, 4, 4], [6, 6, 6]]


def test_states_fade_behind_a_gap():
    """With period-aware attention the states of entries are scaled by exp(-mu gap), and by nothing where all is there.
    """
    model, (values, _, _) = make(), drawn()
    whole = torch.ones_like(values, dtype=torch.bool)
    holed = whole.clone()
    holed[:, 8:12] = False
    states = {name: model.encoded(History.of(values, observed)) for name, observed in
              (("whole", whole), ("holed", holed))}
    faded = model.faded(states["holed"], History.of(values, holed)) / states["holed"]
    mu = F.softplus(model.fade)
    torch.testing.assert_close(faded[:, 4:7, 0].mean(0), torch.exp(-mu * torch.tensor([2.0, 4.0, 0.0])))
    assert torch.equal(model.faded(states["whole"], History.of(values, whole)), states["whole"])


@pytest.mark.parametrize("attention", ["content", "period"])
def test_weights_sum_to_one_over_the_history(attention):
    model, (values, observed, _) = make(attention), drawn()
    looks = model.weights(values, observed)
    assert looks.shape == (5, 2 if attention == "period" else 1, HORIZON // 2, T // 2)
    torch.testing.assert_close(looks.sum(-1), torch.ones(looks.shape[:-1]))


def test_no_attention_has_no_weights():
    with pytest.raises(ConfigError, match="weights"):
        make("none").weights(*drawn()[:2])


def test_gaps_have_their_share_and_their_length():
    missing = gaps((500, 300), 0.2, 6, torch.Generator().manual_seed(0))
    assert abs(missing.float().mean() - 0.2) < 0.01
    begins = (missing[:, 1:-6] & ~missing[:, :-7]).nonzero()
    assert all(missing[row, place + 1:place + 7].all() for row, place in begins[:50].tolist())
    assert not gaps((2, 30), 0.0, 6).any()
