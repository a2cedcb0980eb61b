"""`compare digits`: the same network on the same images through seven bases."""

import copy
import math
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from structconv.analysis.fields import receptive_field
from structconv.analysis.flops import forward_flops
from structconv.commands.table import print_table
from structconv_systems.data.digits import Digits, Split, load_digits
from structconv_systems.models.digits import VARIANTS, PixelNetwork
from structconv_systems.recipes.base import Progress, Run, Schedule, Task, generator
from structconv_systems.recipes.options.images import CompareDigits
from structconv_systems.report.comparison import HEADERS, table_rows, write_report
from structconv_systems.train.effect import mean_and_std
from structconv_systems.train.interrupt import Interrupt
from structconv_systems.train.stopping import BestAccuracy
from structconv_systems.train.study import Job, Runner, measured, train_all, trained

__all__ = ["DigitsTask", "evaluate", "execute", "show"]


class DigitsTask(Task):
    """Classification of the digits; a step is a minibatch, drawn by seed and step alone."""

    def __init__(self, recipe: CompareDigits, digits: Digits, basis: str, seed: int) -> None:
        self.recipe, self.digits, self.seed = recipe, digits, seed
        self.model: nn.Module = network(recipe, digits, basis)
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=recipe.learning_rate)
        self.per_epoch = steps_per_epoch(recipe, digits)
        self.steps = self.per_epoch * recipe.epochs

    def train_step(self, step: int) -> dict[str, float]:
        """Train on one minibatch; the rate rises over a tenth of the steps and falls as a cosine."""
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.recipe.learning_rate * _rate((step - 1) / self.steps)
        epoch, place = divmod(step - 1, self.per_epoch)
        order = torch.randperm(len(self.digits.train), generator=generator(self.seed, epoch), device="cpu")
        chosen = order[place * self.recipe.batch_size:(place + 1) * self.recipe.batch_size]
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(self.digits.train.images[chosen]), self.digits.train.labels[chosen])
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def validate(self) -> dict[str, float]:
        loss, accuracy = measure(self.model, self.digits.validation)
        return {"val_loss": loss, "val_accuracy": accuracy}

    def test(self) -> dict[str, float]:
        return {"test_accuracy": measure(self.model, self.digits.test)[1]}


def network(recipe: CompareDigits, digits: Digits, basis: str) -> PixelNetwork:
    return PixelNetwork(VARIANTS[basis], digits.shape, channels=recipe.channels, classes=digits.num_classes)


def steps_per_epoch(recipe: CompareDigits, digits: Digits) -> int:
    return math.ceil(len(digits.train) / recipe.batch_size)


def measure(model: nn.Module, part: Split) -> tuple[float, float]:
    """Return cross-entropy and accuracy."""
    model.eval()
    with torch.no_grad():
        outputs = model(part.images)
    right = int((outputs.argmax(-1) == part.labels).sum())
    return float(F.cross_entropy(outputs, part.labels)), right / len(part)


def _jobs(recipe: CompareDigits, digits: Digits) -> list[Job]:
    per_epoch = steps_per_epoch(recipe, digits)

    def schedule(seed: int) -> Schedule:
        return Schedule(steps=recipe.epochs * per_epoch, seed=seed, stopping=BestAccuracy(), validate_every=per_epoch,
                        checkpoint_every=5 * per_epoch, device=recipe.device, compile=recipe.compile)

    return [Job(name=f"{basis}/seed-{seed}", make=partial(DigitsTask, recipe, digits, basis, seed),
                schedule=partial(schedule, seed)) for basis in recipe.bases for seed in range(recipe.seeds)]


def execute(recipe: CompareDigits, run: Run, interrupt: Interrupt, progress: Progress) -> dict[str, Any]:
    """Train what is left; then write ``summary.json``, ``pictures/`` and ``report.html``."""
    progress.phase("reading the digits")
    digits = load_digits()
    jobs = _jobs(recipe, digits)
    results = train_all(jobs, run, interrupt, progress)
    progress.phase("drawing pictures and writing report.html")
    summary = run.write_summary(_summary(recipe, run, digits, results))
    firsts = dict(zip(recipe.bases, jobs[::recipe.seeds], strict=True))
    write_report(run, summary, {basis: trained(job, run, progress).model for basis, job in firsts.items()},
                 digits.test.images)
    return summary


def evaluate(recipe: CompareDigits, run: Run, progress: Progress) -> dict[str, Any]:
    """Measure the final weights of the run again."""
    progress.phase("reading the digits")
    digits = load_digits()
    return _summary(recipe, run, digits, measured(_jobs(recipe, digits), run, progress))


def show(recipe: CompareDigits, summary: dict[str, Any]) -> None:
    """Print the table and the path of the report."""
    print_table(HEADERS, table_rows(summary), title=f"8x8 digits, {recipe.seeds} seeds")
    print(f"report: {summary['run']}/report.html")


def _summary(recipe: CompareDigits, run: Run, digits: Digits, results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    bases = {}
    for basis in recipe.bases:
        outcomes = [results[f"{basis}/seed-{seed}"] for seed in range(recipe.seeds)]
        model = network(recipe, digits, basis)
        accuracies = [100 * outcome["test_accuracy"] for outcome in outcomes]
        mean, std = mean_and_std(accuracies)
        bases[basis] = {
            "title": VARIANTS[basis].title, "test_accuracy_mean": mean, "test_accuracy_std": std,
            "test_accuracies": accuracies, "parameters": sum(p.numel() for p in model.parameters()),
            "flops": forward_flops(model, digits.test.images[:1]), "seconds": sum(o["seconds"] for o in outcomes),
            "receptive_field": _field(model, digits), "pixels": math.prod(digits.shape)}
    return {"recipe": recipe.name, "seeds": recipe.seeds, "bases": bases, "run": str(run.folder),
            "seconds": sum(entry["seconds"] for entry in bases.values())}


def _field(model: PixelNetwork, digits: Digits) -> int:
    smooth = copy.deepcopy(model).double()
    return receptive_field(lambda x: smooth.entries(x[None], smooth=True)[0], digits.test.images[0].double())


def _rate(done: float) -> float:
    """Return the share of the peak learning rate after a share `done` of the steps."""
    return done / 0.1 if done < 0.1 else 0.5 + 0.5 * math.cos(math.pi * (done - 0.1) / 0.9)


RUNNER = Runner(execute=execute, evaluate=evaluate, show=show)
