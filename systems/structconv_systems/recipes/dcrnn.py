"""Traffic over a graph of sensors (Li et al. 2018): the error with the graph, without it, and of the last value."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv import Graph, Identity
from structconv.errors import DataError
from structconv_systems import pictures
from structconv_systems.data import series as data
from structconv_systems.data.sensors import read_locations
from structconv_systems.models.dcrnn import DCRNN, Persistence, diffusion, sampled_share, width_without_graph
from structconv_systems.models.forecasts import LinearForecast, MeanForecast, TimeOfDay, ZeroForecast
from structconv_systems.models.series import History
from structconv_systems.recipes.base import Batches, BatchTask, Finished, Job, Parts, Run, Study, jobs_of, untrained_job
from structconv_systems.recipes.options.series import Traffic

__all__ = ["RUNNER", "DCRNNTask", "Sensors", "network"]

_GRAPH, _WITHOUT, _LAST, _MEAN, _ZERO = "dcrnn", "without-graph", "last-value", "mean", "zero"
#: Twelfths of the horizon whose errors are in the table: 15, 30 and 60 minutes of METR-LA's hour.
_TWELFTHS = (3, 6, 12)
#: Histories that are forecast at a time.
_MANY = 32


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Readings (B, T, S), time of day (B, T, S, 1) or none, later readings (B, horizon, S), and which of them count."""

    readings: Tensor
    known: Tensor | None
    target: Tensor
    counted: Tensor


@dataclass(frozen=True, kw_only=True)
class Sensors:
    """Series in three consecutive parts, and the graph of the sensors."""

    recipe: Traffic
    parts: Parts[data.Part]
    names: tuple[str, ...]
    graph: Graph

    @classmethod
    def read(cls, recipe: Traffic) -> Self:
        """Read the files; `DataError` if one is too short or has other sensors."""
        path = recipe.path(recipe.file)
        series = _read(recipe, recipe.file, recipe.path(recipe.adjacency))
        times, least = len(series.values), recipe.history - 1
        ends = data.ends_of_parts(times, recipe.train, recipe.valid)
        firsts = {"train": least, "val": ends["train"], "test": ends["val"]}
        for part, end in ends.items():
            if end - max(firsts[part], least) <= recipe.horizon:
                raise DataError(path, f"more than horizon={recipe.horizon} times in each part, behind the first "
                                f"history={recipe.history}", f"{times}, of which {part} has {end - firsts[part]}")
        parts = {part: _part(recipe, series, max(firsts[part], least), ends[part]) for part in ends}
        parts = data.checked_parts(path, parts, _other(recipe, series) if recipe.test else None)
        assert series.graph is not None
        return cls(recipe=recipe, parts=Parts(parts, of="times to forecast from"), names=series.names,
                   graph=series.graph)

    def batch(self, name: str, origins: Tensor) -> Batch:
        """Return samples of a part; readings after its end are not counted."""
        part, recipe = self.parts[name], self.recipe
        times = origins.unsqueeze(-1) + torch.arange(1 - recipe.history, recipe.horizon + 1)
        readings, target = part.values[times].split((recipe.history, recipe.horizon), 1)
        later = times[:, recipe.history:]
        counted = part.observed[later] & (later < part.end).unsqueeze(-1)
        share = times[:, :recipe.history].remainder(max(recipe.period, 1)) / max(recipe.period, 1)
        known = share[..., None, None].expand(-1, -1, len(self.names), 1) if recipe.period else None
        return Batch(readings=readings, known=known, target=target, counted=counted)

    @torch.no_grad()
    def errors(self, model: nn.Module, name: str, stride: int = 1) -> tuple[Tensor, Tensor, Tensor]:
        """Sum absolute and squared errors, and count observed readings, at every `stride`-th origin: each (horizon, S).
        """
        sums = torch.zeros(3, self.recipe.horizon, len(self.names), dtype=torch.float64)
        for origins in torch.tensor(self.parts[name].origins[::stride]).split(_MANY):
            batch = self.batch(name, origins)
            error = (model(batch.readings, self.graph, batch.known) - batch.target).double() * batch.counted
            sums += torch.stack([error.abs().sum(0), error.square().sum(0), batch.counted.sum(0)])
        absolute, squared, counts = sums
        return absolute, squared, counts

    def figures(self, model: nn.Module, name: str) -> dict[str, float]:
        """Return the errors by steps and in all; of ``val`` the latter alone."""
        absolute, squared, counts = self.errors(model, name, self.recipe.stride if name == "val" else 1)
        whole = float(absolute.sum() / counts.sum())
        if name == "val":
            return {"val_loss": whole}
        steps = absolute.sum(-1) / counts.sum(-1)
        return {f"{name}_mae": whole, **data.at_twelfths(f"{name}_mae", steps, _TWELFTHS),
                f"{name}_rmse": float((squared.sum() / counts.sum()).sqrt())}


