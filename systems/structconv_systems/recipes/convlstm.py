"""Films of moving digits (Shi et al. 2015): how well a ConvLSTM goes on with them, an LSTM without convolution, and the
mean frame."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.errors import DataError
from structconv_systems import pictures
from structconv_systems.data.idx import read_idx
from structconv_systems.data.moving import Films
from structconv_systems.models.convlstm import ConvLSTM, MeanFrame, width_without_grid
from structconv_systems.recipes.options.convlstm import MovingDigits
from structconv_systems.train.batches import Batches
from structconv_systems.train.parts import Parts
from structconv_systems.train.run import Run
from structconv_systems.train.study import Finished, Job, Study, jobs_of, parameters_of
from structconv_systems.train.task import BatchTask
from structconv_systems.train.untrained import untrained_job

__all__ = ["RUNNER", "FilmTask", "films_of", "network"]

_CONVOLUTION, _WITHOUT, _WIDE, _MEAN = "convlstm", "lstm", "lstm-wide", "mean-frame"
#: Films that are forecast at a time; those of which means are taken; those in the animation, one after the other.
_MANY, _MEANT, _SHOWN = 50, 500, 3


def films_of(recipe: MovingDigits) -> Parts[Films]:
    """``train``, ``val`` and ``test``: no image is in two of them."""
    path = recipe.path(recipe.images)
    images, counts = _images(recipe, path), {"train": recipe.films, "val": recipe.held_out, "test": recipe.held_out}
    if len(images) < 10:
        raise DataError(path, "ten images at least, of which the last tenth validates", len(images))
    own = {"train": images[:-(len(images) // 10)], "val": images[-(len(images) // 10):],
           "test": _images(recipe, recipe.path(recipe.test))}
    return Parts({part: Films.drawn(own[part], count, frames=recipe.seen + recipe.ahead, size=recipe.size, seed=seed,
                              together=recipe.together, speed=recipe.speed)
            for seed, (part, count) in enumerate(counts.items())})


def _images(recipe: MovingDigits, path: Path) -> Tensor:
    """The images of an idx file of bytes, (S, side, side) in [0, 1]."""
    bytes_SHW = read_idx(path)
    if bytes_SHW.dim() != 3 or bytes_SHW.dtype != torch.uint8:
        raise DataError(path, "images: bytes with the axes number, row, column",
                        f"{str(bytes_SHW.dtype).removeprefix('torch.')} {tuple(bytes_SHW.shape)}")
    return torch.cat([F.adaptive_avg_pool2d(part.float() / 255, recipe.side) for part in bytes_SHW.split(10000)])


def network(recipe: MovingDigits, name: str) -> ConvLSTM:
    """The recipe's model; ``lstm`` is the one without convolution that has as many parameters, ``lstm-wide`` one with a
    state of `recipe.wide` numbers, or of as many as the ConvLSTM's."""
    size, layers = recipe.size, recipe.layers
    if name == _CONVOLUTION:
        return ConvLSTM(size=size, ahead=recipe.ahead, patch=recipe.patch, kernel=recipe.kernel, hidden=recipe.hidden,
                        layers=layers)
    if name == _WIDE:
        wide = recipe.wide or recipe.hidden * (size // recipe.patch) ** 2
    else:
        wide = width_without_grid(size, recipe.patch, recipe.kernel, recipe.hidden, layers)
    return ConvLSTM(size=size, ahead=recipe.ahead, patch=size, kernel=1, hidden=wide, layers=layers)


def _some(films: Parts[Films]) -> Tensor:
    """The first of the films that train."""
    return films["train"].at(torch.arange(min(_MEANT, len(films["train"]))))


class FilmTask(BatchTask):
    """Cross-entropy of the pixels that are forecast, summed over a frame."""

    model: ConvLSTM

    def __init__(self, recipe: MovingDigits, films: Parts[Films], name: str, seed: int) -> None:
        self.films, self.seen = films, recipe.seen
        batches, model = Batches([1] * len(films["train"]), cost=recipe.batch_size, seed=seed), network(recipe, name)
        nn.init.constant_(model.readout.bias, float(_some(films).mean().logit(1e-4)))  # as bright as frames are
        super().__init__(model, recipe, batches)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        frames = self.films["train"].at(torch.tensor(samples))
        logits, wanted = self.model(frames[:, :self.seen]), frames[:, self.seen:]
        return F.binary_cross_entropy_with_logits(logits, wanted, reduction="sum"), wanted.shape[0] * wanted.shape[1]

    def figures(self, part: str) -> dict[str, float]:
        return _figures(self.films, self.seen, self.model, part)


@torch.no_grad()
def _figures(films: Parts[Films], seen: int, model: nn.Module, part: str) -> dict[str, float]:
    """Cross-entropy and squared error of a frame, summed over its pixels: the mean, and of the first and the last."""
    sums: Any = 0
    for chosen in torch.arange(len(films[part])).split(_MANY):
        frames = films[part].at(chosen)
        logits, wanted = model(frames[:, :seen]), frames[:, seen:]
        entropy = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
        error = (logits.sigmoid() - wanted).square()
        sums = sums + torch.stack([entropy, error]).double().sum((1, 3, 4))
    entropy, error = sums / len(films[part])
    if part == "val":
        return {"val_loss": float(entropy.mean())}
    return {f"{part}_entropy": float(entropy.mean()), f"{part}_entropy_first": float(entropy[0]),
            f"{part}_entropy_last": float(entropy[-1]), f"{part}_squared": float(error.mean())}


def _jobs(recipe: MovingDigits, run: Run | None) -> list[Job]:
    films = films_of(recipe)
    mean = MeanFrame(_some(films), recipe.ahead)
    trained = [job for name in (_CONVOLUTION, _WITHOUT, _WIDE)
               for job in jobs_of(recipe, name, partial(FilmTask, recipe, films, name), FilmTask)]
    return [*trained, untrained_job(_MEAN, mean, partial(_figures, films, recipe.seen))]


@torch.no_grad()
def _finish(recipe: MovingDigits, finished: Finished) -> dict[str, Any]:
    """Test films, what came and what is forecast, as frames and moving, by the first trainings."""
    models = {name: finished.task(name).model for name in (_CONVOLUTION, _WITHOUT)}
    films = films_of(recipe)["test"]
    frames = films.at(torch.arange(min(_SHOWN, len(films))))
    seen = frames[:, :recipe.seen]
    shown = {"came": frames, **{name: torch.cat([seen, model(seen).sigmoid()], 1) for name, model in models.items()}}
    finished.run.draw("frames", pictures.films({"seen": seen[0]} | {name: film[0, recipe.seen:]
                                                                   for name, film in shown.items()}))
    finished.run.write("pictures/films.gif", pictures.images_gif({name: film.flatten(0, 1)
                                                                for name, film in shown.items()}))
    return {"parameters": {name: parameters_of(task) for name, task in finished.tasks().items()}}


RUNNER = Study(jobs=_jobs, columns={"test_entropy": "cross-entropy a frame", "test_entropy_first": "of the first",
                                    "test_entropy_last": "of the last", "test_squared": "squared error a frame"},
               finish=_finish).runner
