"""Training by gradients on batches: a recipe defines the loss of a batch and the figures of its data."""

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from structconv.errors import ConfigError
from structconv_systems.train.batches import Batches, Windows
from structconv_systems.train.loop import Task
from structconv_systems.train.optimization import Optimization
from structconv_systems.train.options import Trained

__all__ = ["BatchTask", "mean_loss"]


class BatchTask(Task):
    """A task whose step is a batch, or `options.accumulate` of them.

    Args:
        model: what is trained.
        options: how.
        batches: which samples a step sees.

    Example:

        >>> from structconv_systems.train.batches import Batches
        >>> from structconv_systems.train.options import Trained
        >>> from structconv_systems.train.task import BatchTask
        >>> class Line(Trained):
        ...     name = "line"
        >>> class LineTask(BatchTask):                     # y = 3 x
        ...     metric, higher = "val_loss", False
        ...     def __init__(self):
        ...         self.x = torch.linspace(-1, 1, 40).unsqueeze(-1)
        ...         super().__init__(torch.nn.Linear(1, 1), Line(learning_rate=0.1), Batches([1] * 40, cost=10, seed=0))
        ...     def loss(self, samples):
        ...         error = self.model(self.x[samples]) - 3 * self.x[samples]
        ...         return error.square().sum(), float(len(samples))
        ...     def figures(self, part):
        ...         return {f"{part}_loss": (self.model(self.x) - 3 * self.x).square().mean().item()}
        >>> task = LineTask()
        >>> before = task.figures("val")["val_loss"]
        >>> for number in range(1, 51):
        ...     _ = task.train_step(number)
        >>> task.figures("val")["val_loss"] < before
        True
    """

    #: The validation figure by which weights are chosen, and whether a greater one is better.
    metric: ClassVar[str] = "val_loss"
    higher: ClassVar[bool] = False

    def __init__(self, model: nn.Module, options: Trained, batches: Batches | Windows) -> None:
        self.model, self.options, self.batches = model, options, batches
        self.optimizer = Optimization(model, options, higher=self.higher)

    @abc.abstractmethod
    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        """The sum of the losses of these training samples, and the number (of tokens, say) to divide it by."""

    @abc.abstractmethod
    def figures(self, part: str) -> dict[str, float]:
        """Measure ``val`` or ``test``, with names that begin with it; the model is in evaluation mode."""

    def split(self, samples: Sequence[int]) -> Sequence[Sequence[int]]:
        """Split a batch into parts whose losses are computed one by one, and their gradients summed; one by default."""
        return [samples]

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def train_step(self, step: int) -> dict[str, float]:
        self.model.train()
        return self.optimizer.step(step, self._losses(step))

    def validate(self) -> dict[str, float]:
        with self.optimizer.averaged():
            figures = self._measured("val")
        self.optimizer.validated(figures[self.metric])
        return figures

    def test(self) -> dict[str, float]:
        return self._measured("test")

    def weights(self) -> dict[str, Tensor]:
        with self.optimizer.averaged():
            return super().weights()

    def _losses(self, step: int) -> Iterator[tuple[Tensor, float]]:
        for place in range(self.options.accumulate):
            for samples in self.split(self.batches.at((step - 1) * self.options.accumulate + place + 1)):
                with torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.precision == "bfloat16"):
                    loss = self.loss(samples)
                yield loss

    @torch.no_grad()
    def _measured(self, part: str) -> dict[str, float]:
        self.model.eval()
        return self.figures(part)


def mean_loss(losses: Iterable[tuple[Tensor, float]]) -> float:
    """Return the mean of `BatchTask.loss` over all batches; `ConfigError` if the count is 0."""
    total, count = 0.0, 0.0
    for loss, weight in losses:
        total, count = total + loss.item(), count + weight
    if not count:
        raise ConfigError("mean_loss", "there must be something to measure", "nothing")
    return total / count
