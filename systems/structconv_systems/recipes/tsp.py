"""The traveling salesman by attention and REINFORCE (Kool et al. 2019), beside heuristics and the shortest tours."""

import abc
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from structconv.errors import DataError
from structconv_systems.data import tours as geometry
from structconv_systems.data.tsplib import read_problem, read_tour
from structconv_systems.models.decoding import greedy, sample
from structconv_systems.models.tours import BEGIN, TourDecoding, TourModel
from structconv_systems.pictures import Drawing, graphs
from structconv_systems.recipes.base import BatchTask, Finished, Job, Parts, Run, Study, Windows, fitted_job, jobs_of
from structconv_systems.recipes.options.tsp import TSP
from structconv_systems.train.device import compiled
from structconv_systems.train.optimization import Optimization

__all__ = ["RUNNER", "Baseline", "Exponential", "Instances", "Rollout", "Shared", "TourTask", "best_of", "better",
           "greedy_tours", "network", "turned_tours"]

#: Seeds of training batches are below, all others from here to 2^32: torch's generator on the CPU ignores higher bits.
_OTHERS = 2 ** 31
_VALIDATION, _TEST, _CHALLENGES = _OTHERS, _OTHERS + 1, _OTHERS + 2
#: Rows that are decoded at a time.
_ROWS = 1024
#: Turns and reflections of the square.
_TURNS = 8
#: Nodes up to which the shortest tours are proven.
_PROVEN = 20
#: Kicks of the local search with more nodes.
_KICKS = 200


@dataclass(frozen=True, eq=False)
class Instances:
    """Points (B, N, 2) in the unit square, and the distances (B, N, N) by which tours are measured.

    Attributes:
        optimum: tours (B, N) that are known to be the shortest, if any.
    """

    points: Tensor
    table: Tensor
    optimum: Tensor | None = None

    def __len__(self) -> int:
        return len(self.points)

    @classmethod
    def drawn(cls, samples: int, nodes: int, seed: int) -> Self:
        points = geometry.uniform(samples, nodes, seed)
        return cls(points, geometry.distances(points))

    @classmethod
    def read(cls, path: str) -> Self:
        """Read a TSPLIB file, scaled to the unit square, and the shortest tour in NAME.opt.tour if there is one;
        `DataError` if the file has no coordinates."""
        problem = read_problem(path)
        if problem.points is None:
            raise DataError(path, "coordinates, which the model reads", "distances alone")
        low, high = problem.points.amin(0), problem.points.amax(0)
        points = (problem.points - low) / (high - low).max().clamp(min=1e-30)
        known = Path(path).with_suffix(".opt.tour")
        optimum = read_tour(known, nodes=len(points)).unsqueeze(0) if known.is_file() else None
        return cls(points.float().unsqueeze(0), problem.distances.unsqueeze(0), optimum)

    @cached_property
    def best(self) -> Tensor:
        """Return the shortest tours (B, N): the known ones, proven ones up to 20 nodes, or those of a local search."""
        if self.optimum is not None:
            return self.optimum
        tables = self.table.cpu()
        with torch.device("cpu"):
            tours = (torch.stack([geometry.exact(table) for table in tables]) if self.points.shape[1] <= _PROVEN else
                     torch.cat([geometry.local_search(table, kicks=_KICKS) for table in tables.split(_ROWS)]))
        return tours.to(self.table.device)

    def lengths(self, tours: Tensor) -> Tensor:
        """Return the lengths of tours (B, N), or of several tours of each instance, (B, S, N)."""
        table = self.table if tours.dim() == 2 else self.table.unsqueeze(1).expand(-1, tours.shape[1], -1, -1)
        return geometry.lengths(table, tours)

    def shortest(self, tours: Tensor) -> Tensor:
        """Return the shortest (B, N) of several tours of each instance, (B, S, N)."""
        return tours[torch.arange(len(tours)), self.lengths(tours).argmin(-1)]


@torch.no_grad()
def greedy_tours(model: TourModel, points: Tensor) -> Tensor:
    """Return the tours (B, N) of the likeliest node at each step."""
    return torch.cat([torch.tensor(greedy(model.begin(part), len(part), begin=BEGIN, end=None, most=part.shape[1]))
                      for part in points.split(_ROWS)])


