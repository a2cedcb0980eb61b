"""A number of molecules by message passing (Gilmer et al. 2017): the error over random splits, one a seed."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from structconv.errors import DataError
from structconv.structures import Graph
from structconv_systems.data.molecules import ATOM_CHANNELS, BOND_CHANNELS, descriptors, fingerprints, read_molecules
from structconv_systems.data.molecules import Molecules as Data
from structconv_systems.data.series import ends_of_parts
from structconv_systems.models.molecules import Ensemble, MessagePassing
from structconv_systems.pictures import agreement
from structconv_systems.recipes.base import Batches, BatchTask, Parts, Run, fitted_job, generator
from structconv_systems.recipes.options.graphs import Molecules
from structconv_systems.train.study import Finished, Job, Study, jobs_of

__all__ = ["RUNNER", "MoleculesTask", "Table", "network"]

#: Molecules measured at a time.
_MANY = 128


@dataclass(frozen=True, kw_only=True)
class Table:
    """The molecules of the file, and those of another that replace its test part."""

    recipe: Molecules
    molecules: Data
    other: Data | None

    @classmethod
    def read(cls, recipe: Molecules) -> Self:
        """Read both files; skipped lines are counted in a warning; `DataError` if there are too few molecules."""
        molecules, other = (_read(recipe, name) if name else None for name in (recipe.file, recipe.test))
        assert molecules is not None
        table = cls(recipe=recipe, molecules=molecules, other=other)
        if not all(table._split(0).values()):
            raise DataError(recipe.path(recipe.file), "molecules for training, validation and the test", len(molecules))
        return table

    def data(self, part: str) -> Data:
        """Return the molecules of which `rows` chooses those of a part."""
        return self.other if part == "test" and self.other is not None else self.molecules

    def rows(self, seed: int) -> Parts[list[int]]:
        """Return the molecules of each part with this seed."""
        other = {} if self.other is None else {"test": list(range(len(self.other)))}
        return Parts(self._split(seed) | other, of="molecules")

    def _split(self, seed: int) -> dict[str, list[int]]:
        count = len(self.molecules)
        ends = ends_of_parts(count, self.recipe.train, self.recipe.valid)
        order: list[int] = torch.randperm(count, generator=generator(seed, 0)).tolist()
        return {"train": order[:ends["train"]], "val": order[ends["train"]:ends["val"]], "test": order[ends["val"]:]}

    @property
    def skipped(self) -> int:
        """The number of molecules whose SMILES cannot be read."""
        return sum(len(data.skipped) for data in (self.molecules, self.other) if data is not None)


def network(recipe: Molecules, targets: Tensor) -> Ensemble:
    """Build the models of numbers like these."""
    return Ensemble(MessagePassing(
        ATOM_CHANNELS, BOND_CHANNELS + recipe.reach - 1, channels=recipe.channels, edge_hidden=recipe.edge_hidden,
        message_steps=recipe.message_steps, readout=recipe.readout, readout_steps=recipe.readout_steps,
        dropout=recipe.dropout, mean=float(targets.mean()), deviation=float(targets.std(correction=0)) or 1.0)
        for _ in range(recipe.members))


class MoleculesTask(BatchTask):
    """Squared error in units of the variance of the training molecules, the mean over the models."""

    model: Ensemble

    def __init__(self, recipe: Molecules, table: Table, seed: int) -> None:
        self.table, self.parts = table, table.rows(seed)
        self._measured_at: dict[str, list[tuple[Tensor, Graph, Tensor]]] = {}
        train = self.parts["train"]
        super().__init__(network(recipe, table.molecules.targets[train]), recipe,
                         Batches([1] * len(train), cost=recipe.batch_size, seed=seed))

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        rows = [self.parts["train"][sample] for sample in samples]
        output, target = self.model(*self.table.molecules.batch(rows)), self.table.molecules.targets[rows]
        variance = cast(MessagePassing, self.model.members[0]).variance
        return (output - target).square().mean(0).sum() / variance, float(len(samples))

    def figures(self, part: str) -> dict[str, float]:
        return errors(*self.predicted(part), part)

    @torch.no_grad()
    def predicted(self, part: str) -> tuple[Tensor, Tensor]:
        """Return the predicted and the measured numbers of a part."""
        batches = self._batches(part)
        return (torch.cat([self.model(x, graph) for x, graph, _ in batches]),
                torch.cat([target for _, _, target in batches]))

    def _batches(self, part: str) -> list[tuple[Tensor, Graph, Tensor]]:
        """Return the batches of a part, which are kept, for it is measured many times."""
        if part not in self._measured_at:
            data, rows = self.table.data(part), self.parts[part]
            cuts = [rows[first:first + _MANY] for first in range(0, len(rows), _MANY)]
            self._measured_at[part] = [(*data.batch(cut), data.targets[cut]) for cut in cuts]
        return self._measured_at[part]


class Forest(nn.Module):
    """A random forest (Breiman 2001) whose share of features in a split is the best in validation. A feature that is
    NaN has the median of the training part.

    Args:
        features: SMILES -> (B, D). trees: number of trees. shares: of the features.

    Calling it: SMILES -> numbers (B,).
    """

    def __init__(self, table: Table, seed: int, features: Callable[[tuple[str, ...]], Any], trees: int,
                 shares: Sequence[float]) -> None:
        from sklearn.ensemble import RandomForestRegressor
        from sklearn.impute import SimpleImputer
        from sklearn.pipeline import make_pipeline

        super().__init__()
        self.features, data, rows = features, table.molecules, table.rows(seed)
        train, val = (rows[part] for part in ("train", "val"))
        inputs, targets = features(data.smiles), data.targets.double().numpy()
        best = float("inf")
        for share in shares:
            forest = make_pipeline(SimpleImputer(strategy="median", keep_empty_features=True),
                                   RandomForestRegressor(trees, max_features=share, random_state=seed))
            error = float(((forest.fit(inputs[train], targets[train]).predict(inputs[val]) - targets[val]) ** 2).mean())
            if error < best:
                best, self.forest = error, forest

    def forward(self, smiles: tuple[str, ...]) -> Tensor:
        return torch.from_numpy(self.forest.predict(self.features(smiles)))


def _described(smiles: tuple[str, ...]) -> Any:
    return np.concatenate([fingerprints(smiles), descriptors(smiles)], 1)


def _forest_figures(table: Table, seed: int, model: nn.Module, part: str) -> dict[str, float]:
    data, rows = table.data(part), table.rows(seed)[part]
    return errors(model(data.smiles)[rows], data.targets[rows], part)


def errors(output: Tensor, target: Tensor, part: str) -> dict[str, float]:
    """Return the root mean square and the mean absolute error of numbers (B,)."""
    error = output.double() - target.double()
    root = float(error.square().mean().sqrt())
    return {"val_loss": root} if part == "val" else {f"{part}_rmse": root, f"{part}_mae": float(error.abs().mean())}


def _read(recipe: Molecules, name: str) -> Data:
    path = recipe.path(name)
    data = read_molecules(path, smiles=recipe.smiles, target=recipe.target, reach=recipe.reach,
                          skip_bad=recipe.skip_bad)
    if data.skipped:
        warnings.warn(f"{path}: {len(data.skipped)} of {len(data) + len(data.skipped)} molecules are left out, for "
                      f"their SMILES cannot be read; the first is in line {data.skipped[0]}", stacklevel=2)
    return data


def _jobs(recipe: Molecules, run: Run | None) -> list[Job]:
    """The features of a forest are computed once for each file, and shared by its trainings."""
    table = Table.read(recipe)
    forests = {"random-forest": (cache(fingerprints), 300, (0.05, 0.2, 1.0)),
               "random-forest-descriptors": (cache(_described), 100, (0.2,))}
    return [*jobs_of(recipe, recipe.name, partial(MoleculesTask, table=table), MoleculesTask),
            *(fitted_job(name, seed, partial(Forest, table, seed, *options), partial(_forest_figures, table, seed))
              for name, options in forests.items() for seed in range(recipe.seeds))]


def _finish(recipe: Molecules, finished: Finished) -> dict[str, Any]:
    """Count skipped molecules, and draw predictions of the first training beside the measured numbers."""
    task: MoleculesTask = finished.task(recipe.name)
    shown = {title: task.predicted(part) for title, part in (("training", "train"), ("test", "test"))}
    finished.run.draw("predicted", agreement({title: (target, output) for title, (output, target) in shown.items()}),
                      f"Predicted {recipe.target} by measured, a dot for each molecule; on the line both are equal.")
    return {"skipped": task.table.skipped}


RUNNER = Study(jobs=_jobs, columns={"test_rmse": "RMSE", "test_mae": "MAE"}, finish=_finish).runner
