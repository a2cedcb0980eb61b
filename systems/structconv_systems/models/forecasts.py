"""Baseline forecasts: linear, seasonal, mean and zero."""

from collections.abc import Iterable
from typing import Self, cast

import torch
from torch import Tensor, nn

from structconv.errors import ConfigError
from structconv.shapes import check_positive

__all__ = ["LinearForecast", "MeanForecast", "SeasonalForecast", "TimeOfDay", "ZeroForecast"]


class LinearForecast(nn.Module):
    """y_n = last + sum_m w_mn (x_m - last) + b_n, the same weights for all series; fitted by least squares.

    Calling it: histories (..., T) without gaps -> (..., horizon).

    Example:

        >>> from structconv_systems.models.forecasts import LinearForecast
        >>> rising = torch.arange(50.0).unfold(0, 8, 1)    # (B, T + horizon)
        >>> history, later = rising[:, :6], rising[:, 6:]
        >>> model = LinearForecast(6, 2).fit([(history, later, torch.ones_like(later, dtype=torch.bool))])
        >>> torch.allclose(model(torch.arange(100.0, 106.0)[None]), torch.tensor([[106.0, 107.0]]), atol=0.1)
        True
    """

    weight: Tensor

    def __init__(self, history: int, horizon: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.zeros(history + 1, horizon, dtype=torch.float64))

    def forward(self, history: Tensor) -> Tensor:
        last = history[..., -1:]
        return (self._inputs(history) @ self.weight).to(history.dtype) + last

    def fit(self, batches: Iterable[tuple[Tensor, Tensor, Tensor]]) -> Self:
        """Fit each step to histories (B, T), later readings and which of them count (B, horizon); a step that never
        counts is forecast as the last value."""
        size, horizon = self.weight.shape
        square = torch.zeros(horizon, size, size, dtype=torch.float64)
        right = torch.zeros(horizon, size, dtype=torch.float64)
        for history, later, counted in batches:
            x, y = self._inputs(history), (later - history[..., -1:]).double()
            if counted.all():
                square += x.mT @ x
                right += y.mT @ x
            else:
                for step, own in enumerate(counted.mT):
                    square[step] += x[own].mT @ x[own]
                    right[step] += y[own, step] @ x[own]
        ridge = 1e-6 * square.diagonal(0, -2, -1).mean(-1).clamp(min=1e-6)
        self.weight = torch.linalg.solve(square + ridge[:, None, None] * torch.eye(size, dtype=square.dtype), right).mT
        return self

    def _inputs(self, history: Tensor) -> Tensor:
        shifted = (history - history[..., -1:]).double()
        return torch.cat([shifted, torch.ones_like(shifted[..., :1])], -1)


class Forecast(nn.Module):
    """A forecast of `horizon` steps without parameters."""

    def __init__(self, horizon: int) -> None:
        super().__init__()
        self.horizon = check_positive(type(self).__name__, "horizon", horizon)


class SeasonalForecast(nn.Module):
    """The reading one period before: histories (..., T) without gaps -> (..., horizon).

    Example:

        >>> from structconv_systems.models.forecasts import SeasonalForecast
        >>> SeasonalForecast(period=3, horizon=2)(torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]])).tolist()
        [[4.0, 5.0]]
    """

    def __init__(self, period: int, horizon: int) -> None:
        super().__init__()
        if period < horizon:
            raise ConfigError("SeasonalForecast", f"period must be at least horizon={horizon}", period)
        self.period, self.horizon = period, check_positive("SeasonalForecast", "horizon", horizon)

    def forward(self, history: Tensor) -> Tensor:
        first = history.shape[-1] - self.period
        return history[..., first:first + self.horizon]


class MeanForecast(Forecast):
    """The mean of the observed readings of a history, 0 without any: readings (..., T) and booleans, default all
    observed -> (..., horizon).

    Example:

        >>> from structconv_systems.models.forecasts import MeanForecast
        >>> MeanForecast(2)(torch.tensor([[1.0, 9.0, 3.0]]), torch.tensor([[True, False, True]])).tolist()
        [[2.0, 2.0]]
    """

    def forward(self, values: Tensor, observed: Tensor | None = None) -> Tensor:
        observed = torch.ones_like(values, dtype=torch.bool) if observed is None else observed
        mean = (values * observed).sum(-1, keepdim=True) / observed.sum(-1, keepdim=True).clamp(min=1)
        return mean.expand(*values.shape[:-1], self.horizon)


class ZeroForecast(Forecast):
    """0 at all of `horizon` steps: the error of no forecast. Called as `MeanForecast` is.

    Example:

        >>> from structconv_systems.models.forecasts import ZeroForecast
        >>> ZeroForecast(2)(torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool)).tolist()
        [[0.0, 0.0]]
    """

    def forward(self, values: Tensor, observed: Tensor | None = None) -> Tensor:
        return values.new_zeros(*values.shape[:-1], self.horizon)


class TimeOfDay(nn.Module):
    """The mean of each sensor's training readings at the same time of day (a historical average).

    Args:
        values, observed: training readings (T, S), the first at the beginning of a day, and which count.
        period: number of readings in a day.

    Calling it: as `DCRNN` is, with the time of day in [0, 1) as `known` (..., T, S, 1) -> (..., horizon, S).

    Example:

        >>> from structconv_systems.models.forecasts import TimeOfDay
        >>> values = torch.tensor([1.0, 2.0, 3.0, 2.0]).unsqueeze(-1)                        # two days of two times
        >>> model = TimeOfDay(values, torch.ones(4, 1, dtype=torch.bool), period=2, horizon=2)
        >>> model(values[None], None, torch.tensor([0.0, 0.5, 0.0, 0.5]).view(1, 4, 1, 1)).flatten().tolist()
        [2.0, 2.0]
    """

    def __init__(self, values: Tensor, observed: Tensor, period: int, horizon: int) -> None:
        super().__init__()
        self.period, self.horizon = period, check_positive("TimeOfDay", "horizon", horizon)
        time = torch.arange(len(values)) % period
        sums, counts = (values.new_zeros(period, values.shape[1]).index_add(0, time, table)
                        for table in (values * observed, observed.to(values.dtype)))
        mean = sums.sum(0) / counts.sum(0).clamp(min=1)
        self.register_buffer("table", torch.where(counts > 0, sums / counts.clamp(min=1), mean))

    def forward(self, readings: Tensor, graph: object, known: Tensor) -> Tensor:
        now = (known[..., -1, 0, 0] * self.period).round().long()
        later = now.unsqueeze(-1) + torch.arange(1, self.horizon + 1)
        return cast(Tensor, self.table)[later % self.period]
