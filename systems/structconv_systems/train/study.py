"""Run a recipe: its trainings in order, their evaluation, or a few steps for an estimate."""

from __future__ import annotations

import dataclasses
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
from structconv.commands.table import print_table
from structconv.errors import ConfigError, nearest
from structconv_systems.report.study import group_rows, sentence, study_page
from structconv_systems.train.checkpoint import Checkpoints
from structconv_systems.train.device import factories_on, moved
from structconv_systems.train.effect import NO_BASELINE, Contrast, Effect, interval, mean_and_std
from structconv_systems.train.interrupt import Interrupt
from structconv_systems.train.loop import Schedule, Task, fit
from structconv_systems.train.options import Measured, Trained
from structconv_systems.train.parts import final_evaluation
from structconv_systems.train.progress import Progress
from structconv_systems.train.run import Run
from structconv_systems.train.stopping import Best, Stopping
from structconv_systems.train.task import BatchTask

__all__ = ["Finished", "Job", "Runner", "Study", "Untrained", "fitted_job", "jobs_of", "learning", "loaded", "measured",
           "parameters_of", "train_all", "trained", "tried", "tried_all", "untrained_job"]


@dataclass(frozen=True, kw_only=True)
class Runner:
    """The functions of a recipe's module, as ``RUNNER``.

    Attributes:
        execute: (recipe, run, interrupt, progress) -> summary: run or continue all trainings.
        evaluate: (recipe, run, progress) -> summary: measure the final weights again.
        show: (recipe, summary): print a summary.
        jobs: (recipe, run or None) -> its trainings, with data; `None` if a recipe has no estimate.
        use: (recipe, run, progress) -> what translates or writes by a finished run, if anything.
        report: (recipe, run): write the page of a finished run again; `None` if a recipe has no such page.
    """

    execute: Callable[[Any, Run, Interrupt, Progress], dict[str, Any]]
    evaluate: Callable[[Any, Run, Progress], dict[str, Any]]
    show: Callable[[Any, dict[str, Any]], None]
    jobs: Callable[[Any, Run | None], list[Job]] | None = None
    use: Callable[..., Any] | None = None
    report: Callable[[Any, Run], None] | None = None


