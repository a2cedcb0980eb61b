"""The loop that trains a model, with all that it writes, against the same steps bare."""

from __future__ import annotations

import itertools
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.case import FORWARD, Case, Comparison, Entrant, Size
from structconv_systems.models.characters import CharacterModel
from structconv_systems.train.batches import Windows
from structconv_systems.train.interrupt import Interrupt
from structconv_systems.train.loop import fit
from structconv_systems.train.options import Trained
from structconv_systems.train.progress import Quiet
from structconv_systems.train.run import Run
from structconv_systems.train.study import jobs_of
from structconv_systems.train.task import BatchTask

__all__ = ["CASES"]

_LETTERS, _LENGTH, _BATCH = 64, 128, 16


@dataclass(frozen=True, kw_only=True)
class _Options(Trained):
    name = "training-loop"


class _Characters(BatchTask):
    """The next of random characters; nothing is validated."""

    def __init__(self, options: Trained, text: Tensor) -> None:
        self.text = text
        model = CharacterModel(_LETTERS, channels=128, layers=2, heads=4, dropout=0.0)
        super().__init__(model, options, Windows(len(text) - _LENGTH, size=_BATCH, seed=0))

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        tokens = torch.stack([self.text[first:first + _LENGTH + 1] for first in samples])
        logits = self.model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"), _BATCH * _LENGTH

    def figures(self, part: str) -> dict[str, float]:
        return {f"{part}_loss": 0.0}


class _Trainings:
    """One training twice: by `fit`, in a folder that is removed with the object, and by torch alone."""

    def __init__(self, steps: int) -> None:
        self.options = _Options(steps=steps, checkpoint_every=steps, validate_every=steps)
        self.text = torch.randint(0, _LETTERS, (20_000,))
        self._folder = tempfile.TemporaryDirectory()
        self._run, self._numbers = Run.create(self._folder.name, self.options), itertools.count()

    def task(self, seed: int = 0) -> _Characters:
        torch.manual_seed(seed)
        return _Characters(self.options, self.text)

    @torch.enable_grad()
    def loop(self) -> Tensor:
        task, (job,) = self.task(), jobs_of(self.options, f"number-{next(self._numbers)}", self.task, _Characters)
        fit(lambda: task, job.schedule(), run=self._run, job=job.name, interrupt=Interrupt(), progress=Quiet())
        shutil.rmtree(self._run.checkpoint_folder(job.name))
        return nn.utils.parameters_to_vector(task.model.parameters()).detach()

    @torch.enable_grad()
    def bare(self) -> Tensor:
        task = self.task()
        optimizer = torch.optim.Adam(task.model.parameters(), lr=self.options.learning_rate)
        for step in range(1, self.options.steps + 1):
            loss, count = task.loss(task.batches.at(step))
            optimizer.zero_grad()
            (loss / count).backward()
            nn.utils.clip_grad_norm_(task.model.parameters(), self.options.clip)
            optimizer.step()
        return nn.utils.parameters_to_vector(task.model.parameters()).detach()


def _loop(size: Size) -> Comparison:
    trainings = _Trainings(size.pick(10, 100))
    ours, bare = (Entrant(name=name, run=run, phases=(FORWARD,))
                  for name, run in (("ours", trainings.loop), ("bare steps", trainings.bare)))
    return Comparison(ours=ours, peers=(bare,),
                      size=f"{trainings.options.steps} steps, B={_BATCH}, {_LENGTH} characters, 128 channels")


CASES = (Case(suite="models", name="training-loop", build=_loop, headline=False),)