def _read(recipe: Traffic, name: str, adjacency: Any = None) -> data.Series:
    return data.read_series(recipe.path(name), adjacency, missing=cast(Literal["nan", "zero", "none"], recipe.missing))


def _part(recipe: Traffic, series: data.Series, first: int, end: int) -> data.Part:
    """Fill each missing reading with the last one before it."""
    filled = History.of(series.values.mT, series.observed.mT).filled.mT
    values, observed = (F.pad(table, (0, 0, 0, recipe.horizon)) for table in (filled, series.observed))
    return data.Part(values=values, observed=observed, first=first, end=end)


def _other(recipe: Traffic, series: data.Series) -> tuple[Path, data.Part]:
    """Read the test file, whose sensors are those of the series in any order."""
    path, test = recipe.path(recipe.test), _read(recipe, recipe.test)
    if sorted(test.names) != sorted(series.names):
        odd = min(set(test.names) ^ set(series.names))
        raise DataError(path, f"the {len(series.names)} sensors of {recipe.file}", f"{len(test.names)} with another "
                        f"one, {odd!r}" if odd in test.names else f"{len(test.names)} without {odd!r}", line=1)
    data.check_times(path, len(test.values), recipe.history, recipe.horizon)
    order = [test.names.index(name) for name in series.names]
    same = data.Series(values=test.values[:, order], observed=test.observed[:, order], names=series.names)
    return path, _part(recipe, same, recipe.history - 1, len(test.values))


def network(recipe: Traffic, sensors: Sensors, name: str) -> DCRNN:
    """Build the model with the graph, or the one without it that has as many parameters."""
    (mean, deviation), day = data.mean_and_deviation(sensors.parts["train"].known), int(recipe.period > 0)
    wide = width_without_graph(recipe.hidden, recipe.layers, day, recipe.walk)
    mechanism, hidden = (diffusion(recipe.walk), recipe.hidden) if name == _GRAPH else (Identity(), wide)
    return DCRNN(mechanism, horizon=recipe.horizon, hidden=hidden, layers=recipe.layers, known=day,
                 mean=mean, deviation=deviation)


class DCRNNTask(BatchTask):
    """Absolute error of all forecast steps, in the unit of the readings."""

    model: DCRNN

    def __init__(self, recipe: Traffic, sensors: Sensors, name: str, seed: int) -> None:
        self.recipe, self.sensors, self.parts, self.share = recipe, sensors, sensors.parts, 0.0
        batches = Batches([1] * len(sensors.parts["train"].origins), cost=recipe.batch_size, seed=seed)
        super().__init__(network(recipe, sensors, name), recipe, batches)

    def train_step(self, step: int) -> dict[str, float]:
        self.share = sampled_share(step, self.recipe.sampling) if self.recipe.sampling else 0.0
        return super().train_step(step)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        batch = self.sensors.batch("train", torch.tensor(samples) + self.sensors.parts["train"].first)
        y = self.model(batch.readings, self.sensors.graph, batch.known, target=batch.target, share=self.share)
        return ((y - batch.target).abs() * batch.counted).sum(), float(batch.counted.sum())

    def figures(self, part: str) -> dict[str, float]:
        return self.sensors.figures(self.model, part)


