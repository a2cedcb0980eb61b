"""Neural relational inference (Kipf et al. 2018): infer from motion which bodies interact, beside an encoder trained
with the true graphs, the paper's networks, and correlations."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.commands.table import print_table
from structconv.structures import Graph
from structconv_systems import pictures
from structconv_systems.data.physics import SYSTEMS, Oscillators, Simulations
from structconv_systems.models.nri import Correlation, RelationalInference
from structconv_systems.models.nri_pairs import Circle, Plane, reversed_edges
from structconv_systems.recipes.base import Batches, BatchTask, Finished, Job, Parts, Run, Study, jobs_of, untrained_job
from structconv_systems.recipes.options import physics as options

__all__ = ["RUNNER", "Motion", "SupervisedTask", "UnsupervisedTask", "network", "simulations_of"]

_UNSUPERVISED, _SUPERVISED, _MLP, _CORRELATION = "unsupervised", "supervised", "mlp", "correlation"
_PARTS = ("train", "val", "test")
#: Simulations measured at a time.
_MANY = 256
_DRAWN = 3
#: A change of type that gains less log likelihood counts as rounding.
_LEAST_GAIN = 1e-3
#: Degrees of freedom of Student's t.
_FREEDOM = 2.0
#: Titles of the panels of learned laws, by system and type.
_TITLES = {"springs": {1: "joined by a spring"}, "charged": {0: "unlike charges", 1: "like charges"}}


@dataclass(frozen=True, kw_only=True, eq=False)
class Motion:
    """Simulations in three parts, in the units of a model.

    Attributes:
        states: by part, (S, T, N, C); of ``test`` 2 T. graph: of all pairs. types: by part, (S, E), 1 where a pair is
            joined, or, of charges, alike.
        scale: the unit of each channel: the standard deviation for the structured model, the greatest absolute value
            for the paper's.
    """

    recipe: options.RelationalInference
    states: Parts[Tensor]
    types: Parts[Tensor]
    graph: Graph
    scale: Tensor

    @classmethod
    def simulated(cls, recipe: options.RelationalInference) -> Self:
        """Simulate the three parts, with the seeds 0, 1 and 2."""
        return cls.scaled(recipe, simulations_of(recipe))

    @classmethod
    def scaled(cls, recipe: options.RelationalInference, simulations: Mapping[str, Simulations]) -> Self:
        """Scale simulations for the recipe's model; the paper's oscillators have no cosine."""
        states = {part: simulation.states for part, simulation in simulations.items()}
        if recipe.system == "kuramoto" and recipe.model == "paper":
            states = {part: simulation[..., [0, 1, 3]] for part, simulation in states.items()}
        graph, scale = Graph.complete(recipe.bodies), _scale(recipe, states["train"])
        return cls(recipe=recipe, graph=graph, scale=scale,
                   states=Parts({part: simulation / scale for part, simulation in states.items()}, of="simulations"),
                   types=Parts({part: (simulation.couplings[:, graph.source, graph.target] > 0).long()
                                for part, simulation in simulations.items()}))

    def mirrored(self, states: Tensor) -> Tensor:
        """Turn each simulation (B, T, N, 4) by quarters and mirror it at random: exchange x and y, or a sign."""
        count = len(states)
        signs = torch.randint(2, (count, 1, 1, 1, 2)) * 2.0 - 1
        turned = states.unflatten(-1, (2, 2)) * signs
        return torch.where(torch.rand(count, 1, 1, 1, 1) < 0.5, turned.flip(-1), turned).flatten(-2)

    def training(self, samples: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return states and types of some simulations."""
        chosen = torch.tensor(samples)
        states = self.states["train"][chosen]
        mirrored = self.recipe.mirrored and self.recipe.system != "kuramoto"
        return self.mirrored(states) if mirrored else states, self.types["train"][chosen]

    def logits(self, encoder: nn.Module, part: str, first: int = 0) -> Tensor:
        """Return the logits (S, E, K) of an encoder that reads T states from `first` on."""
        window = self.states[part][:, first:first + self.recipe.times]
        return torch.cat([encoder(states, self.graph) for states in window.split(_MANY)])

    def accuracy(self, predicted: Tensor, part: str) -> float:
        """Return the percentage of pairs whose type (S, E) is right."""
        return 100 * float((predicted == self.types[part]).float().mean())


