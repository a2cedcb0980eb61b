"""What a recipe does: its trainings one after the other, their figures again, or only a few steps as a try."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from structconv.analysis.flops import counted
from structconv.commands.table import number, print_table
from structconv.errors import ConfigError
from structconv_systems.report.study import study_page
from structconv_systems.train.checkpoint import Checkpoints
from structconv_systems.train.interrupt import Interrupt
from structconv_systems.train.loop import Schedule, Task, fit
from structconv_systems.train.options import Measured, Trained
from structconv_systems.train.progress import Progress
from structconv_systems.train.run import Run
from structconv_systems.train.stopping import Best, Stopping
from structconv_systems.train.summary import mean_and_std, with_spread
from structconv_systems.train.task import BatchTask

__all__ = ["Finished", "Job", "Runner", "Study", "against", "jobs_of", "loaded", "measured", "parameters_of",
           "train_all", "trained", "tried", "tried_all"]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """What the module of a recipe offers, as ``RUNNER``.

    Attributes:
        execute: (recipe, run, interrupt, progress) -> summary: do, or continue, all the trainings of a run.
        evaluate: (recipe, run, progress) -> summary: measure the final weights of a run again.
        show: (recipe, summary): print a summary for people.
        jobs: (recipe, run or None) -> its trainings, data read; `None` of a recipe that cannot be tried.
        use: (recipe, run, progress) -> what a finished run translates or writes with; `None` where it is for neither.
    """

    execute: Callable[[Any, Run, Interrupt, Progress], dict[str, Any]]
    evaluate: Callable[[Any, Run, Progress], dict[str, Any]]
    show: Callable[[Any, dict[str, Any]], None]
    jobs: Callable[[Any, Run | None], list[Job]] | None = None
    use: Callable[..., Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Study:
    """A recipe whose trainings each give one figure; those whose names begin alike are one group.

    Attributes:
        jobs: (recipe, run or None) -> its trainings.
        columns: the figures of the table, by their names in what `Task.test` measures their names for people; the first
            is the one the recipe is about.
        contrast: (mean by group) -> the headline figure, or None where its groups were left out, and its name; where
            absent that of the first group.
        finish: (recipe, finished) -> what else the summary says; it may write pictures and samples into the run.
        use: see `Runner`.
    """

    jobs: Callable[[Any, Run | None], list[Job]]
    columns: Mapping[str, str]
    contrast: tuple[Callable[[dict[str, float]], float | None], str] | None = None
    finish: Callable[[Any, Finished], dict[str, Any]] = lambda recipe, finished: {}
    use: Callable[..., Any] | None = None

    @property
    def runner(self) -> Runner:
        """What a recipe's module offers as ``RUNNER``."""
        return Runner(execute=self.execute, evaluate=self.evaluate, show=self.show, jobs=self.jobs, use=self.use)

    def execute(self, recipe: Measured, run: Run, interrupt: Interrupt, progress: Progress) -> dict[str, Any]:
        """Train, or continue; the run's ``summary.json`` holds what is returned."""
        progress.phase("reading the data")
        jobs = self.jobs(recipe, run)
        results = train_all(jobs, run, interrupt, progress, self.columns)
        progress.phase("measuring and drawing what was learnt")
        summary = self._summary(recipe, run, results)
        finished = Finished(run=run, jobs=jobs, progress=progress, groups=summary["groups"])
        summary.update(self.finish(recipe, finished))
        table = self._table(recipe, summary)
        run.write("report.html", study_page(recipe.name, summary["headline"], *table, run.folder))
        return run.write_summary(summary)

    def evaluate(self, recipe: Measured, run: Run, progress: Progress) -> dict[str, Any]:
        """The figures of the run's final weights, computed anew."""
        progress.phase("reading the data")
        return self._summary(recipe, run, measured(self.jobs(recipe, run), run, progress))

    def show(self, recipe: Measured, summary: dict[str, Any]) -> None:
        """Print the figures of each group, and the headline beside the published figure."""
        head = summary["headline"]
        print_table(*self._table(recipe, summary))
        goal = f"; goal of preset {recipe.preset}: {head['goal']}, {'met' if head['met'] else 'not met'}"
        print(f"{head['label']}: {number(head['value'])}; seeds: {recipe.seeds}; published: {recipe.paper}"
              + (goal if head["goal"] is not None else ""))
        print(f"run: {summary['run']}")

    def _table(self, recipe: Measured, summary: dict[str, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """A head, and a row a group."""
        return (recipe.name, *self.columns.values()), [
            (name, *(with_spread(**group[metric]) for metric in self.columns))
            for name, group in summary["groups"].items()]

    def _summary(self, recipe: Measured, run: Run, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, result in results.items():
            groups.setdefault(_group_of(name), []).append(result)
        table: dict[str, dict[str, dict[str, Any]]] = {
            name: {metric: dict(zip(("mean", "std"), mean_and_std([one[metric] for one in group]), strict=True))
                   for metric in self.columns} for name, group in groups.items()}
        first = next(iter(self.columns))
        means = {name: row[first]["mean"] for name, row in table.items()}
        contrast, label = self.contrast or (lambda means: next(iter(means.values())), self.columns[first])
        value = contrast(means)
        return {"recipe": recipe.name, "preset": recipe.preset, "run": str(run.folder), "groups": table,
                "headline": {"label": label, "value": value, **against(recipe, value)}, "results": results,
                "seconds": sum(result["seconds"] for result in results.values())}


def against(recipe: Measured, value: float | None) -> dict[str, Any]:
    """The recipe's goal, whether it is met, and the published figure."""
    goal, met = recipe.goal, None
    if goal is not None and value is not None:
        met = value >= goal if recipe.higher else value <= goal
    return {"goal": goal, "met": met, "published": recipe.paper}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training by its name in the run: what makes the task, and how long it goes on."""

    name: str
    make: Callable[[], Task]
    schedule: Callable[[], Schedule]


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run whose trainings are done.

    Attributes:
        groups: by group and figure its ``mean`` and ``std`` over seeds.
    """

    run: Run
    jobs: Sequence[Job]
    progress: Progress
    groups: Mapping[str, Mapping[str, Mapping[str, float]]]

    def task(self, group: str) -> Any:
        """The `Task` of the first training of a group, with the weights that it chose."""
        return trained(_firsts(self.jobs)[group], self.run, self.progress)

    def tasks(self) -> dict[str, Any]:
        """That of each group."""
        return {group: self.task(group) for group in _firsts(self.jobs)}


def _group_of(name: str) -> str:
    """The group of a training by its name, ``group/seed-0``."""
    return name.partition("/")[0]


def _firsts(jobs: Sequence[Job]) -> dict[str, Job]:
    """The first training of each group."""
    found: dict[str, Job] = {}
    for job in jobs:
        found.setdefault(_group_of(job.name), job)
    return found


def parameters_of(task: Task) -> int:
    """How many numbers its model learns."""
    return sum(parameter.numel() for parameter in task.model.parameters())


def jobs_of(recipe: Trained, name: str, make: Callable[[int], BatchTask], kind: type[BatchTask],
            stopping: Callable[[], Stopping] | None = None) -> list[Job]:
    """A training for each seed, ``name/seed-0`` and so on; `make` builds the task, which is of `kind`, of a seed. The
    weights of its best validation are kept, unless another rule is made by `stopping`."""
    best = partial(Best, kind.metric, higher=kind.higher, patience=recipe.patience)

    def schedule(seed: int) -> Schedule:
        return Schedule(steps=recipe.steps, seed=seed, validate_every=recipe.validate_every,
                        checkpoint_every=recipe.checkpoint_every, stopping=(stopping or best)())

    return [Job(name=f"{name}/seed-{seed}", make=partial(make, seed), schedule=partial(schedule, seed))
            for seed in range(recipe.seeds)]


def train_all(jobs: Sequence[Job], run: Run, interrupt: Interrupt, progress: Progress, figures: Iterable[str] = ()
              ) -> dict[str, dict[str, Any]]:
    """What each training measured in the end, by its name; those that are done already are not done again.

    Raises:
        ConfigError: one of the `figures` is not among what was measured.
    """
    progress.jobs(len(jobs))
    results = {}
    for job in jobs:
        results[job.name] = fit(job.make, job.schedule(), run=run, job=job.name, interrupt=interrupt, progress=progress)
        measures = {name: value for name, value in results[job.name].items() if isinstance(value, float)}
        if missing := [name for name in figures if name not in measures]:
            raise ConfigError("Study", f"columns must be of what test measures, {', '.join(measures)}",
                              ", ".join(missing))
        found = ", ".join(f"{name.removeprefix('test_')} {value:.4g}" for name, value in measures.items()
                          if name != "seconds")
        progress.job_done(f"{job.name}: {found}; {results[job.name]['seconds']:.0f} s")
    return results


def trained(job: Job, run: Run, progress: Progress) -> Any:
    """The `Task` of a finished training, with the weights that it chose; `ConfigError` if it is not finished."""
    task = job.make()
    loaded(task.model, job.name, run, progress)
    return task


def loaded(model: nn.Module, job: str, run: Run, progress: Progress) -> nn.Module:
    """A model with the weights that a training chose, for evaluation; `ConfigError` if it is not finished, or if these
    are the weights of another model: the run's options or data were changed since."""
    weights = Checkpoints(run.checkpoint_folder(job)).final(progress.note).weights
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        raise ConfigError("Run", f"the options and data of {run.folder} must be those that it was trained with", error,
                          "Put them back as they were.") from error
    return model.eval()


def measured(jobs: Sequence[Job], run: Run, progress: Progress) -> dict[str, dict[str, Any]]:
    """What each finished training measures, computed anew."""
    progress.jobs(len(jobs))
    results = {}
    for job in jobs:
        start = time.perf_counter()
        results[job.name] = {**trained(job, run, progress).test(), "seconds": time.perf_counter() - start}
        progress.job_done(job.name)
    return results


def tried(job: Job, steps: int = 5) -> dict[str, Any]:
    """Parameters, flops of a step, seconds of a step and of the whole, and memory, from a few steps that are timed.

    Memory is that of weights, gradients and optimiser, and of what a backward pass keeps in the step seen.
    """
    task, schedule = job.make(), job.schedule()
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
    return {"job": job.name, "parameters": parameters_of(task), "flops_per_step": counter.get_total_flops(),
            "bytes": 4 * weights + kept.bytes, "seconds_per_step": usual, "steps": schedule.steps,
            "seconds": usual * schedule.steps}


def tried_all(jobs: Sequence[Job]) -> dict[str, Any]:
    """What `tried` says of the first training of each group, by group, how many trainings a group has, and the seconds
    of all of them."""
    counts = Counter(_group_of(job.name) for job in jobs)
    groups = {group: {**tried(job), "trainings": counts[group]} for group, job in _firsts(jobs).items()}
    return {"trainings": len(jobs), "groups": groups,
            "seconds": sum(row["trainings"] * row["seconds"] for row in groups.values())}


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
