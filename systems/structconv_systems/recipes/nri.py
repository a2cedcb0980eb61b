"""Neural relational inference (Kipf et al. 2018): which bodies act on which, without being told, beside an encoder that
is told and beside correlations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.commands.table import print_table
from structconv.structures import Graph
from structconv_systems import scenes
from structconv_systems.data.physics import SYSTEMS, Simulations
from structconv_systems.models.nri import Correlation, Encoder, RelationalInference
from structconv_systems.recipes.options import physics as options
from structconv_systems.train.batches import Batches
from structconv_systems.train.parts import Parts
from structconv_systems.train.run import Run
from structconv_systems.train.study import Finished, Job, Study, jobs_of
from structconv_systems.train.task import BatchTask
from structconv_systems.train.untrained import untrained_job

__all__ = ["RUNNER", "Motion", "SupervisedTask", "UnsupervisedTask", "network"]

_ALONE, _TOLD, _CORRELATION = "unsupervised", "supervised", "correlation"
_PARTS = ("train", "val", "test")
#: Simulations measured at a time.
_MANY = 256
_DRAWN = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Motion:
    """Simulations in three parts, in units of the greatest position, velocity or other channel that trains.

    Attributes:
        states: by part, (S, T, N, C); of ``test`` 2 T. graph: of all pairs. types: by part, (S, E), 1 where a pair is
            joined, or, of charges, alike.
    """

    recipe: options.RelationalInference
    states: Parts[Tensor]
    types: Parts[Tensor]
    graph: Graph
    scale: Tensor

    @classmethod
    def simulated(cls, recipe: options.RelationalInference) -> Motion:
        """Those of the recipe, by the seeds 0, 1 and 2."""
        system, graph = SYSTEMS[recipe.system](bodies=recipe.bodies), Graph.complete(recipe.bodies)
        parts = {part: system.simulate(recipe.samples if part == "train" else recipe.held_out,
                                       recipe.times * (2 if part == "test" else 1), seed=seed)
                 for seed, part in enumerate(_PARTS)}
        scale = _scale(recipe, parts["train"])
        return cls(recipe=recipe, graph=graph, scale=scale,
                   states=Parts({part: found.states / scale for part, found in parts.items()}),
                   types=Parts({part: (found.couplings[:, graph.source, graph.target] > 0).long()
                                for part, found in parts.items()}))

    def mirrored(self, states: Tensor) -> Tensor:
        """Each simulation (B, T, N, 4) turned by quarters and mirrored at random: x, y exchanged, or a sign."""
        count = len(states)
        signs = torch.randint(2, (count, 1, 1, 1, 2)) * 2.0 - 1
        turned = states.unflatten(-1, (2, 2)) * signs
        return torch.where(torch.rand(count, 1, 1, 1, 1) < 0.5, turned.flip(-1), turned).flatten(-2)

    def training(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """States and types of some simulations."""
        chosen = torch.tensor(samples)
        states = self.states["train"][chosen]
        mirrored = self.recipe.mirrored and self.recipe.system != "kuramoto"
        return self.mirrored(states) if mirrored else states, self.types["train"][chosen]

    def logits(self, encoder: nn.Module, part: str, first: int = 0) -> Tensor:
        """What an encoder finds in the T states from `first` on, (S, E, K)."""
        seen = self.states[part][:, first:first + self.recipe.times]
        return torch.cat([encoder(states, self.graph) for states in seen.split(_MANY)])

    def accuracy(self, found: Tensor, part: str) -> float:
        """Percent of pairs whose type (S, E) is right."""
        return 100 * float((found == self.types[part]).float().mean())


def network(recipe: options.RelationalInference, channels: int) -> RelationalInference:
    """The recipe's model; of charges no type does nothing."""
    return RelationalInference(times=recipe.times, channels=channels, still=recipe.system != "charged",
                               hidden=recipe.hidden, messages=recipe.messages, temperature=recipe.temperature,
                               dropout=recipe.dropout)