def simulations_of(recipe: options.RelationalInference) -> dict[str, Simulations]:
    """Simulate each part; oscillators with the cosine of their phase."""
    kind = partial(Oscillators, cosine=True) if recipe.system == "kuramoto" else SYSTEMS[recipe.system]
    return {part: kind(bodies=recipe.bodies).simulate(recipe.samples if part == "train" else recipe.held_out,
                                                      recipe.times * (2 if part == "test" else 1), seed=seed)
            for seed, part in enumerate(_PARTS)}


def network(recipe: options.RelationalInference, motion: Motion) -> RelationalInference:
    """Build the model; for charges every type acts."""
    states, still = motion.states["train"], recipe.system != "charged"
    if recipe.model == "paper":
        return RelationalInference.paper(times=recipe.times, channels=states.shape[-1], still=still,
                                         hidden=recipe.hidden, messages=recipe.messages, temperature=recipe.temperature,
                                         dropout=recipe.dropout, encoder=recipe.encoder, decoder=recipe.decoder)
    space = Circle() if recipe.system == "kuramoto" else Plane()
    space.fit(states)
    return RelationalInference.structured(space, times=recipe.times, still=still, hidden=recipe.hidden,
                                          temperature=recipe.temperature, symmetric=recipe.symmetric)


class UnsupervisedTask(BatchTask):
    """The negative evidence lower bound of a simulation, as if all states were predicted, without constants (eq. 14 to
    16): the negative log likelihood of the prediction, and the divergence of the types from uniform ones."""

    model: RelationalInference

    def __init__(self, recipe: options.RelationalInference, motion: Motion, seed: int) -> None:
        self.recipe, self.motion, self.parts = recipe, motion, motion.states
        batches = Batches([1] * len(motion.states["train"]), cost=recipe.batch_size, seed=seed)
        super().__init__(network(recipe, motion), recipe, batches)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        states, _ = self.motion.training(samples)
        recipe, horizon = self.recipe, self.recipe.horizon
        free = recipe.times - horizon
        starts = (torch.randint(free, (1,)) + torch.arange(recipe.windows) * free // recipe.windows) % free
        output = self.model(states, self.motion.graph, starts, horizon)
        error = output.states - _ahead(states, starts, horizon)
        share = (recipe.times - 1) / (len(starts) * horizon)
        log_q = output.logits.log_softmax(-1)
        bound = share * self._surprise(error).sum() + (log_q.exp() * log_q).sum()
        return bound / ((recipe.times - 1) * recipe.bodies), float(len(samples))

    def _surprise(self, error: Tensor) -> Tensor:
        """Return the negative log likelihood of each error, Gaussian or Student's t."""
        if self.recipe.model == "paper":
            return error.square() / (2 * self.recipe.variance)
        decoder: Any = self.model.decoder
        scale = decoder.scale
        squared, freedom = (error / scale).square(), _FREEDOM
        cost = (freedom + 1) * (squared / freedom).log1p() if self.recipe.heavy_tails else squared
        return cost / 2 + scale.log()

    def figures(self, part: str) -> dict[str, float]:
        motion, model = self.motion, self.model
        logits = motion.logits(model.encoder, part)
        accuracy = motion.accuracy(self._names()[logits.argmax(-1)], part)
        ahead = self.recipe.rollout
        starts = torch.arange(0, self.recipe.times - ahead, ahead)
        errors = self._errors(part, logits, starts)
        figures = {f"{part}_loss": self._one_step(part, logits), f"{part}_accuracy": accuracy,
                   f"{part}_mse_1": float(errors[0]), f"{part}_mse_{ahead}": float(errors[-1])}
        if part == "val":
            return figures
        refined = self._names()[self.refined(part, logits.argmax(-1))]
        return {**figures, f"{part}_accuracy_refined": motion.accuracy(refined, part), **self._later(logits)}

    @torch.no_grad()
    def refined(self, part: str, types: Tensor) -> Tensor:
        """Improve types (S, E) by coordinate ascent on the likelihood of the first T states, until no change of one
        pair helps."""
        return torch.cat([self._refined(states[:, :self.recipe.times], chunk) for states, chunk
                          in zip(self.motion.states[part].split(_MANY), types.split(_MANY), strict=True)])

    def _refined(self, states: Tensor, types: Tensor) -> Tensor:
        types, going, pairs = types.clone(), torch.arange(len(types)), self._pairs()
        while len(going):
            x, best = states[going], types[going]
            least, better = self._cost(x, best), torch.zeros(len(going), dtype=torch.bool)
            for pair in pairs:
                for step in range(1, self.model.types):
                    other = torch.where(pair, (types[going] + step) % self.model.types, best)
                    cost = self._cost(x, other)
                    helps = cost < least - _LEAST_GAIN
                    best, least = torch.where(helps.unsqueeze(-1), other, best), torch.where(helps, cost, least)
                    better |= helps
            types[going] = best
            going = going[better]
        return types

    def _pairs(self) -> list[Tensor]:
        """Return masks (E,) of edges that change together: both directions of a pair if the model is symmetric."""
        graph, edges = self.motion.graph, torch.arange(self.motion.graph.num_edges)
        back = reversed_edges(graph) if self.recipe.symmetric else edges
        return [(edges == edge) | (back == edge) for edge in edges[edges <= back]]

    def _cost(self, states: Tensor, types: Tensor) -> Tensor:
        """Return the negative log likelihood of one step after each state, with types (S, E): (S,)."""
        starts = torch.arange(states.shape[1] - 1)
        edges = F.one_hot(types, self.model.types).to(states.dtype)
        predicted = self.model.decoder(states, self.motion.graph, edges, 1, starts)
        return self._surprise(predicted - _ahead(states, starts, 1)).flatten(1).sum(1)

    def _names(self) -> Tensor:
        """Match the types to the true ones: of charges as they fit best in validation."""
        types = self.model.types
        if self.recipe.system != "charged":
            return torch.arange(types)
        inferred = self.motion.logits(self.model.encoder, "val").argmax(-1)
        return max((torch.tensor(order) for order in permutations(range(types))),
                   key=lambda names: self.motion.accuracy(names[inferred], "val"))

    def _one_step(self, part: str, logits: Tensor) -> float:
        """Return the negative log likelihood of a coordinate one step after each state, which chooses the weights."""
        states = self.motion.states[part][:, :self.recipe.times]
        total = sum(float(self._cost(each, chunk).sum()) for each, chunk
                    in zip(states.split(_MANY), logits.argmax(-1).split(_MANY), strict=True))
        return total / states[:, 1:].numel()

    def _errors(self, part: str, logits: Tensor, starts: Tensor) -> Tensor:
        """Return mean squared errors by steps ahead, (rollout,)."""
        horizon, total = self.recipe.rollout, []
        for states, chunk in zip(self.motion.states[part].split(_MANY), logits.split(_MANY), strict=True):
            predicted = self.model.decoder(states, self.motion.graph, self.model.edges(chunk), horizon, starts)
            total.append((predicted - _ahead(states, starts, horizon)).square().mean((1, 3, 4)))
        return torch.cat(total).mean(0)

    def _later(self, logits: Tensor) -> dict[str, float]:
        """Return the errors after the first T times: with the edges inferred from these, and from the last T states
        before each rollout."""
        recipe = self.recipe
        starts = torch.arange(recipe.times - 1, 2 * recipe.times - 1 - recipe.rollout, recipe.rollout)
        static = self._errors("test", logits, starts)
        anew = [self._errors("test", self.motion.logits(self.model.encoder, "test", int(start) + 1 - recipe.times),
                             start.view(1)) for start in starts]
        return {"test_mse_static": float(static.mean()), "test_mse_dynamic": float(torch.stack(anew).mean())}


class SupervisedTask(BatchTask):
    """The encoder alone, trained with the true graphs (the "supervised" upper bound of the paper)."""

    model: nn.Module

    def __init__(self, recipe: options.RelationalInference, motion: Motion, seed: int) -> None:
        self.motion, self.parts = motion, motion.states
        batches = Batches([1] * len(motion.states["train"]), cost=recipe.batch_size, seed=seed)
        model = network(recipe, motion).encoder
        super().__init__(model, recipe, batches)

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        states, types = self.motion.training(samples)
        logits = self.model(states, self.motion.graph)
        return F.cross_entropy(logits.flatten(0, 1), types.flatten(), reduction="sum"), float(types.numel())

    def figures(self, part: str) -> dict[str, float]:
        logits = self.motion.logits(self.model, part)
        loss = F.cross_entropy(logits.flatten(0, 1), self.motion.types[part].flatten())
        return {f"{part}_loss": float(loss), f"{part}_accuracy": self.motion.accuracy(logits.argmax(-1), part)}


def _correlated(motion: Motion, model: nn.Module, part: str) -> dict[str, float]:
    scale = motion.logits(model, part).argmax(-1)
    return {f"{part}_loss": 0.0, f"{part}_accuracy": motion.accuracy(scale, part)}


def _scale(recipe: options.RelationalInference, states: Tensor) -> Tensor:
    """Return the unit of each channel; both coordinates share one, and a phase has none."""
    paper = recipe.model == "paper"
    scale = states.abs().amax((0, 1, 2)) if paper else states.std((0, 1, 2))
    if recipe.system != "kuramoto":
        pairs = scale.view(2, 2)
        return (pairs.amax(-1) if paper else pairs.square().mean(-1).sqrt()).repeat_interleave(2)
    if not paper:
        scale[1:3] = 1.0
    return scale


def _ahead(states: Tensor, starts: Tensor, horizon: int) -> Tensor:
    """Return the H states after each start, (B, W, H, N, C)."""
    return states[:, starts.unsqueeze(-1) + torch.arange(1, horizon + 1)]


def _jobs(recipe: options.RelationalInference, run: Run | None) -> list[Job]:
    simulations = simulations_of(recipe)
    motion = Motion.scaled(recipe, simulations)
    supervised = dataclasses.replace(recipe, steps=recipe.supervised_steps)
    paper = recipe.as_paper()
    compared = motion if recipe.model == "paper" else Motion.scaled(paper, simulations)
    jobs = [*jobs_of(recipe, _UNSUPERVISED, partial(UnsupervisedTask, motion=motion), UnsupervisedTask),
            *jobs_of(supervised, _SUPERVISED, partial(SupervisedTask, motion=motion), SupervisedTask)]
    if recipe.model != "paper":
        jobs += jobs_of(paper, _MLP, partial(UnsupervisedTask, motion=compared), UnsupervisedTask)
    states, types = compared.states["train"][:2000, :recipe.times], compared.types["train"][:2000]
    correlation = Correlation().fit(states, compared.graph, types)
    return [*jobs, untrained_job(_CORRELATION, correlation, partial(_correlated, compared))]


@torch.no_grad()
def _finish(recipe: options.RelationalInference, finished: Finished) -> None:
    """Draw the inferred graph and the predicted motion of a few test simulations."""
    task: UnsupervisedTask = finished.task(_UNSUPERVISED)
    motion, model = task.motion, task.model
    probable = motion.logits(model.encoder, "test")[:_DRAWN].softmax(-1)[..., task._names().argsort()[1]]
    if recipe.system != "kuramoto":
        for place in range(min(_DRAWN, len(probable))):
            _draw(finished.run, task, place, probable[place])
        if recipe.model != "paper":
            finished.run.draw("law", pictures.curves(_laws(task), x_label="distance", y_label="force"),
                              "Force on the receiver, away from the sender, by the distance of the two bodies: the law "
                              "of the simulation and the decoder's.")


def _laws(task: UnsupervisedTask) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Return by type distances and the force on the receiver, away from the sender: the true and the learned one."""
    recipe, motion = task.recipe, task.motion
    decoder: Any = task.model.decoder
    names = [int(task._names()[k]) for k in decoder.acting]
    system: Any = SYSTEMS[recipe.system](bodies=recipe.bodies)
    states = motion.states["val"] * motion.scale
    distances = torch.pdist(states[0, 0, :, :2]) if len(states) < 2 else (
        states[:, :, motion.graph.source, :2] - states[:, :, motion.graph.target, :2]).norm(dim=-1).flatten()
    low, high = (float(distances.kthvalue(max(1, int(share * len(distances)))).values) for share in (0.02, 0.98))
    distance = torch.linspace(low, high, 100)
    learned = decoder.law(distance / motion.scale[0]) * motion.scale[2] / system.interval
    if recipe.system == "springs":
        true = {1: -system.stiffness * distance}
    else:
        true = {0: -distance ** -2, 1: distance ** -2}
    return {_TITLES[recipe.system][name]: (distance, {"true": true[name], "learned": law})
            for name, law in sorted(zip(names, learned, strict=True), key=lambda pair: pair[0])}


def _draw(run: Run, task: UnsupervisedTask, place: int, probable: Tensor) -> None:
    motion, recipe, graph = task.motion, task.recipe, task.motion.graph
    states = motion.states["test"][place:place + 1]
    edges = {"true": motion.types["test"][place].float(), "inferred": probable}
    matrices = {title: torch.zeros(recipe.bodies, recipe.bodies).index_put((graph.source, graph.target), values)
                for title, values in edges.items()}
    run.draw(f"graph-{place}", pictures.graphs(states[0, recipe.times - 1, :, :2], matrices),
             f"Bodies of test simulation {place + 1} (axes: coordinates in units of the model) and the pairs that are "
             f"{'alike' if recipe.system == 'charged' else 'joined'}; the more probable, the more opaque.")
    inferred = task.model.edges(motion.logits(task.model.encoder, "test")[place:place + 1])
    start = torch.tensor([recipe.times - 1])
    ways = {"true": states[0, recipe.times:, :, :2],
            "predicted": task.model.decoder(states, graph, inferred, recipe.times, start)[0, 0, :, :, :2]}
    caption = f"Test simulation {place + 1} after the observed states. Axes: coordinates; a color for each body."
    run.draw(f"motion-{place}", pictures.paths(ways), f"{caption} A dot: its end.")
    if place == 0:
        run.draw("motion.gif", pictures.motion_gif(ways), caption)


def _show(recipe: options.RelationalInference, summary: dict[str, Any]) -> None:
    """Print the errors of the decoder."""
    learned = next(row for name, row in summary["results"].items() if name.startswith(_UNSUPERVISED))
    print_table(("mean squared error of", "units of the model"), [
        ("1 step", f"{learned['test_mse_1']:.2e}"),
        (f"{recipe.rollout} steps", f"{learned[f'test_mse_{recipe.rollout}']:.2e}"),
        ("later, edges found once", f"{learned['test_mse_static']:.2e}"),
        ("later, edges found anew", f"{learned['test_mse_dynamic']:.2e}")])


RUNNER = Study(jobs=_jobs, columns={"test_accuracy": "edge accuracy, %", "test_accuracy_refined": "refined, %"},
               finish=_finish, show_more=_show).runner
