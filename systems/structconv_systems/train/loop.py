"""The one training loop: steps, validation, stopping, checkpoints, interruption and exact resumption."""

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from structconv.errors import ConfigError
from structconv_systems.train.checkpoint import Checkpoint, Checkpoints
from structconv_systems.train.device import compiled, factories_on, moved
from structconv_systems.train.interrupt import Diverged, Interrupt, Interrupted
from structconv_systems.train.parts import Parts, final_evaluation
from structconv_systems.train.progress import Progress
from structconv_systems.train.run import Run
from structconv_systems.train.stopping import Stopping

__all__ = ["Schedule", "Stateful", "Task", "capture_generators", "fit", "restore_generators", "seed_everything"]


#: The number of consecutive steps that are not finite which ends a training.
_MOST_BROKEN = 10


class Stateful(Protocol):
    """An object with a state beside the model's: a tree of dictionaries, lists, scalars and tensors."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Task(Protocol):
    """A training task: a model, its optimizer, and three functions that return measurements by name.

    A checkpoint holds the `state_dict` of the model and of the optimizer, and the states of Python's, numpy's and
    torch's global generators. All else that a step depends on must follow from its number, or be part of the
    optimizer's state. Then a resumed training equals one that was not interrupted.

    Example:

        >>> from structconv_systems.recipes.register import entry_named
        >>> from structconv_systems.train.config import resolve
        >>> pooling = entry_named("pooling")
        >>> task = pooling.runner().jobs(resolve(pooling.recipe, preset="quick"), None)[0].make()
        >>> task.train_step(1).keys()
        dict_keys(['loss'])
    """

    model: nn.Module
    optimizer: Optimizer | Stateful

    def train_step(self, step: int) -> dict[str, float]:
        """Do step number `step`, from 1. Data order must depend on `step` and on the global generators only."""

    def validate(self) -> dict[str, float]:
        """Measure the current weights, for example ``val_loss``."""

    def test(self) -> dict[str, float]:
        """The figures of the chosen weights, ``test_accuracy`` say."""

    def compile(self) -> None:
        """Compile what training calls: the model, for inputs of any size, with the random numbers of eager mode."""
        compiled(self.model)

    def weights(self) -> dict[str, Tensor]:
        """A copy of the weights that were validated."""
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The schedule of a training: at most `steps` steps, with regular validation and checkpoints.

    Attributes:
        steps: greatest number of steps. seed: seed of Python's, numpy's and torch's global generators when the task is
            built.
        stopping: a rule of `structconv_systems.train.stopping`, which decides after each validation whether to store
            the weights and whether to stop; a new one for each training. If it stores none, the last weights are the
            result.
        validate_every: number of steps between validations; the last step is validated too.
        checkpoint_every: number of steps between checkpoints.
        device: where the task is trained and tested; it is made on the CPU, so that its first weights are the same.
        compile: whether the model is compiled (`Task.compile`).

    Example:

        >>> from structconv_systems.train.loop import Schedule
        >>> from structconv_systems.train.stopping import Best
        >>> schedule = Schedule(steps=200, seed=0, validate_every=10, stopping=Best("val_loss", patience=3))
        >>> schedule.steps, schedule.checkpoint_every
        (200, 100)
    """

    steps: int
    seed: int
    stopping: Stopping
    validate_every: int = 1
    checkpoint_every: int = 100
    device: str = "cpu"
    compile: bool = False