class EachSensor(nn.Module):
    """A forecast of histories (..., T) for each sensor, called as `DCRNN` is."""

    def __init__(self, forecast: nn.Module) -> None:
        super().__init__()
        self.forecast = forecast

    def forward(self, readings: Tensor, graph: Graph | None = None, known: Tensor | None = None) -> Tensor:
        y: Tensor = self.forecast(readings.mT)
        return y.mT


def _linear(recipe: Traffic, sensors: Sensors) -> LinearForecast:
    """Fit the linear forecast to the training part."""
    batches = (sensors.batch("train", origins) for origins in torch.tensor(sensors.parts["train"].origins).split(_MANY))
    return LinearForecast(recipe.history, recipe.horizon).fit(
        (batch.readings.mT.flatten(0, 1), batch.target.mT.flatten(0, 1), batch.counted.mT.flatten(0, 1))
        for batch in batches)


def _simple(recipe: Traffic, sensors: Sensors) -> dict[str, nn.Module]:
    """Return the forecasts that are not trained by gradients."""
    train = sensors.parts["train"]
    days = {"time-of-day": TimeOfDay(train.values[:train.end], train.observed[:train.end], recipe.period,
                                     recipe.horizon)} if recipe.period else {}
    return {"linear": EachSensor(_linear(recipe, sensors)), **days, _LAST: Persistence(recipe.horizon),
            _MEAN: EachSensor(MeanForecast(recipe.horizon)), _ZERO: EachSensor(ZeroForecast(recipe.horizon))}


def _jobs(recipe: Traffic, run: Run | None) -> list[Job]:
    sensors = Sensors.read(recipe)
    _positions(recipe, sensors)  # what is wrong with the file is said before hours of training
    trained = [job for name in (_GRAPH, _WITHOUT)
               for job in jobs_of(recipe, name, partial(DCRNNTask, sensors=sensors, name=name), DCRNNTask)]
    return [*trained, *(untrained_job(name, model, sensors.figures)
                        for name, model in _simple(recipe, sensors).items())]


def _finish(recipe: Traffic, finished: Finished) -> dict[str, Any]:
    """Compare the errors with those of the baselines, and draw errors by sensor on a map, without mean and zero, whose
    errors would take most of its colors."""
    sensors, rows = Sensors.read(recipe), {}
    for name in [name for name in finished.groups if name not in (_MEAN, _ZERO)]:
        absolute, _, counts = sensors.errors(finished.task(name).model, "test")
        rows[name] = absolute.sum(0) / counts.sum(0).clamp(min=1)
    finished.run.draw("errors", pictures.map_of(_positions(recipe, sensors), rows, label="MAE"),
                      "Mean absolute error of each sensor in the test. Axes: kilometers east and north of the middle; "
                      "without a file of locations, a layout of the graph.")
    means = {name: {step: group[f"test_mae_{step}_of_12"]["mean"] for step in _TWELFTHS}
             for name, group in finished.groups.items()}
    return {"below": {name: {f"{step}_of_12": means[_GRAPH][step] < means[name][step] for step in _TWELFTHS}
                      for name in (_WITHOUT, _LAST)}}


def _positions(recipe: Traffic, sensors: Sensors) -> Tensor:
    """Return kilometers east and north of the sensors' middle, (S, 2), or without locations a layout of the graph."""
    absent = not recipe.path(recipe.locations).is_file() and recipe.locations == type(recipe).locations
    if not recipe.locations or absent:
        import networkx as nx

        layout = nx.spring_layout(sensors.graph.to_networkx().to_undirected(), seed=0)
        return torch.tensor([layout[node].tolist() for node in range(len(sensors.names))])
    degrees = read_locations(recipe.path(recipe.locations), sensors.names)
    middle = degrees.mean(0)
    return (degrees - middle) * 111.2 * torch.tensor([float(middle[1].deg2rad().cos()), 1.0])


RUNNER = Study(jobs=_jobs, columns={"test_mae": "MAE", "test_mae_3_of_12": "at 1/4", "test_mae_6_of_12": "1/2",
                                    "test_mae_12_of_12": "the end", "test_rmse": "RMSE"}, finish=_finish).runner
