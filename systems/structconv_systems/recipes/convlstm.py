"""Videos of moving digits (Shi et al. 2015): forecasts of ConvLSTM, of LSTMs without convolution, of the mean frame."""

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
from structconv_systems.data.moving import Videos
from structconv_systems.models.convlstm import ConvLSTM, MeanFrame, width_without_grid
from structconv_systems.recipes.base import Batches, BatchTask, Parts, Run, untrained_job
from structconv_systems.recipes.options.images import MovingDigits
from structconv_systems.train.study import Finished, Job, Study, jobs_of, parameters_of

__all__ = ["RUNNER", "VideoTask", "network", "videos_of"]

_CONVOLUTION, _WITHOUT, _WIDE, _MEAN = "convlstm", "lstm", "lstm-wide", "mean-frame"
#: Numbers of videos: in a batch of forecasts, in the mean frame, in the animation.
_BATCH, _AVERAGED, _SHOWN = 50, 500, 3


def videos_of(recipe: MovingDigits) -> Parts[Videos]:
    """Draw ``train``, ``val`` and ``test``; no image is in two of them."""
    path = recipe.path(recipe.images)
    images, counts = _images(recipe, path), {"train": recipe.samples, "val": recipe.held_out, "test": recipe.held_out}
    if len(images) < 10:
        raise DataError(path, "ten images at least, of which the last tenth validates", len(images))
    own = {"train": images[:-(len(images) // 10)], "val": images[-(len(images) // 10):],
           "test": _images(recipe, recipe.path(recipe.test))}
    frames = recipe.history + recipe.horizon
    return Parts({part: Videos.drawn(own[part], count, frames=frames, size=recipe.size, digits=recipe.digits,
                                     speed=recipe.speed, seed=seed)
                  for seed, (part, count) in enumerate(counts.items())}, of="videos, drawn from images")


def _images(recipe: MovingDigits, path: Path) -> Tensor:
    """Read an idx file of bytes as images (S, side, side) in [0, 1]."""
    bytes_SHW = read_idx(path)
    if bytes_SHW.dim() != 3 or bytes_SHW.dtype != torch.uint8:
        raise DataError(path, "images: bytes with the axes number, row, column",
                        f"{str(bytes_SHW.dtype).removeprefix('torch.')} {tuple(bytes_SHW.shape)}")
    return torch.cat([F.adaptive_avg_pool2d(part.float() / 255, recipe.side) for part in bytes_SHW.split(10000)])


def network(recipe: MovingDigits, name: str) -> ConvLSTM:
    """Build the model; ``lstm`` has no convolution and as many parameters, ``lstm-wide`` a state of `recipe.wide`
    numbers, 0: of as many as the ConvLSTM."""
    size, layers = recipe.size, recipe.layers
    if name == _CONVOLUTION:
        return ConvLSTM(size=size, ahead=recipe.horizon, patch=recipe.patch, kernel=recipe.kernel, hidden=recipe.hidden,
                        layers=layers)
    if name == _WIDE:
        wide = recipe.wide or recipe.hidden * (size // recipe.patch) ** 2
    else:
        wide = width_without_grid(size, recipe.patch, recipe.kernel, recipe.hidden, layers)
    return ConvLSTM(size=size, ahead=recipe.horizon, patch=size, kernel=1, hidden=wide, layers=layers)


def _some(videos: Parts[Videos]) -> Tensor:
    """Return the first training videos."""
    return videos["train"].at(torch.arange(min(_AVERAGED, len(videos["train"]))))


class VideoTask(BatchTask):
    """Cross-entropy of the forecast pixels, summed over a frame."""

    model: ConvLSTM

    def __init__(self, recipe: MovingDigits, videos: Parts[Videos], name: str, seed: int) -> None:
        self.parts, self.history = videos, recipe.history
        batches, model = Batches([1] * len(videos["train"]), cost=recipe.batch_size, seed=seed), network(recipe, name)
        nn.init.constant_(model.readout.bias, float(_some(videos).mean().logit(1e-4)))  # as bright as frames are
        super().__init__(model, recipe, batches)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        frames = self.parts["train"].at(torch.tensor(samples))
        logits, target = self.model(frames[:, :self.history]), frames[:, self.history:]
        return F.binary_cross_entropy_with_logits(logits, target, reduction="sum"), target.shape[0] * target.shape[1]

    def figures(self, part: str) -> dict[str, float]:
        return _figures(self.parts, self.history, self.model, part)


@torch.no_grad()
def _figures(videos: Parts[Videos], history: int, model: nn.Module, part: str) -> dict[str, float]:
    """Cross-entropy and squared error of a frame, summed over its pixels: the mean, and of the first and the last."""
    sums: Any = 0
    for chosen in torch.arange(len(videos[part])).split(_BATCH):
        frames = videos[part].at(chosen)
        logits, target = model(frames[:, :history]), frames[:, history:]
        entropy = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        error = (logits.sigmoid() - target).square()
        sums = sums + torch.stack([entropy, error]).double().sum((1, 3, 4))
    entropy, error = sums / len(videos[part])
    if part == "val":
        return {"val_loss": float(entropy.mean())}
    return {f"{part}_entropy": float(entropy.mean()), f"{part}_entropy_first": float(entropy[0]),
            f"{part}_entropy_last": float(entropy[-1]), f"{part}_squared": float(error.mean())}


def _jobs(recipe: MovingDigits, run: Run | None) -> list[Job]:
    videos = videos_of(recipe)
    mean = MeanFrame(_some(videos), recipe.horizon)
    trained = [job for name in (_CONVOLUTION, _WITHOUT, _WIDE)
               for job in jobs_of(recipe, name, partial(VideoTask, videos=videos, name=name), VideoTask)]
    return [*trained, untrained_job(_MEAN, mean, partial(_figures, videos, recipe.history))]


@torch.no_grad()
def _finish(recipe: MovingDigits, finished: Finished) -> dict[str, Any]:
    """Draw test videos and their forecasts by the first trainings."""
    models = {name: finished.task(name).model for name in (_CONVOLUTION, _WITHOUT)}
    videos = videos_of(recipe)["test"]
    frames = videos.at(torch.arange(min(_SHOWN, len(videos))))
    history = frames[:, :recipe.history]
    forecasts = {name: torch.cat([history, model(history).sigmoid()], 1) for name, model in models.items()}
    shown = {"came": frames, **forecasts}
    first = {name: video[0, recipe.history:] for name, video in shown.items()}
    finished.run.draw("frames", pictures.videos({"seen": history[0], **first}),
                      "A test video. Rows: the observed frames, those that followed, and the forecasts; columns: time.")
    whole = {name: video.flatten(0, 1) for name, video in shown.items()}
    finished.run.draw("videos.gif", pictures.images_gif(whole),
                      "Test videos: the true frames, and the observed ones continued by each forecast. Black: 0, "
                      "white: the greatest value.")
    return {"parameters": {name: parameters_of(task) for name, task in finished.tasks().items()}}


RUNNER = Study(jobs=_jobs, columns={"test_entropy": "cross-entropy a frame", "test_entropy_first": "of the first",
                                    "test_entropy_last": "of the last", "test_squared": "squared error a frame"},
               finish=_finish).runner
