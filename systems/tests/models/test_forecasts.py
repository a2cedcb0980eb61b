"""Simple forecasts: each is exact on the series that it is made for."""

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.models.forecasts import LinearForecast, MeanForecast, SeasonalForecast, TimeOfDay, ZeroForecast


def windows(series, history, horizon):
    whole = series.unfold(0, history + horizon, 1)
    return whole[:, :history], whole[:, history:]


def test_a_linear_forecast_continues_a_sum_of_waves_and_skips_what_does_not_count():
    time = torch.arange(400.0)
    series = torch.sin(0.3 * time) + 0.5 * torch.cos(0.7 * time) + 0.01 * time
    history, later = windows(series, 8, 3)
    counted = torch.ones_like(later, dtype=torch.bool)
    counted[::3, 1] = False
    spoiled = later.masked_fill(~counted, 1e6)
    forecast = LinearForecast(8, 3).fit(zip(history.split(50), spoiled.split(50), counted.split(50), strict=True))
    assert (forecast(history) - later).abs().max() < 2e-2
    nothing = LinearForecast(8, 3).fit([(history, later, torch.zeros_like(counted))])
    torch.testing.assert_close(nothing(history), history[:, -1:].expand(-1, 3))


def test_a_season_its_time_of_day_a_mean_and_zero():
    series = torch.tensor([1.0, 5.0, 2.0, 7.0]).repeat(6)
    history, later = windows(series, 6, 3)
    assert torch.equal(SeasonalForecast(4, 3)(history), later)
    sensors = torch.stack([series, 2 * series], -1)
    observed = torch.ones_like(sensors, dtype=torch.bool)
    observed[5, 0] = False
    model = TimeOfDay(sensors.where(observed, torch.tensor(99.0)), observed, 4, 3)
    known = (torch.arange(2, 8) % 4 / 4).view(1, 6, 1, 1).expand(1, 6, 2, 1)
    torch.testing.assert_close(model(sensors[2:8].unsqueeze(0), None, known), sensors[8:11].unsqueeze(0))
    values, seen = torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]])
    assert MeanForecast(2)(values, seen).tolist() == [[2.0, 2.0]]
    torch.testing.assert_close(MeanForecast(2)(values), values.mean(-1, keepdim=True).expand(1, 2))
    assert ZeroForecast(2)(values, seen).tolist() == ZeroForecast(2)(values).tolist() == [[0.0, 0.0]]
    with pytest.raises(ConfigError, match="period must be at least horizon=3"):
        SeasonalForecast(2, 3)