@dataclass(frozen=True, kw_only=True)
class Study:
    """A recipe of trainings that each give one figure; those with the same name before the slash are one group.

    Attributes:
        jobs: (recipe, run or None) -> its trainings.
        columns: the figures of the table: their names in `Task.test`, and for people; the first is the headline. The
            first training measures all of them, the others at least the first.
        finish: (recipe, finished) -> more entries of the summary, if any; it may write pictures and samples into the
            run.
        show_more: (recipe, summary): print more than the figures of each group.
        use: see `Runner`.

    Example:

        >>> from structconv_systems.recipes.register import entry_named
        >>> from structconv_systems.train.config import resolve
        >>> architectures = entry_named("architectures")
        >>> recipe = resolve(architectures.recipe, {"seeds": 2}, preset="quick")
        >>> jobs = architectures.runner().jobs(recipe, None)
        >>> len(jobs), jobs[-1].name
        (16, 'attention-near/seed-1')
    """

    jobs: Callable[[Any, Run | None], list[Job]]
    columns: Mapping[str, str]
    finish: Callable[[Any, Finished], dict[str, Any] | None] = lambda recipe, finished: None
    show_more: Callable[[Any, dict[str, Any]], None] = lambda recipe, summary: None
    use: Callable[..., Any] | None = None

    @property
    def runner(self) -> Runner:
        """The recipe's ``RUNNER``."""
        return Runner(execute=self.execute, evaluate=self.evaluate, show=self.show, jobs=self._trainings,
                      use=self.use, report=self.report)

    def execute(self, recipe: Measured, run: Run, interrupt: Interrupt, progress: Progress) -> dict[str, Any]:
        """Train, or continue; return what ``summary.json`` of the run holds."""
        progress.phase("reading the data")
        jobs = self._trainings(recipe, run)
        results = train_all(jobs, run, interrupt, progress, self.columns)
        progress.phase("measuring and drawing what was learned")
        summary = self._summary(recipe, run, results)
        finished = Finished(run=run, jobs=jobs, progress=progress, groups=summary["groups"])
        with final_evaluation():
            summary.update(self.finish(recipe, finished) or {})
        run.write_summary(summary)
        self.report(recipe, run)
        return summary

    def report(self, recipe: Measured, run: Run) -> None:
        """Write ``report.html`` of a finished run, with later evaluations."""
        run.write("report.html", study_page(recipe, run, self.columns))

    def evaluate(self, recipe: Measured, run: Run, progress: Progress) -> dict[str, Any]:
        """Measure the final weights of the run again."""
        progress.phase("reading the data")
        return self._summary(recipe, run, measured(self._trainings(recipe, run), run, progress))

    def show(self, recipe: Measured, summary: dict[str, Any]) -> None:
        """Print the figures of each group, and the effect beside the published one."""
        print_table((recipe.name, *self.columns.values()), group_rows(summary["groups"], self.columns))
        print(f"{sentence(summary['headline'])} Seeds: {recipe.seeds}.")
        print(f"run: {summary['run']}")
        self.show_more(recipe, summary)

    def _trainings(self, recipe: Measured, run: Run | None) -> list[Job]:
        """Return the trainings; `ConfigError` if `rates` names a group that none of them is of."""
        jobs = self.jobs(recipe, run)
        groups = learning(jobs)
        for group in recipe.own_rates if isinstance(recipe, Trained) else ():
            if group not in groups:
                raise ConfigError(recipe.name, "rates must be of groups that learn", repr(group),
                                  nearest(group, groups) or f"Known: {', '.join(groups)}.")
        return jobs

    def _summary(self, recipe: Measured, run: Run, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
        groups: dict[str, list[dict[str, Any]]] = {}
        for name, result in results.items():
            groups.setdefault(_group_of(name), []).append(result)
        table: dict[str, dict[str, dict[str, Any]]] = {
            name: {metric: dict(zip(("mean", "std"), mean_and_std([one[metric] for one in group]), strict=True))
                   for metric in self.columns if metric in group[0]} for name, group in groups.items()}
        return {"recipe": recipe.name, "preset": recipe.preset, "run": str(run.folder), "groups": table,
                "headline": self._headline(recipe, groups), "results": results,
                "seconds": sum(result["seconds"] for result in results.values())}

    def _headline(self, recipe: Measured, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
        """Return the measured effect; for a recipe without a baseline, the first figure."""
        effect = recipe.expected
        if effect is None:
            figure, label = next(iter(self.columns.items()))
            value, low, high = interval([one[figure] for one in next(iter(groups.values()))])
            contrast = Contrast(value=value, low=low, high=high, seeds=recipe.seeds, reason=NO_BASELINE)
            about = {"label": label, "effect": False, "ratio": False, "published_effect": None}
        else:
            contrast = effect.measured(_figures(effect, groups))
            about = {"label": effect.claim, "effect": True, "ratio": effect.ratio, "published_effect": effect.published}
        return {**about, **dataclasses.asdict(contrast), "published": recipe.paper}


def _figures(effect: Effect, groups: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, list[float]]:
    """Return the figures over seeds by the names in the effect's pairs, GROUP or GROUP:FIGURE."""
    values = {}
    for name in {name for pair in effect.pairs for name in pair}:
        group, _, figure = name.partition(":")
        if group in groups:
            values[name] = [one[figure or effect.figure] for one in groups[group]]
    return values


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training by its name in the run: its task, its schedule, and the validation figure that compares learning
    rates; none for models that do not learn by gradients.

    Example:

        >>> from structconv_systems.recipes.register import entry_named
        >>> from structconv_systems.train.config import resolve
        >>> architectures = entry_named("architectures")
        >>> recipe = resolve(architectures.recipe, {"seeds": 2}, preset="quick")
        >>> jobs = architectures.runner().jobs(recipe, None)
        >>> jobs[0].name, jobs[0].schedule().steps
        ('convolution-far/seed-0', 300)
    """

    name: str
    make: Callable[[], Task]
    schedule: Callable[[], Schedule]
    metric: str = ""
    higher: bool = False


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
        """Return the `Task` of the first training of a group, with its chosen weights."""
        return trained(_firsts(self.jobs)[group], self.run, self.progress)

    def tasks(self) -> dict[str, Any]:
        """Return the task of each group."""
        return {group: self.task(group) for group in _firsts(self.jobs)}


def _group_of(name: str) -> str:
    """Return the group of a training named ``group/seed-0``."""
    return name.partition("/")[0]


def _firsts(jobs: Sequence[Job]) -> dict[str, Job]:
    first: dict[str, Job] = {}
    for job in jobs:
        first.setdefault(_group_of(job.name), job)
    return first


def learning(jobs: Sequence[Job]) -> dict[str, Job]:
    """Return the first training of each group that learns by gradients."""
    return {group: job for group, job in _firsts(jobs).items() if job.metric}


def parameters_of(task: Task) -> int:
    """Return the number of learned numbers in the model of a task."""
    return sum(parameter.numel() for parameter in task.model.parameters())


def jobs_of(recipe: Trained, name: str, make: Callable[..., BatchTask], kind: type[BatchTask],
            stopping: Callable[[], Stopping] | None = None) -> list[Job]:
    """Return a training for each seed, ``name/seed-0`` and so on.

    ``make(options, seed=0)`` builds the task, of `kind`, with the options of the group. The weights of the best
    validation are kept, unless `stopping` makes another rule."""
    own, best = recipe.of(name), partial(Best, kind.metric, higher=kind.higher, patience=recipe.patience)

    def schedule(seed: int) -> Schedule:
        return Schedule(steps=recipe.steps, seed=seed, validate_every=recipe.validate_every,
                        checkpoint_every=recipe.checkpoint_every, device=recipe.device, compile=recipe.compile,
                        stopping=(stopping or best)())

    return [Job(name=f"{name}/seed-{seed}", make=partial(make, own, seed=seed), schedule=partial(schedule, seed),
                metric=kind.metric, higher=kind.higher) for seed in range(recipe.seeds)]


def train_all(jobs: Sequence[Job], run: Run, interrupt: Interrupt, progress: Progress, figures: Iterable[str] = ()
              ) -> dict[str, dict[str, Any]]:
    """Run all trainings that are not finished, and return the final figures of each training by name.

    Raises:
        ConfigError: the first training did not measure one of the `figures`, or another one the first of them.
    """
    progress.jobs(len(jobs))
    results, older = {}, False
    needed = every = list(figures)
    for job in jobs:
        result = fit(job.make, job.schedule(), run=run, job=job.name, interrupt=interrupt, progress=progress)
        older = older or not result.keys() >= {*needed}
        if older and not result.keys() >= {*every}:  # finished by a version that measured less
            result |= {**_measured(job, run, progress), "seconds": result["seconds"]}
        results[job.name] = result
        measures = {name: value for name, value in result.items() if isinstance(value, float)}
        if missing := [name for name in needed if name not in measures]:
            raise ConfigError("Study", f"columns must be of what test measures, {', '.join(measures)}",
                              ", ".join(missing))
        needed = needed[:1]
        text = ", ".join(f"{name.removeprefix('test_')} {value:.4g}" for name, value in measures.items()
                          if name != "seconds")
        progress.job_done(f"{job.name}: {text}; {results[job.name]['seconds']:.0f} s")
    return results


def trained(job: Job, run: Run, progress: Progress) -> Any:
    """Return the `Task` of a finished training, with its chosen weights; `ConfigError` if it is not finished.

    Example:

        >>> from tempfile import TemporaryDirectory
        >>> from structconv_systems.recipes.register import entry_named
        >>> from structconv_systems.train.config import resolve
        >>> from structconv_systems.train.progress import Quiet
        >>> from structconv_systems.train.run import Run
        >>> from structconv_systems.train.study import trained
        >>> architectures = entry_named("architectures")
        >>> recipe = resolve(architectures.recipe, preset="quick")
        >>> folder = TemporaryDirectory()
        >>> run = Run.create(f"{folder.name}/architectures", recipe)
        >>> trained(architectures.runner().jobs(recipe, None)[0], run, Quiet())
        Traceback (most recent call last):
        structconv.errors.ConfigError: Checkpoints: the training in ... must be finished; got no final checkpoint...
    """
    task = job.make()
    loaded(task.model, job.name, run, progress, job.schedule().steps)
    return task


def loaded(model: nn.Module, job: str, run: Run, progress: Progress, steps: int) -> nn.Module:
    """Load the weights that a training of `steps` steps chose, for evaluation; `ConfigError` if it has not finished
    them, or if the weights do not fit: options or data of the run were changed."""
    final = Checkpoints(run.checkpoint_folder(job)).final(progress.note)
    if not final.ends(steps):
        raise ConfigError("Run", f"{job} of {run.folder} must be trained to step {steps}", f"step {final.step}",
                          f"Continue it with `structconv resume {run.folder}`.")
    try:
        model.load_state_dict(final.weights)
    except RuntimeError as error:
        raise ConfigError("Run", f"the options and data of {run.folder} must be those that it was trained with", error,
                          "Put them back as they were.") from error
    return model.eval()


def measured(jobs: Sequence[Job], run: Run, progress: Progress) -> dict[str, dict[str, Any]]:
    progress.jobs(len(jobs))
    results = {}
    for job in jobs:
        results[job.name] = _measured(job, run, progress)
        progress.job_done(job.name)
    return results


def _measured(job: Job, run: Run, progress: Progress) -> dict[str, Any]:
    start = time.perf_counter()
    task = trained(job, run, progress)
    with final_evaluation():
        return {**task.test(), "seconds": time.perf_counter() - start}


def tried(job: Job, steps: int = 5) -> dict[str, Any]:
    """Time a few steps; return parameters, flops of a step, seconds of a step and of all, and memory.

    Memory counts weights, gradients, optimizer state, and the tensors stored for the backward pass of a step."""
    schedule = job.schedule()
    task = moved(job.make(), schedule.device)
    kept = _Kept()
    seconds = []
    with factories_on(schedule.device):
        with FlopCounterMode(display=False, custom_mapping=counted()) as counter, kept:
            task.train_step(1)
        if schedule.compile:
            task.compile()
            task.train_step(1)
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
    """Return the result of `tried` for each group with its number of trainings, and the seconds of all."""
    counts = Counter(_group_of(job.name) for job in jobs)
    groups = {group: {**tried(job), "trainings": counts[group]} for group, job in _firsts(jobs).items()}
    return {"trainings": len(jobs), "groups": groups,
            "seconds": sum(row["trainings"] * row["seconds"] for row in groups.values())}


class _Kept(torch.autograd.graph.saved_tensors_hooks):
    """The bytes that autograd stores for the backward pass, each storage once."""

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


class _Nothing:
    """The optimizer of a model without training."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Ignore the state, which is empty."""


class Untrained(Task):
    """A model without training, which is measured as the others are.

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
    """Return the job ``name/once``: one step and a validation; ``val_loss`` must be among the figures."""
    return _job(f"{name}/once", partial(Untrained, model, figures), 0)


def fitted_job(name: str, seed: int, fit: Callable[[], nn.Module],
               figures: Callable[[nn.Module, str], dict[str, float]]) -> Job:
    """Return the job ``name/seed-...`` of a model that `fit` returns fitted; otherwise as `untrained_job`."""
    return _job(f"{name}/seed-{seed}", lambda: Untrained(fit(), figures), seed)


def _job(name: str, make: Callable[[], Task], seed: int) -> Job:
    return Job(name=name, make=make, schedule=lambda: Schedule(steps=1, seed=seed, stopping=Best("val_loss")))