def turned_tours(model: TourModel, instances: Instances) -> Tensor:
    """Return the shortest (B, N) of the `greedy_tours` of the eight turns and reflections of the square (Kwon et al.
    2020, POMO, section 4.2)."""
    both = instances.points, instances.points.flip(-1)
    turns = [torch.where(torch.tensor(mirrored), 1 - points, points)
             for points in both for mirrored in product((False, True), repeat=2)]
    return instances.shortest(torch.stack([greedy_tours(model, points) for points in turns], 1))


@torch.no_grad()
def drawn(model: TourModel, points: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """Draw tours (B, samples, N) from the model; the points are encoded once."""
    tours = []
    for part in points.split(max(_ROWS // samples, 1)):
        decoding = model.begin(part)
        decoding.reorder(torch.arange(len(part)).repeat_interleave(samples))
        rows = sample(decoding, len(part) * samples, begin=BEGIN, end=None, most=part.shape[1], generator=generator)
        tours.append(torch.tensor(rows).unflatten(0, (-1, samples)))
    return torch.cat(tours)


def best_of(model: TourModel, instances: Instances, samples: int) -> Tensor:
    """Return the shortest (B, N) of the greedy tour and of drawn ones, always the same, `samples` in all."""
    tours = greedy_tours(model, instances.points).unsqueeze(1)
    if samples > 1:
        others = drawn(model, instances.points, samples - 1, torch.Generator().manual_seed(0))
        tours = torch.cat([tours, others], 1)
    return instances.shortest(tours)


def network(recipe: TSP) -> TourModel:
    """Build the model."""
    return TourModel(channels=recipe.channels, layers=recipe.layers, heads=recipe.heads, hidden=recipe.hidden,
                     clip=recipe.logits)


def measure(model: TourModel, points: Tensor) -> Tensor:
    """Return the lengths of the greedy tours, (B,)."""
    return geometry.ways(points, greedy_tours(model, points))


class Baseline(abc.ABC):
    """b(s) of instances s; sum (L - b) grad log p has the expectation of sum L grad log p, and less variance."""

    #: The number of samples of each instance in a batch, one after the other.
    copies = 1

    @abc.abstractmethod
    def value(self, instances: Tensor, costs: Tensor) -> Tensor:
        """Return b of the instances whose samples have these costs, (B copies,); it broadcasts to them."""

    def stepped(self, step: int, model: nn.Module) -> dict[str, float]:
        """Follow step number `step`, from 1, of the model; return figures to log."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        return None


class Exponential(Baseline):
    """b = decay b + (1 - decay) mean L, one number for all instances, starting with the first mean."""

    def __init__(self, decay: float) -> None:
        self.decay, self.mean = decay, float("nan")

    def value(self, instances: Tensor, costs: Tensor) -> Tensor:
        mean = float(costs.mean())
        self.mean = mean if self.mean != self.mean else self.decay * self.mean + (1 - self.decay) * mean
        return costs.new_tensor(self.mean)

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Shared(Baseline):
    """b of a sample is the mean cost of the other samples of its instance (Kool et al. 2019, Buy 4 REINFORCE samples,
    get a baseline for free!)."""

    def __init__(self, copies: int) -> None:
        self.copies = copies

    def value(self, instances: Tensor, costs: Tensor) -> Tensor:
        own = costs.view(-1, self.copies)
        return ((own.sum(-1, keepdim=True) - own) / (self.copies - 1)).flatten()


class Rollout(Baseline):
    """b(s) is the cost of the greedy tours of a frozen copy of the model (Kool et al. 2019, section 4).

    After every `every` steps the model replaces the copy if it is better by a one-sided paired t-test; new instances
    are then drawn for the next test. Until the first test b is `Exponential`.

    Args:
        model: the first copy. measure: (model, instances) -> costs (B,). instances: number of a test -> its instances.
        every, alpha, decay: see above.
    """

    def __init__(self, model: nn.Module, measure: Callable[[Any, Tensor], Tensor], instances: Callable[[int], Tensor],
                 *, every: int, alpha: float, decay: float) -> None:
        self.model, self.measure, self.instances = deepcopy(model).eval().requires_grad_(False), measure, instances
        self.every, self.alpha, self.mean, self.challenges, self.replaced = every, alpha, Exponential(decay), 0, 0

    def value(self, instances: Tensor, costs: Tensor) -> Tensor:
        return self.measure(self.model, instances) if self.challenges else self.mean.value(instances, costs)

    def stepped(self, step: int, model: nn.Module) -> dict[str, float]:
        if step % self.every:
            return {}
        training = model.training
        instances = self.instances(self.replaced)
        costs, own = self.measure(model.eval(), instances), self.measure(self.model, instances)
        model.train(training)
        self.challenges += 1
        if better(costs, own, self.alpha):
            self.model.load_state_dict(model.state_dict())
            self.replaced += 1
        return {"replaced": float(self.replaced)}

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "mean": self.mean.state_dict(), "challenges": self.challenges,
                "replaced": self.replaced}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.mean.load_state_dict(state["mean"])
        self.challenges, self.replaced = state["challenges"], state["replaced"]


def better(costs: Tensor, others: Tensor, alpha: float) -> bool:
    """Return True if costs (B,) are below others by a one-sided paired t-test at level alpha."""
    from scipy.stats import ttest_rel

    if torch.equal(costs, others):
        return False
    return bool(ttest_rel(costs.double().numpy(), others.double().numpy(), alternative="less").pvalue < alpha)


def baseline(recipe: TSP, model: TourModel, seed: int) -> Baseline:
    if recipe.baseline == "exponential":
        return Exponential(recipe.decay)
    if recipe.baseline == "shared":
        return Shared(recipe.copies)

    def challengers(number: int) -> Tensor:
        return geometry.uniform(recipe.challengers, recipe.nodes, _CHALLENGES + 1_000_003 * seed + number)

    return Rollout(model, measure, challengers, every=recipe.challenge_every, alpha=recipe.alpha, decay=recipe.decay)


class _Reinforced(Optimization):
    """An optimizer whose state includes the baseline."""

    baseline: Baseline

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "baseline": self.baseline.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.baseline.load_state_dict(state["baseline"])


class TourTask(BatchTask):
    """(L(t) - b(s)) log p(t | s), t drawn from p (Williams 1992; Kool et al. 2019, section 4); the mean length of
    greedy tours chooses the weights."""

    metric = "val_length"
    model: TourModel

    def __init__(self, recipe: TSP, parts: Parts[Instances], seed: int) -> None:
        self.recipe, self.parts, self.length = recipe, parts, float("nan")
        super().__init__(network(recipe), recipe, Windows(_OTHERS, size=1, seed=seed))
        self.optimizer = _Reinforced(self.model, recipe)
        self.baseline = self.optimizer.baseline = baseline(recipe, self.model, seed)

    def compile(self) -> None:
        compiled(self.model.encoder)

    def train_step(self, step: int) -> dict[str, float]:
        figures = super().train_step(step)
        return {**figures, "length": self.length, **self.baseline.stepped(step, self.model)}

    def loss(self, samples: Sequence[int]) -> tuple[Tensor, float]:
        count, copies = self.recipe.batch_size, self.baseline.copies
        points = geometry.uniform(count // copies, self.recipe.nodes, samples[0]).to(self.device)
        nodes = self.model.encode(points)
        if copies > 1:
            nodes, points = nodes.repeat_interleave(copies, 0), points.repeat_interleave(copies, 0)
        decoding = TourDecoding(self.model, nodes.detach())
        tours = torch.tensor(sample(decoding, count, begin=BEGIN, end=None, most=self.recipe.nodes))
        lengths = geometry.ways(points, tours)
        self.length = float(lengths.mean())
        advantage = lengths - self.baseline.value(points, lengths)
        return (advantage * self.model.log_p(nodes, tours).sum(-1)).sum(), float(count)

    def figures(self, part: str) -> dict[str, float]:
        """Measure the mean length; of ``test`` also by how many percent tours exceed the shortest ones."""
        instances = self.parts[part]
        lengths = instances.lengths(greedy_tours(self.model, instances.points))
        if part == "val":
            return {"val_length": float(lengths.mean())}
        shortest = instances.lengths(instances.best)
        turned = instances.lengths(turned_tours(self.model, instances))
        sampled = instances.lengths(best_of(self.model, instances, self.recipe.samples))
        if instances.optimum is not None and (torch.stack([lengths, turned, sampled]) < shortest * (1 - 1e-6)).any():
            raise DataError(self.recipe.test, "its shortest tour in the .opt.tour beside it", "a longer one than here")
        return {"test_gap": float(_gap(lengths, shortest).mean()),
                "test_gap_turned": float(_gap(turned, shortest).mean()),
                "test_gap_samples": float(_gap(sampled, shortest).mean()), "test_length": float(lengths.mean()),
                "test_length_samples": float(sampled.mean()), "test_shortest": float(shortest.mean())}


class Heuristic(nn.Module):
    """Tours (B, N) of a rule without parameters, by distances (B, N, N)."""

    def __init__(self, rule: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.rule = rule

    def forward(self, table: Tensor) -> Tensor:
        return self.rule(table)


def _restarted(table: Tensor) -> Tensor:
    """Return the shortest of eight random tours after 2-opt, as many as `turned_tours` compares."""
    batch, nodes = table.shape[:2]
    random = torch.Generator().manual_seed(0)
    tours = [geometry.two_opt(table, geometry.permutations(batch, nodes, random)) for _ in range(_TURNS)]
    shortest = torch.stack([geometry.lengths(table, each) for each in tours]).argmin(0)
    return torch.stack(tours)[shortest, torch.arange(batch)]


#: The baselines.
_RULES: dict[str, Callable[[Tensor], Tensor]] = {
    "farthest-insertion": geometry.farthest_insertion,
    "insertion-2-opt": lambda table: geometry.two_opt(table, geometry.farthest_insertion(table)),
    "2-opt-of-eight": _restarted}


def _by_rule(parts: Parts[Instances], model: nn.Module, part: str) -> dict[str, float]:
    """Return the figures of `TourTask` for tours of a rule, the same in each sample."""
    instances = parts[part]
    lengths = instances.lengths(model(instances.table))
    if part == "val":
        return {"val_loss": float(lengths.mean())}
    shortest = instances.lengths(instances.best)
    gap, length = float(_gap(lengths, shortest).mean()), float(lengths.mean())
    return {"test_gap": gap, "test_gap_turned": gap, "test_gap_samples": gap, "test_length": length,
            "test_length_samples": length, "test_shortest": float(shortest.mean())}


def _jobs(recipe: TSP, run: Run | None) -> list[Job]:
    """Each seed has test instances of its own, unless they are read, so that the interval covers both."""
    val = Instances.drawn(recipe.instances, recipe.nodes, _VALIDATION)
    tests = [Instances.read(recipe.test)] * recipe.seeds if recipe.test else [
        Instances.drawn(recipe.instances, recipe.nodes, _TEST + (seed << 24)) for seed in range(recipe.seeds)]
    parts = [Parts({"val": val, "test": test}, of="instances; each training step draws new ones") for test in tests]
    return [*jobs_of(recipe, "attention", lambda options, seed: TourTask(options, parts[seed], seed), TourTask),
            *(fitted_job(name, seed, partial(Heuristic, rule), partial(_by_rule, own))
              for name, rule in _RULES.items() for seed, own in enumerate(parts))]


def _finish(recipe: TSP, finished: Finished) -> None:
    """Draw tours through a few test instances beside the shortest, by the first training."""
    task = finished.task("attention")
    test = task.parts["test"]
    for place in range(min(3, len(test.points))):
        one = Instances(test.points[place:place + 1], test.table[place:place + 1], test.best[place:place + 1])
        finished.run.draw(f"tours-{place + 1}", _drawing(task, one),
                          f"Tours through the points of test instance {place + 1} "
                          "(axes: their coordinates), with their lengths and by how much they exceed the shortest.")


def _drawing(task: TourTask, one: Instances) -> Drawing:
    """Draw the tours of one instance, each with its length and excess over the shortest."""
    tours = {"greedy": greedy_tours(task.model, one.points),
             f"best of {task.recipe.samples}": best_of(task.model, one, task.recipe.samples), "shortest": one.best}
    lengths = {name: one.lengths(tour) for name, tour in tours.items()}
    titles = {name: f"{name}: {float(length):.4g} ({round(float(_gap(length, lengths['shortest'])), 1) + 0.0:+.1f} %)"
              for name, length in lengths.items()}
    return graphs(one.points[0], {titles[name]: torch.stack([tour[0], tour[0].roll(-1)])
                                  for name, tour in tours.items()})


def _gap(lengths: Tensor, shortest: Tensor) -> Tensor:
    """Return by how many percent tours exceed the shortest; 0 if both have no length."""
    return 100 * (lengths - shortest) / shortest.clamp(min=torch.finfo(shortest.dtype).tiny)


RUNNER = Study(jobs=_jobs, columns={"test_gap": "gap, %", "test_gap_turned": "of eight turns, %",
                                    "test_gap_samples": "of samples, %", "test_length": "length",
                                    "test_length_samples": "of samples", "test_shortest": "shortest"},
               finish=_finish).runner
