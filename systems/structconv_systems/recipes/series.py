"""Traffic with missing values (Cinar et al. 2017, 2018): errors by attention, beside simple forecasts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.errors import DataError
from structconv_systems.data import series as data
from structconv_systems.models.forecasts import LinearForecast, MeanForecast, SeasonalForecast, ZeroForecast
from structconv_systems.models.series import Forecaster, History, LastValue
from structconv_systems.plots import forecast_png
from structconv_systems.recipes.base import BatchTask, Finished, Job, Parts, Run, Study, Windows, jobs_of, untrained_job
from structconv_systems.recipes.options.series import Series

__all__ = ["RUNNER", "Histories", "SeriesTask", "network"]

_WITHOUT, _PLAIN, _PERIOD, _LAST = "without-attention", "attention", "period-aware", "last-value"
_ATTENTION = {_WITHOUT: "none", _PLAIN: "content", _PERIOD: "period"}
#: Forecasts made at a time.
_MANY = 512


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Histories (B, T) and later readings (B, horizon), and which of them are observed."""

    values: Tensor
    observed: Tensor
    target: Tensor
    counted: Tensor


@dataclass(frozen=True, kw_only=True)
class Histories:
    """Series in three consecutive parts, unless another file tests; a sample is an origin and a sensor. Origins and
    forecasts of ``val`` and ``test`` lie in the part; histories reach back before it."""

    recipe: Series
    parts: Parts[data.Part]

    @classmethod
    def read(cls, recipe: Series) -> Self:
        """Read the files; `DataError` if one is too short."""
        values, observed = _padded(recipe, recipe.path(recipe.file))
        times = len(values) - recipe.horizon
        ends = data.ends_of_parts(times, recipe.train, recipe.valid)
        if ends["train"] <= recipe.history or min(ends["val"] - ends["train"], times - ends["val"]) <= recipe.horizon:
            raise DataError(recipe.path(recipe.file), f"more than history={recipe.history} times for training, and "
                            f"than horizon={recipe.horizon} for validation and for the test", f"{times} times")
        firsts = {"train": recipe.history - 1, "val": ends["train"], "test": ends["val"]}
        parts = {part: data.Part(values, observed, firsts[part], ends[part]) for part in ends}
        other = _other(recipe, recipe.path(recipe.test)) if recipe.test else None
        parts = data.checked_parts(recipe.path(recipe.file), parts, other)
        return cls(recipe=recipe, parts=Parts(parts, of="times to forecast from"))

    def batch(self, part: str, origins: Tensor, sensors: Tensor, missing: Tensor | None = None) -> Batch:
        """Return samples, without the `missing` (B, T) readings; readings after the part do not count."""
        recipe, of = self.recipe, self.parts[part]
        times = origins.unsqueeze(-1) + torch.arange(1 - recipe.history, recipe.horizon + 1)
        values, observed = (table[times, sensors.unsqueeze(-1)] for table in (of.values, of.observed))
        observed = observed & (times < of.end)
        (known, target), (visible, counted) = (table.split((recipe.history, recipe.horizon), -1)
                                            for table in (values, observed))
        visible = visible if missing is None else visible & ~missing
        return Batch(values=known * visible, observed=visible, target=target, counted=counted)

    @torch.no_grad()
    def errors(self, model: nn.Module, part: str, stride: int, share: float = 0.0) -> Tensor:
        """Return mean absolute errors (horizon,) over the observed readings, from every `stride`-th origin; with a
        share of each history in gaps, the same for all models."""
        generator = torch.Generator().manual_seed(0)
        of = self.parts[part]
        samples = torch.cartesian_prod(torch.tensor(of.origins[::stride]), torch.arange(of.values.shape[1]))
        total, count = torch.zeros(2, self.recipe.horizon, dtype=torch.float64)
        for origin, sensor in (rows.unbind(-1) for rows in samples.split(_MANY)):
            missing = self.missing(len(origin), share, generator) if share else None
            batch = self.batch(part, origin, sensor, missing)
            error = (model(batch.values, batch.observed) - batch.target).abs() * batch.counted
            total, count = total + error.double().sum(0), count + batch.counted.sum(0)
        return total / count

    def missing(self, samples: int, share: float, generator: torch.Generator | None = None) -> Tensor:
        """Draw gaps in histories, (B, T)."""
        return data.gaps((samples, self.recipe.history), share, self.recipe.gap, generator)

    def figures(self, model: nn.Module, part: str) -> dict[str, float]:
        """Return the error by steps, their mean, and with gaps; of ``val`` the mean alone."""
        if part == "val":
            return {"val_loss": float(self.errors(model, part, self.recipe.stride).mean())}
        error = self.errors(model, part, 1)
        hidden = self.errors(model, part, self.recipe.stride, self.recipe.gaps)
        return {f"{part}_mae": float(error.mean()), **data.at_twelfths(f"{part}_mae", error, (1, 3, 6, 12)),
                f"{part}_mae_gaps": float(hidden.mean())}


def _padded(recipe: Series, path: Path) -> tuple[Tensor, Tensor]:
    """Return the readings of a file and which are observed, (times + horizon, S)."""
    series = data.read_series(path, missing="zero" if recipe.missing == "zero" else "nan")
    values, observed = (F.pad(table, (0, 0, 0, recipe.horizon)) for table in (series.values, series.observed))
    return values, observed


def _other(recipe: Series, path: Path) -> tuple[Path, data.Part]:
    """Read the test file, with any sensors; each is forecast alone."""
    values, observed = _padded(recipe, path)
    end = len(values) - recipe.horizon
    data.check_times(path, end, recipe.history, recipe.horizon)
    return path, data.Part(values, observed, recipe.history - 1, end)


