"""Interaction networks (Battaglia et al. 2016): one step, rollouts, more bodies and fewer."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from structconv.commands.table import print_table
from structconv.structures import Graph
from structconv_systems import pictures
from structconv_systems.data.physics import Balls, Gravity, Newtonian, Simulations, String
from structconv_systems.models import interaction_features as views
from structconv_systems.models.interactions import InteractionNetwork
from structconv_systems.recipes.base import BatchTask, Finished, Job, Parts, Run, Study, Windows, jobs_of
from structconv_systems.recipes.options import physics as options

__all__ = ["RUNNER", "InteractionTask", "Motion", "Steps", "network"]

#: Bodies in training, fewer and more, as in the paper; and the systems of the headline.
_BODIES = {"gravity": (6, 3, 12), "balls": (6, 3, 9), "string": (15, 5, 30)}
_DECIDE = ("gravity", "balls")
#: Steps measured at a time, for scales, in the picture of a rollout, and between two frames of its animation.
_MANY, _SCALED, _DRAWN, _EVERY = 500, 5000, 250, 20


class Transitions(NamedTuple):
    """States (S, N, 4), properties (S, N, A), and the changes of velocity in the step that follows, (S, N, 2)."""

    states: Tensor
    properties: Tensor
    changes: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Steps:
    """All steps of simulations, one simulation after the other, and the graph of the bodies."""

    simulations: Simulations
    graph: Graph

    def __len__(self) -> int:
        return len(self.simulations) * (self.simulations.states.shape[1] - 1)

    def at(self, rows: Tensor) -> Transitions:
        times = self.simulations.states.shape[1] - 1
        simulation, time = rows // times, rows % times
        before, after = (self.simulations.states[simulation, at] for at in (time, time + 1))
        return Transitions(before, self.simulations.properties[simulation], (after - before)[..., 2:])

    def some(self, count: int) -> Transitions:
        """Return about `count` steps, evenly spaced."""
        return self.at(torch.arange(0, len(self), max(1, len(self) // count)))

    def figures(self, model: InteractionNetwork) -> tuple[float, float]:
        """Return the mean squared errors of a velocity after a step: of the model, and of constant velocity."""
        sums: Any = 0
        for rows in torch.arange(len(self)).split(_MANY):
            states, properties, changes = self.at(rows)
            error = model(states, properties, self.graph) - changes
            sums = sums + torch.stack([error, changes]).double().square().mean((2, 3)).sum(1)
        error, constant = (sums / len(self)).tolist()
        return error, constant


@dataclass(frozen=True, kw_only=True, eq=False)
class Motion:
    """Simulations of a system.

    Attributes:
        steps: of ``train``, ``val``, ``test``, and of tests with ``fewer`` bodies and ``more``. long: test simulations
            for rollouts.
    """

    recipe: options.Interactions
    system: Newtonian
    features: views.InteractionFeatures
    steps: Parts[Steps]
    long: Simulations

    @classmethod
    def simulated(cls, recipe: options.Interactions, name: str) -> Self:
        """Simulate each part with its own seed."""
        own, fewer, more = _BODIES[name]
        bodies = {"train": own, "val": own, "test": recipe.test or own, "fewer": fewer, "more": more}
        steps = {}
        for seed, (part, count) in enumerate(bodies.items(), 10):
            system, features = _laws(recipe, name, count)
            number = recipe.samples if part == "train" else recipe.held_out
            simulations = system.simulate(number, recipe.times, seed=seed)
            steps[part] = Steps(simulations=simulations, graph=features.graph(count))
        system, features = _laws(recipe, name, bodies["test"])
        return cls(recipe=recipe, system=system, features=features,
                   steps=Parts(steps, ("test", "fewer", "more"), of="simulated steps"),
                   long=system.simulate(recipe.rollouts, recipe.horizon + 1, seed=20))

    def drawn(self) -> Tensor:
        """Return the numbers of the training steps, repeated by how often each is drawn."""
        squared = self.steps["train"].simulations.states[..., 2:].diff(dim=1).square().sum(-1)
        much = squared.amax(-1) > squared.mean()
        near = much.clone()
        near[:, 1:] |= much[:, :-1]
        near[:, :-1] |= much[:, 1:]
        return torch.arange(near.numel()).repeat_interleave(1 + (self.recipe.collision_weight - 1) * near.flatten())

    def rollout(self, model: InteractionNetwork) -> Simulations:
        """Continue the first states of `long` by the model."""
        begin, graph = self.long.states[:, 0], self.features.graph(self.system.bodies)
        later = model.rollout(begin, self.long.properties, graph, self.recipe.horizon)
        return dataclasses.replace(self.long, states=torch.cat([begin.unsqueeze(1), later], 1))

    def drift(self, simulations: Simulations) -> float:
        """Return the median change of energy until the end, in percent of the mean kinetic energy of `long`."""
        masses, velocities = self.long.properties[:, None, :, 0].double(), self.long.states[..., 2:].double()
        kinetic = (masses * velocities.square().sum(-1)).sum(-1).mean(1) / 2
        energy = self.system.energy(simulations)
        return 100 * float(((energy[:, -1] - energy[:, 0]).abs() / kinetic).median())


def _laws(recipe: options.Interactions, name: str, bodies: int) -> tuple[Newtonian, views.InteractionFeatures]:
    """Return the system of this number of bodies, and its features."""
    if name == "gravity":
        space = Gravity(bodies=bodies, softening=recipe.softening)
        return space, views.SpaceFeatures(space.interval)
    if name == "balls":
        box = Balls(bodies=bodies)
        return box, views.BoxFeatures(box.interval, box.box)
    row = String(bodies=bodies)
    return row, views.StringFeatures(row.interval, row.length, row.disk)


def network(recipe: options.Interactions, motion: Motion, relations: bool = True) -> InteractionNetwork:
    """Build the model with the scales of the training simulations; without relations it is the baseline."""
    model = InteractionNetwork(motion.features, hidden=recipe.hidden, effects=recipe.effects, layers=recipe.layers,
                               relations=relations)
    steps = motion.steps["train"]
    states, properties, changes = steps.some(_SCALED)
    return model.fit(states, properties, steps.graph, changes)


class InteractionTask(BatchTask):
    """The scaled squared error of changes of velocity, and a penalty on effects (section 4 of the paper)."""

    model: InteractionNetwork

    def __init__(self, recipe: options.Interactions, motion: Motion, relations: bool, seed: int) -> None:
        self.recipe, self.motion, self.drawn = recipe, motion, motion.drawn()
        self.parts = motion.steps
        windows = Windows(len(self.drawn), size=recipe.batch_size, seed=seed)
        super().__init__(network(recipe, motion, relations), recipe, windows)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        steps, model = self.motion.steps["train"], self.model
        states, properties, changes = steps.at(self.drawn[torch.tensor(samples)])
        predicted, effects = model.respond(states, properties, steps.graph)
        error = (predicted - changes / model.change_scale).square().mean((1, 2))
        penalty = self.recipe.penalty * effects.square().mean((1, 2)) if model.relations else 0
        return (error + penalty).sum(), float(len(samples))

    def figures(self, part: str) -> dict[str, float]:
        error, constant = self.motion.steps[part].figures(self.model)
        figures = {f"{part}_loss": error, f"{part}_constant": constant, f"{part}_ratio": constant / error}
        if part == "val":
            return figures
        motion = self.motion
        others = {part: motion.steps[part].figures(self.model) for part in ("fewer", "more")}
        return {**figures, **{f"test_{part}": constant / error for part, (error, constant) in others.items()},
                "test_drift": motion.drift(motion.rollout(self.model)), "test_drift_true": motion.drift(motion.long)}


def _jobs(recipe: options.Interactions, run: Run | None) -> list[Job]:
    motions = {name: Motion.simulated(recipe, name) for name in recipe.systems}
    return [job for name, motion in motions.items()
            for group, relations in ((name, True), (f"{name}-independent", False))
            for job in jobs_of(recipe, group, partial(InteractionTask, motion=motion, relations=relations),
                               InteractionTask)]


def _finish(recipe: options.Interactions, finished: Finished) -> None:
    """Draw a test simulation of each system beside its rollout."""
    for name in recipe.systems:
        task = finished.task(name)
        motion: Motion = task.motion
        ways = {"true": motion.long.states[0, :, :, :2], "predicted": motion.rollout(task.model).states[0, :, :, :2]}
        caption = f"A test simulation of {name}, and the network's rollout. Axes: coordinates; a color for each body."
        finished.run.draw(f"paths-{name}", pictures.paths({title: way[:_DRAWN] for title, way in ways.items()}),
                          f"{caption} The first {_DRAWN} steps; a dot: where they end.")
        finished.run.draw(f"motion-{name}.gif", pictures.motion_gif({
            title: way[::_EVERY] for title, way in ways.items()}, tail=2), f"{caption} Every {_EVERY}th step.")


def _show(recipe: options.Interactions, summary: dict[str, Any]) -> None:
    """Print the errors."""
    print_table(("mean squared error of velocities after a step, (m/s)^2", "network", "constant velocity"), [
        (name, f"{row['test_loss']:.3g}", f"{row['test_constant']:.3g}") for name, row in summary["results"].items()])


RUNNER = Study(jobs=_jobs, columns={"test_ratio": "error of constant velocity over ours", "test_fewer": "fewer bodies",
                                    "test_more": "more bodies", "test_drift": "drift of energy in a rollout, %",
                                    "test_drift_true": "in the simulation, %"}, finish=_finish, show_more=_show).runner
