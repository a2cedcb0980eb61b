"""The trainings of a recipe: done one after the other, measured again, or only tried for a few steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from structconv.analysis.flops import counted
from structconv.train.checkpoint import Checkpoints
from structconv.train.interrupt import Interrupt
from structconv.train.loop import Schedule, Task, fit
from structconv.train.options import Trained
from structconv.train.progress import Progress
from structconv.train.run import Run
from structconv.train.stopping import Best
from structconv.train.summary import mean_and_std
from structconv.train.task import BatchTask

__all__ = ["Job", "headline", "jobs_of", "measured", "train_all", "trained", "tried"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training by its name in the run: what makes the task, and how long it goes on."""

    name: str
    make: Callable[[], Task]
    schedule: Callable[[], Schedule]


def jobs_of(recipe: Trained, name: str, make: Callable[[int], BatchTask], kind: type[BatchTask]) -> list[Job]:
    """A training for each seed, ``name/seed-0`` and so on; `make` builds the task, which is of `kind`, of a seed."""
    def schedule(seed: int) -> Schedule:
        return Schedule(steps=recipe.steps, seed=seed, validate_every=recipe.validate_every,
                        checkpoint_every=recipe.checkpoint_every,
                        stopping=Best(kind.metric, higher=kind.higher, patience=recipe.patience))

    return [Job(name=f"{name}/seed-{seed}", make=partial(make, seed), schedule=partial(schedule, seed))
            for seed in range(recipe.seeds)]


def train_all(jobs: Sequence[Job], run: Run, interrupt: Interrupt, progress: Progress) -> dict[str, dict[str, Any]]:
    """What each training measured in the end, by its name; those that are done already are not done again."""
    progress.jobs(len(jobs))
    results = {}
    for job in jobs:
        results[job.name] = fit(job.make, job.schedule(), run=run, job=job.name, interrupt=interrupt, progress=progress)
        figures = ", ".join(f"{name.removeprefix('test_')} {value:.4g}" for name, value in results[job.name].items()
                            if isinstance(value, float) and name != "seconds")
        progress.job_done(f"{job.name}: {figures}; {results[job.name]['seconds']:.0f} s")
    return results


def trained(job: Job, run: Run, progress: Progress) -> Task:
    """The task of a finished training, with the weights that it chose.

    Raises:
        ConfigError: it is not finished.
    """
    weights = Checkpoints(run.checkpoint_folder(job.name)).final(progress.note).weights
    task = job.make()
    task.model.load_state_dict(weights)
    task.model.eval()
    return task


def measured(jobs: Sequence[Job], run: Run, progress: Progress) -> dict[str, dict[str, Any]]:
    """What each finished training measures, computed anew."""
    progress.jobs(len(jobs))
    results = {}
    for job in jobs:
        start = time.perf_counter()
        results[job.name] = {**trained(job, run, progress).test(), "seconds": time.perf_counter() - start}
        progress.job_done(job.name)
    return results


def headline(recipe: Trained, figure: str, values: Sequence[float]) -> dict[str, Any]:
    """The figure that a recipe is about, over seeds, beside the published one and the recipe's goal."""
    mean, std = mean_and_std(values)
    goal = recipe.goals.get(recipe.preset)
    met = None if goal is None else (mean >= goal if recipe.higher else mean <= goal)
    return {"figure": figure, "mean": mean, "std": std, "seeds": len(values), "goal": goal, "met": met,
            "published": recipe.published, "preset": recipe.preset}


def tried(job: Job, steps: int = 5) -> dict[str, Any]:
    """Parameters, flops of a step, seconds of a step and of the whole, and memory, from a few steps that are timed.

    Memory is that of weights, gradients and optimiser, and of what a backward pass keeps in the step seen.
    """
    task, schedule = job.make(), job.schedule()
    parameters = sum(parameter.numel() for parameter in task.model.parameters())
    kept = _Kept()
    with FlopCounterMode(display=False, custom_mapping=counted()) as counter, kept:
        task.train_step(1)
    seconds = []
    for step in range(2, 2 + steps):
        start = time.perf_counter()
        task.train_step(step)
        seconds.append(time.perf_counter() - start)
    usual = sorted(seconds)[steps // 2]
    weights = sum(p.numel() * p.element_size() for p in task.model.parameters())
    return {"job": job.name, "parameters": parameters, "flops_per_step": counter.get_total_flops(),
            "bytes": 4 * weights + kept.bytes, "seconds_per_step": usual, "steps": schedule.steps,
            "seconds": usual * schedule.steps}


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """The bytes that autograd keeps for backward passes, each storage once."""

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}
        super().__init__(self._pack, lambda tensor: tensor)

    @property
    def bytes(self) -> int:
        return sum(self._sizes.values())

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._sizes[storage.data_ptr()] = storage.nbytes()
        return tensor