def network(recipe: Series, histories: Histories, attention: str) -> Forecaster:
    """Build the model."""
    mean, deviation = data.mean_and_deviation(histories.parts["train"].known)
    return Forecaster(history=recipe.history, horizon=recipe.horizon, patch=recipe.patch, hidden=recipe.hidden,
                      attention=attention, heads=recipe.heads if attention == "period" else 1, dropout=recipe.dropout,
                      mean=mean, deviation=deviation)


class SeriesTask(BatchTask):
    """Absolute error of all forecast steps, in the unit of the readings; half of the samples have gaps."""

    model: Forecaster

    def __init__(self, recipe: Series, histories: Histories, attention: str, seed: int) -> None:
        self.histories, self.parts, part = histories, histories.parts, histories.parts["train"]
        windows = Windows(len(part.origins) * part.values.shape[1], size=recipe.batch_size, seed=seed)
        super().__init__(network(recipe, histories, attention), recipe, windows)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        histories, count = self.histories, len(samples)
        part = histories.parts["train"]
        chosen, sensors = torch.tensor([divmod(sample, part.values.shape[1]) for sample in samples]).unbind(-1)
        missing = histories.missing(count, histories.recipe.gaps) & (torch.rand(count, 1) < 0.5)
        batch = histories.batch("train", chosen + part.first, sensors, missing)
        error = (self.model(batch.values, batch.observed) - batch.target).abs() * batch.counted
        return error.sum(), float(batch.counted.sum())

    def figures(self, part: str) -> dict[str, float]:
        return self.histories.figures(self.model, part)


class Filled(nn.Module):
    """A forecast of histories without gaps, called with each missing reading as the last one before it."""

    def __init__(self, forecast: nn.Module) -> None:
        super().__init__()
        self.forecast = forecast

    def forward(self, values: Tensor, observed: Tensor) -> Tensor:
        y: Tensor = self.forecast(History.of(values, observed).filled)
        return y


def _linear(histories: Histories) -> Filled:
    """Fit the linear forecast to the training part, without gaps."""
    recipe, part = histories.recipe, histories.parts["train"]
    samples = torch.cartesian_prod(torch.tensor(part.origins[::recipe.stride]), torch.arange(part.values.shape[1]))
    batches = (histories.batch("train", *rows.unbind(-1)) for rows in samples.split(_MANY))
    return Filled(LinearForecast(recipe.history, recipe.horizon).fit(
        (History.of(batch.values, batch.observed).filled, batch.target, batch.counted) for batch in batches))


def _simple(recipe: Series, histories: Histories) -> dict[str, nn.Module]:
    """Return the forecasts that are not trained by gradients; seasonal if a history has a whole period."""
    seasonal = {"seasonal": Filled(SeasonalForecast(recipe.period, recipe.horizon))} if (
        recipe.horizon <= recipe.period <= recipe.history) else {}
    return {"linear": _linear(histories), **seasonal, _LAST: LastValue(recipe.horizon),
            "mean": MeanForecast(recipe.horizon), "zero": ZeroForecast(recipe.horizon)}


def _jobs(recipe: Series, run: Run | None) -> list[Job]:
    histories = Histories.read(recipe)
    simple = [untrained_job(name, model, histories.figures) for name, model in _simple(recipe, histories).items()]
    trainings = [jobs_of(recipe, name, partial(SeriesTask, histories=histories, attention=attention), SeriesTask)
                 for name, attention in _ATTENTION.items()]
    return [*(job for jobs in trainings for job in jobs), *simple]


def _finish(recipe: Series, finished: Finished) -> dict[str, Any]:
    """Compare with the last value, and draw forecasts with gaps by the first trainings."""
    for name in (_PLAIN, _PERIOD):
        finished.run.draw(f"{name}.png", _picture(finished.task(name)),
                          "A test history with gaps and its forecast, by readings since the last one; below, the "
                          "attention to each part of the history. Rows: heads, each with its steps of the forecast; "
                          "colors: weights as shares of the greatest in the row.")
    means = {name: figures["test_mae"]["mean"] for name, figures in finished.groups.items()}
    return {"below_last_value": {name: means[name] < means[_LAST] for name in _ATTENTION}}


@torch.no_grad()
def _picture(task: SeriesTask) -> bytes:
    """Draw a history with gaps of the sensor whose readings vary most, its forecast, and the attention."""
    histories, model, part = task.histories, task.model, task.histories.parts["test"]
    sensor = part.values[:part.end].std(0).argmax().unsqueeze(0)
    missing = histories.missing(1, histories.recipe.gaps, torch.Generator().manual_seed(0))
    batch = histories.batch("test", torch.tensor([part.origins[len(part.origins) // 2]]), sensor, missing)
    y, last = (forecast(batch.values, batch.observed)[0] for forecast in (model, LastValue(histories.recipe.horizon)))
    target = batch.target.masked_fill(~batch.counted, torch.nan)[0]
    return forecast_png(batch.values.masked_fill(~batch.observed, torch.nan)[0],
                        {"observed later": target, "forecast": y, "last value": last},
                        model.weights(batch.values, batch.observed)[0].flatten(0, 1), y_label="reading")


RUNNER = Study(jobs=_jobs, columns={"test_mae": "MAE", "test_mae_1_of_12": "at 1/12", "test_mae_3_of_12": "1/4",
                                    "test_mae_6_of_12": "1/2", "test_mae_12_of_12": "the end",
                                    "test_mae_gaps": "with gaps"}, finish=_finish).runner