@dataclass
class _Training:
    """The state of one training that a checkpoint holds.

    The last `broken` steps were not finite. It is `lost` if they still are, the last measurement is not finite, and no
    weights were kept before."""

    task: Task
    schedule: Schedule
    step: int = 0
    stopped: bool = False
    lost: bool = False
    broken: int = 0
    seconds: float = 0.0
    best: dict[str, Tensor] | None = None
    clock: float = field(default_factory=time.perf_counter)

    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.clock

    def checkpoint(self) -> Checkpoint:
        state = {"optimizer": self.task.optimizer.state_dict(), "generators": capture_generators(),
                 "stopping": self.schedule.stopping.state(), "best": self.best, "stopped": self.stopped,
                 "lost": self.lost, "broken": self.broken, "seconds": self.elapsed()}
        return Checkpoint(step=self.step, weights=self.task.model.state_dict(), state=state)

    def restore(self, checkpoint: Checkpoint) -> None:
        state = checkpoint.state
        try:
            self.task.model.load_state_dict(checkpoint.weights)
            self.task.optimizer.load_state_dict(state["optimizer"])
            self.schedule.stopping.load(state["stopping"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError("resume", "options and data must be those that the checkpoint was trained with", error,
                              "Put them back as they were.") from error
        self.step, self.stopped, self.best = checkpoint.step, state["stopped"], state["best"]
        self.lost, self.broken = state.get("lost", False), state.get("broken", 0)
        self.seconds, self.clock = state["seconds"], time.perf_counter()
        restore_generators(state["generators"])

    def advance(self) -> dict[str, float]:
        """Do one step, and validate if it is due."""
        self.step += 1
        metrics = self.task.train_step(self.step)
        self.broken = 0 if _finite(metrics) and "skipped" not in metrics else self.broken + 1
        if self.broken == _MOST_BROKEN:
            raise Diverged(f"step {self.step}: the loss or its gradient was not finite in {_MOST_BROKEN} steps in a "
                           "row; the last checkpoint is kept. Start anew with a lower learning_rate or clip.")
        if self.step % self.schedule.validate_every == 0 or self.step == self.schedule.steps:
            metrics = {**metrics, **self.task.validate()}
            verdict = self.schedule.stopping.update(metrics)
            self.stopped = verdict.stop
            if verdict.keep:
                self.best = self.task.weights()
        self.lost = self.best is None and self.broken > 0 and not _finite(metrics)
        return metrics


def _finite(metrics: Mapping[str, float]) -> bool:
    return all(map(math.isfinite, metrics.values()))


def fit(make: Callable[[], Task], schedule: Schedule, *, run: Run, job: str, interrupt: Interrupt,
        progress: Progress) -> dict[str, Any]:
    """Train until the schedule or its stopping rule ends it, and return the result of the chosen weights.

    A training that has a checkpoint in the run continues from it; on a CPU, with as many threads as before, the
    weights become bit for bit those of an uninterrupted one. A finished one returns its recorded result, unless the
    schedule has more steps now and no rule stopped it: then it goes on from its last weights.

    Args:
        make: builds the task; called after the generators are seeded.
        schedule: its stopping rule must be a fresh one.
        run: where metrics and checkpoints go, under the name `job`.
        job: the training's name in the run, ``"shifts/seed-0"``.
        interrupt: looked at after each step.
        progress: where the user sees it.

    Returns:
        What `Task.test` measured, with ``steps`` done and ``seconds`` spent training, and the ``split`` of its data.

    Raises:
        Interrupted: `interrupt` was requested; the state is saved.
        Diverged: losses were not finite; the checkpoint before stays.

    Example:

        >>> from tempfile import TemporaryDirectory
        >>> from structconv_systems.recipes.register import entry_named
        >>> from structconv_systems.train.config import resolve
        >>> from structconv_systems.train.interrupt import Interrupt
        >>> from structconv_systems.train.loop import fit
        >>> from structconv_systems.train.progress import Quiet
        >>> from structconv_systems.train.run import Run
        >>> folder, pooling = TemporaryDirectory(), entry_named("pooling")
        >>> recipe = resolve(pooling.recipe, {"steps": 5})
        >>> run, job = Run.create(f"{folder.name}/run", recipe), pooling.runner().jobs(recipe, None)[0]
        >>> result = fit(job.make, job.schedule(), run=run, job=job.name, interrupt=Interrupt(), progress=Quiet())
        >>> result["steps"], "test_accuracy" in result
        (5, True)
    """
    checkpoints = Checkpoints(run.checkpoint_folder(job))
    saved = checkpoints.latest(progress.note)
    finished = saved is not None and saved.final
    if saved is not None and finished:
        if saved.ends(schedule.steps):
            return saved.state["result"]
        saved = _reopened(saved)
    seed_everything(schedule.seed)
    training = _Training(task=moved(make(), schedule.device), schedule=schedule)
    if schedule.compile:
        training.task.compile()
    if saved is not None:
        training.restore(saved)
        if finished:
            checkpoints.save(saved)
    if (missing := training.step - run.metrics.truncate(job, training.step)):
        progress.note(f"{job}: {missing} of {training.step} steps are not in {run.metrics.path}")
    progress.job(job, schedule.steps)
    with factories_on(schedule.device):
        with _events(run.folder / "events" / job, training.step) as note:
            _go_on(training, checkpoints, run=run, job=job, interrupt=interrupt, progress=progress, note=note)
        return _finish(training, checkpoints, run)


def _go_on(training: _Training, checkpoints: Checkpoints, *, run: Run, job: str, interrupt: Interrupt,
           progress: Progress, note: Callable[[int, dict[str, float]], None]) -> None:
    """Do all steps that are left."""
    schedule = training.schedule
    shown: dict[str, float] = {}
    while training.step < schedule.steps and not training.stopped:
        metrics = training.advance()
        run.metrics.append(job, training.step, metrics)
        note(training.step, metrics)
        shown |= metrics
        if "skipped" in metrics:
            progress.note(f"{job}: step {training.step} was skipped, for its loss or gradient was not finite")
        progress.advance(training.step, shown)
        if interrupt.requested or training.step % schedule.checkpoint_every == 0:
            run.metrics.flush()
            checkpoints.save(training.checkpoint())
        if interrupt.requested:
            raise Interrupted(f"{job}: stopped after step {training.step}")
    if training.lost:
        raise Diverged(f"{job}: the last steps were not finite, and no validation before them; the last checkpoint is "
                       "kept. Start anew with a lower learning_rate or clip.")


def _reopened(finished: Checkpoint) -> Checkpoint:
    """Return the checkpoint as it was before the weights were chosen; `ConfigError` if its last weights are missing."""
    state = finished.state
    if "last" not in state:
        raise ConfigError("resume", "a training that is to go on must have its last weights", "the chosen ones alone",
                          "An earlier version finished it: begin a new run.")
    best = finished.weights if state["chosen"] else None
    return Checkpoint(step=finished.step, weights=state["last"], state={**state, "best": best, "last": None})


def _finish(training: _Training, checkpoints: Checkpoints, run: Run) -> dict[str, Any]:
    """Test the chosen weights, and save them with the last ones, from which the training can go on."""
    task, last = training.task, training.checkpoint()
    weights = {name: value.clone() for name, value in last.weights.items()}
    task.model.load_state_dict(task.weights() if training.best is None else training.best)
    with final_evaluation():
        tested = task.test()
    result = {**tested, "steps": training.step, "seconds": last.state["seconds"]}
    parts = getattr(task, "parts", None)
    if isinstance(parts, Parts) and parts:  # a user's task may have none, or parts of another kind
        result["split"] = parts.sizes
    run.metrics.flush()
    state = {**last.state, "best": None, "chosen": training.best is not None, "last": weights, "result": result}
    checkpoints.save(Checkpoint(step=training.step, weights=task.model.state_dict(), state=state, final=True))
    return result


@contextmanager
def _events(folder: Path, after: int) -> Iterator[Callable[[int, dict[str, float]], None]]:
    """Yield a function that writes measurements of a step for TensorBoard, if installed; later steps are replaced."""
    if not find_spec("tensorboard"):
        yield lambda step, values: None
        return
    from torch.utils.tensorboard import SummaryWriter

    def written(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)

    with SummaryWriter(str(folder), purge_step=after + 1) as writer:
        yield written


def seed_everything(seed: int) -> None:
    """Seed Python's, numpy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def capture_generators() -> dict[str, Any]:
    """Return the states of Python's, numpy's and torch's global generators, as a tree for `pack`."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    state = {"python": random.getstate(), "torch": torch.get_rng_state(),
             "numpy": {"keys": torch.from_numpy(np.asarray(keys).astype("int64")), "position": int(position),
                       "has_gauss": int(has_gauss), "gauss": float(gauss)}}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    if torch.backends.mps.is_available():
        state["mps"] = torch.mps.get_rng_state()
    return state


def restore_generators(state: dict[str, Any]) -> None:
    """Invert `capture_generators`; generators of absent devices stay unchanged."""
    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    numpy_state = state["numpy"]
    np.random.set_state(("MT19937", numpy_state["keys"].numpy().astype("uint32"), numpy_state["position"],
                         numpy_state["has_gauss"], numpy_state["gauss"]))
    if "cuda" in state and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
    if "mps" in state and torch.backends.mps.is_available():
        torch.mps.set_rng_state(state["mps"])