class UnsupervisedTask(BatchTask):
    """The negative evidence lower bound of a simulation: sum |x - x'|^2 / (2 variance), as if all states were
    predicted, and the divergence of the types from even ones (eq. 14 to 16, without what is constant)."""

    model: RelationalInference

    def __init__(self, recipe: options.RelationalInference, motion: Motion, seed: int) -> None:
        self.recipe, self.motion = recipe, motion
        batches = Batches([1] * len(motion.states["train"]), cost=recipe.batch_size, seed=seed)
        super().__init__(network(recipe, motion.states["train"].shape[-1]), recipe, batches)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        states, _ = self.motion.training(samples)
        recipe = self.recipe
        free = recipe.times - recipe.horizon
        starts = (torch.randint(free, (1,)) + torch.arange(recipe.windows) * free // recipe.windows) % free
        return self._bound(states, starts), float(len(samples))

    def _bound(self, states: Tensor, starts: Tensor) -> Tensor:
        recipe, horizon = self.recipe, self.recipe.horizon
        found = self.model(states, self.motion.graph, starts, horizon)
        error = (found.states - _ahead(states, starts, horizon)).square().sum()
        share = (recipe.times - 1) / (len(starts) * horizon)
        log_q = found.logits.log_softmax(-1)
        return share / (2 * recipe.variance) * error + (log_q.exp() * log_q).sum()

    def figures(self, part: str) -> dict[str, float]:
        motion, model = self.motion, self.model
        found = motion.logits(model.encoder, part)
        accuracy = motion.accuracy(self._names()[found.argmax(-1)], part)
        starts = torch.arange(0, self.recipe.times - self.recipe.horizon, self.recipe.horizon)
        errors = self._errors(part, found, starts)
        figures = {f"{part}_loss": float(errors.mean()), f"{part}_accuracy": accuracy,
                   f"{part}_mse_1": float(errors[0]), f"{part}_mse_{self.recipe.horizon}": float(errors[-1])}
        return figures if part == "val" else {**figures, **self._later(found)}

    def _names(self) -> Tensor:
        """Which type is called which: one that sends nothing is known, others as they fit best in validation."""
        types = self.model.types
        if self.recipe.system != "charged":
            return torch.arange(types)
        found = self.motion.logits(self.model.encoder, "val").argmax(-1)
        return max((torch.tensor(order) for order in permutations(range(types))),
                   key=lambda names: self.motion.accuracy(names[found], "val"))

    def _errors(self, part: str, logits: Tensor, starts: Tensor) -> Tensor:
        """Mean squared errors by steps ahead, (horizon,)."""
        horizon, total = self.recipe.horizon, []
        for states, found in zip(self.motion.states[part].split(_MANY), logits.split(_MANY), strict=True):
            predicted = self.model.decoder(states[:, starts], self.motion.graph, self.model.edges(found), horizon)
            total.append((predicted - _ahead(states, starts, horizon)).square().mean((1, 3, 4)))
        return torch.cat(total).mean(0)

    def _later(self, logits: Tensor) -> dict[str, float]:
        """The error behind the times that the encoder saw first: with the edges that it found there, and with edges
        found anew in the last T states before each rollout (dynamic graphs)."""
        recipe = self.recipe
        starts = torch.arange(recipe.times - 1, 2 * recipe.times - 1 - recipe.horizon, recipe.horizon)
        static = self._errors("test", logits, starts)
        anew = [self._errors("test", self.motion.logits(self.model.encoder, "test", int(start) + 1 - recipe.times),
                             start.view(1)) for start in starts]
        return {"test_mse_static": float(static.mean()), "test_mse_dynamic": float(torch.stack(anew).mean())}


class SupervisedTask(BatchTask):
    """The encoder alone, told the graphs: what can be found at best (the paper's "supervised")."""

    model: Encoder

    def __init__(self, recipe: options.RelationalInference, motion: Motion, seed: int) -> None:
        self.motion = motion
        batches = Batches([1] * len(motion.states["train"]), cost=recipe.batch_size, seed=seed)
        model = network(recipe, motion.states["train"].shape[-1]).encoder
        super().__init__(model, recipe, batches)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        states, types = self.motion.training(samples)
        logits = self.model(states, self.motion.graph)
        return F.cross_entropy(logits.flatten(0, 1), types.flatten(), reduction="sum"), float(types.numel())

    def figures(self, part: str) -> dict[str, float]:
        logits = self.motion.logits(self.model, part)
        loss = F.cross_entropy(logits.flatten(0, 1), self.motion.types[part].flatten())
        return {f"{part}_loss": float(loss), f"{part}_accuracy": self.motion.accuracy(logits.argmax(-1), part)}


def _correlation(recipe: options.RelationalInference, motion: Motion) -> Correlation:
    """Correlations of the trajectories, with the threshold that fits the training graphs best."""
    states, types = motion.states["train"][:2000], motion.types["train"][:2000]
    return Correlation().fit(states[:, :recipe.times], motion.graph, types)


def _correlated(motion: Motion, model: nn.Module, part: str) -> dict[str, float]:
    found = motion.logits(model, part).argmax(-1)
    return {f"{part}_loss": 0.0, f"{part}_accuracy": motion.accuracy(found, part)}


def _scale(recipe: options.RelationalInference, simulations: Simulations) -> Tensor:
    """The greatest absolute value of a channel, the two coordinates of a place or velocity on one scale."""
    greatest = simulations.states.abs().amax((0, 1, 2))
    return greatest if recipe.system == "kuramoto" else greatest.view(2, 2).amax(-1).repeat_interleave(2)


def _ahead(states: Tensor, starts: Tensor, horizon: int) -> Tensor:
    """The H states behind each start, (B, W, H, N, C)."""
    return states[:, starts.unsqueeze(-1) + torch.arange(1, horizon + 1)]


def _jobs(recipe: options.RelationalInference, run: Run | None) -> list[Job]:
    motion = Motion.simulated(recipe)
    told = dataclasses.replace(recipe, steps=recipe.supervised_steps)
    baseline = untrained_job(_CORRELATION, _correlation(recipe, motion), partial(_correlated, motion))
    return [*jobs_of(recipe, _ALONE, partial(UnsupervisedTask, recipe, motion), UnsupervisedTask),
            *jobs_of(told, _TOLD, partial(SupervisedTask, told, motion), SupervisedTask), baseline]


@torch.no_grad()
def _finish(recipe: options.RelationalInference, finished: Finished) -> dict[str, Any]:
    """Of a few test simulations the inferred graph and the predicted motion, beside the true ones."""
    task: UnsupervisedTask = finished.task(_ALONE)
    motion, model = task.motion, task.model
    probable = motion.logits(model.encoder, "test")[:_DRAWN].softmax(-1)[..., task._names().argsort()[1]]
    if recipe.system != "kuramoto":
        for place in range(min(_DRAWN, len(probable))):
            _draw(finished.run, task, place, probable[place])
    return {}


def _draw(run: Run, task: UnsupervisedTask, place: int, probable: Tensor) -> None:
    motion, recipe, graph = task.motion, task.recipe, task.motion.graph
    states = motion.states["test"][place:place + 1]
    edges = {"true": motion.types["test"][place].float(), "inferred": probable}
    matrices = {title: torch.zeros(recipe.bodies, recipe.bodies).index_put((graph.source, graph.target), values)
                for title, values in edges.items()}
    run.draw(f"graph-{place}", scenes.graphs(states[0, recipe.times - 1, :, :2], matrices))
    found = task.model.edges(motion.logits(task.model.encoder, "test")[place:place + 1])
    start = torch.tensor([recipe.times - 1])
    ways = {"true": states[0, recipe.times:, :, :2],
            "predicted": task.model.decoder(states[:, start], graph, found, recipe.times)[0, 0, :, :, :2]}
    run.draw(f"motion-{place}", scenes.paths(ways))
    if place == 0:
        run.write("pictures/motion.gif", scenes.motion_gif(ways))


def _show(recipe: options.RelationalInference, summary: dict[str, Any]) -> None:
    """The accuracies, and how well the decoder predicts."""
    _STUDY.show(recipe, summary)
    found = next(row for name, row in summary["results"].items() if name.startswith(_ALONE))
    print_table(("mean squared error of", "units of the box"), [
        ("1 step", f"{found['test_mse_1']:.2e}"),
        (f"{recipe.horizon} steps", f"{found[f'test_mse_{recipe.horizon}']:.2e}"),
        ("later, edges found once", f"{found['test_mse_static']:.2e}"),
        ("later, edges found anew", f"{found['test_mse_dynamic']:.2e}")])


_STUDY = Study(jobs=_jobs, columns={"test_accuracy": "edge accuracy, %"}, finish=_finish)
RUNNER = dataclasses.replace(_STUDY.runner, show=_show)
