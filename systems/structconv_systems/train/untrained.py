"""Baselines without training: the last value, the mean."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from structconv_systems.train.loop import Schedule, Task
from structconv_systems.train.stopping import Best
from structconv_systems.train.study import Job

__all__ = ["Untrained", "fitted_job", "untrained_job"]


class _Nothing:
    """The optimizer of what is not trained."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state, which is empty."""


class Untrained(Task):
    """A model without parameters, which is measured as the others are.

    Args:
        model: the model. figures: (model, ``val`` or ``test``) -> what is measured.
    """

    def __init__(self, model: nn.Module, figures: Callable[[nn.Module, str], dict[str, float]]) -> None:
        self.model, self.optimizer, self._figures = model.eval(), _Nothing(), figures

    def train_step(self, step: int) -> dict[str, float]:
        return {}

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        return self._figures(self.model, "val")

    @torch.no_grad()
    def test(self) -> dict[str, float]:
        return self._figures(self.model, "test")


def untrained_job(name: str, model: nn.Module, figures: Callable[[nn.Module, str], dict[str, float]]) -> Job:
    """The job ``name/once``, of one step, after which it is validated; ``val_loss`` must be among the figures."""
    return _job(f"{name}/once", partial(Untrained, model, figures), 0)


def fitted_job(name: str, seed: int, fit: Callable[[], nn.Module],
               figures: Callable[[nn.Module, str], dict[str, float]]) -> Job:
    """The job ``name/seed-...`` of a model that `fit` returns fitted, with the training and validation parts of its
    seed; otherwise as `untrained_job`."""
    return _job(f"{name}/seed-{seed}", lambda: Untrained(fit(), figures), seed)


def _job(name: str, make: Callable[[], Task], seed: int) -> Job:
    return Job(name=name, make=make, schedule=lambda: Schedule(steps=1, seed=seed, stopping=Best("val_loss")))
