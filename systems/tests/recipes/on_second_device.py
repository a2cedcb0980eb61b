"""The trainings of a finished run on a second device: `python -m systems.tests.recipes.on_second_device RUN`.

Each kind of training does a step and is validated and tested there, and on the CPU; prints what fails or differs.
"""

import dataclasses
import sys
from functools import partial
from typing import Any

import torch

from structconv_systems.recipes.register import recipe_of
from structconv_systems.train import device as devices
from structconv_systems.train.loop import seed_everything
from structconv_systems.train.parts import final_evaluation
from structconv_systems.train.run import Run
from structconv_systems.train.study import Job
from tests.support import second_device


def figures(job: Job, device: str) -> dict[str, float]:
    """What a training measures after a step on a device."""
    seed_everything(0)
    task = devices.moved(job.make(), device)
    seed_everything(1)
    with devices.factories_on(device):
        measured = {**task.train_step(1), **task.validate()}
        with final_evaluation():
            return {**measured, **task.test()}


def check(job: Job) -> None:
    """Raise `AssertionError` if a figure on the second device differs from that on the CPU by more than rounding."""
    torch.testing.assert_close(figures(job, second_device.DEVICE), figures(job, "cpu"), rtol=1e-3, atol=1e-3,
                               equal_nan=True)


def jobs_of_run(folder: str) -> dict[str, Job]:
    """The first training of each kind that runs on the device."""
    run = Run.open(folder)
    entry, recipe = recipe_of(run)
    chosen: Any = dataclasses.replace(recipe, device="cuda")
    first: dict[str, Job] = {}
    for job in entry.runner().jobs(chosen, run):
        if job.schedule().device == "cuda":
            first.setdefault(job.name.partition("/")[0], job)
    return first


if __name__ == "__main__":
    second_device.report({name: partial(check, job) for name, job in jobs_of_run(sys.argv[1]).items()})
