"""A number of molecules by message passing (Gilmer et al. 2017): the error over random splits, one a seed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.errors import DataError
from structconv.structures import Graph
from structconv_systems.data.molecules import ATOM_CHANNELS, BOND_CHANNELS, read_molecules
from structconv_systems.data.molecules import Molecules as Data
from structconv_systems.data.series import ends_of_parts
from structconv_systems.models.molecules import MessagePassing
from structconv_systems.recipes.options.molecules import Molecules
from structconv_systems.scenes import agreement
from structconv_systems.train.batches import Batches, generator
from structconv_systems.train.run import Run
from structconv_systems.train.study import Finished, Job, Study, jobs_of
from structconv_systems.train.task import BatchTask

__all__ = ["RUNNER", "MoleculesTask", "Table", "network"]

#: Molecules measured at a time.
_MANY = 128


@dataclass(frozen=True, kw_only=True)
class Table:
    """The molecules of the recipe's file, and those of another that are measured in place of its test part."""

    recipe: Molecules
    molecules: Data
    other: Data | None

    @classmethod
    def read(cls, recipe: Molecules) -> Table:
        """Both, of which the lines that are skipped are counted in a warning; `DataError` where there are too few."""
        molecules, other = (_read(recipe, name) if name else None for name in (recipe.file, recipe.test))
        assert molecules is not None
        table = cls(recipe=recipe, molecules=molecules, other=other)
        if not all(table.places(0).values()):
            raise DataError(recipe.path(recipe.file), "molecules for training, validation and the test", len(molecules))
        return table

    def places(self, seed: int) -> dict[str, list[int]]:
        """Which molecules train, validate and test with this seed."""
        count = len(self.molecules)
        ends = ends_of_parts(count, self.recipe.train, self.recipe.valid)
        order: list[int] = torch.randperm(count, generator=generator(seed, 0)).tolist()
        return {"train": order[:ends["train"]], "val": order[ends["train"]:ends["val"]], "test": order[ends["val"]:]}

    @property
    def skipped(self) -> int:
        """Molecules whose SMILES could not be read."""
        return sum(len(data.skipped) for data in (self.molecules, self.other) if data is not None)


def network(recipe: Molecules, targets: Tensor) -> MessagePassing:
    """The recipe's model of numbers like these."""
    return MessagePassing(ATOM_CHANNELS, BOND_CHANNELS + recipe.reach - 1, channels=recipe.channels,
                          edge_hidden=recipe.edge_hidden, message_steps=recipe.message_steps, readout=recipe.readout,
                          readout_steps=recipe.readout_steps, dropout=recipe.dropout, mean=float(targets.mean()),
                          deviation=float(targets.std(correction=0)) or 1.0)


class MoleculesTask(BatchTask):
    """Squared error in units of the deviation of the training molecules."""

    model: MessagePassing

    def __init__(self, recipe: Molecules, table: Table, seed: int) -> None:
        self.table, self.places = table, table.places(seed)
        self._measured_at: dict[str, list[tuple[Tensor, Graph, Tensor]]] = {}
        train = self.places["train"]
        super().__init__(network(recipe, table.molecules.targets[train]), recipe,
                         Batches([1] * len(train), cost=recipe.batch_size, seed=seed))

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        places = [self.places["train"][sample] for sample in samples]
        found, wanted = self.model(*self.table.molecules.batch(places)), self.table.molecules.targets[places]
        return F.mse_loss(found, wanted, reduction="sum") / self.model.variance, float(len(samples))

    def figures(self, part: str) -> dict[str, float]:
        found, wanted = self.predicted(part)
        error = (found - wanted).double()
        root = float(error.square().mean().sqrt())
        return {"val_loss": root} if part == "val" else {f"{part}_rmse": root, f"{part}_mae": float(error.abs().mean())}

    @torch.no_grad()
    def predicted(self, part: str) -> tuple[Tensor, Tensor]:
        """What the model says of a part, and what was measured."""
        batches = self._batches(part)
        return (torch.cat([self.model(x, graph) for x, graph, _ in batches]),
                torch.cat([wanted for _, _, wanted in batches]))

    def _batches(self, part: str) -> list[tuple[Tensor, Graph, Tensor]]:
        """A part in batches that are kept, for it is measured again and again."""
        if part not in self._measured_at:
            other = self.table.other if part == "test" else None
            data, places = (self.table.molecules, self.places[part]) if other is None else (other, range(len(other)))
            cuts = [places[first:first + _MANY] for first in range(0, len(places), _MANY)]
            self._measured_at[part] = [(*data.batch(cut), data.targets[list(cut)]) for cut in cuts]
        return self._measured_at[part]


def _read(recipe: Molecules, name: str) -> Data:
    path = recipe.path(name)
    data = read_molecules(path, smiles=recipe.smiles, target=recipe.target, reach=recipe.reach,
                          skip_bad=recipe.skip_bad)
    if data.skipped:
        warnings.warn(f"{path}: {len(data.skipped)} of {len(data) + len(data.skipped)} molecules are left out, for "
                      f"their SMILES cannot be read; the first is in line {data.skipped[0]}", stacklevel=2)
    return data


def _jobs(recipe: Molecules, run: Run | None) -> list[Job]:
    return jobs_of(recipe, recipe.name, partial(MoleculesTask, recipe, Table.read(recipe)), MoleculesTask)


def _finish(recipe: Molecules, finished: Finished) -> dict[str, Any]:
    """How many molecules were skipped; and what the first training says beside what was measured, in a picture."""
    task: MoleculesTask = finished.task(recipe.name)
    shown = {title: task.predicted(part) for title, part in (("training", "train"), ("test", "test"))}
    finished.run.draw("predicted", agreement({title: (wanted, found) for title, (found, wanted) in shown.items()}))
    return {"skipped": task.table.skipped}


RUNNER = Study(jobs=_jobs, columns={"test_rmse": "RMSE", "test_mae": "MAE"}, finish=_finish).runner
