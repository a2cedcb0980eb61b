"""Laws of models over batches: they learn a few samples, a sample alone is what it is among others, they are saved, and
exported for any batch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.structures import Graph
from structconv_systems.data.generated import MARKS, NOISE, entry_channels, labeled_entries, temporal_order
from structconv_systems.data.physics import Balls, Gravity, String
from structconv_systems.data.tours import uniform
from structconv_systems.models.architectures import ARCHITECTURES, SequenceClassifier
from structconv_systems.models.convlstm import ConvLSTM
from structconv_systems.models.dcrnn import DCRNN, diffusion
from structconv_systems.models.interaction_features import BoxFeatures, SpaceFeatures, StringFeatures
from structconv_systems.models.interactions import InteractionNetwork
from structconv_systems.models.mnist_cheb import GraphLeNet, GridLeNet, pixel_graph
from structconv_systems.models.non_local import FUNCTIONS, NonLocalNetwork
from structconv_systems.models.nri import RelationalInference
from structconv_systems.models.pooling import POOLINGS, PoolingClassifier
from structconv_systems.models.series import ATTENTION, Forecaster
from structconv_systems.models.tours import TourModel
from systems.tests.models.sequences import check_learns, check_saved
from tests.support.drawn import EVERY

Loss = Callable[[Tensor], Tensor]
PAIRS, STARTS = Graph.complete(4), torch.tensor([0, 6])
SIZES = {"channels": (4, 8), "hidden": 16}
SYSTEMS = {"gravity": (Gravity, {"softening": 5.0}, SpaceFeatures(1e-3)), "balls": (Balls, {}, BoxFeatures(0.01, 1.0)),
           "string": (String, {}, StringFeatures(0.01, 0.2, 0.3))}
QUESTIONS = dict(zip(POOLINGS, ("place", "content", "relation"), strict=True))


class Of(nn.Module):
    """A model called in another way: ``call(model, *inputs)``."""

    def __init__(self, model: nn.Module, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.call(self.model, *inputs)


@dataclass(frozen=True)
class Case:
    """A model, its inputs, whose first dim is the batch unless they are of a graph, and the loss of what it says.

    `axes` are the dims of each input that an exported program leaves free, `other` inputs of other sizes.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Tensor, ...]]
    loss: Loss | None = None
    steps: int = 80
    rate: float = 1e-2
    axes: tuple[dict[int, str], ...] = ()
    other: Callable[[], tuple[Tensor, ...]] | None = None
    exported: bool = True


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def labels(classes: int, samples: int) -> Loss:
    return partial(F.cross_entropy, target=torch.arange(samples) % classes)


def order(samples: int, nodes: int) -> Tensor:
    return noise(samples, nodes).argsort(-1)


def bodies(name: str, count: int = 6, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """States after a few steps, properties and edges of simulations."""
    system, options, features = SYSTEMS[name]
    simulations = system(bodies=size, **options).simulate(count, 12, seed=0)
    return simulations.states[:, -2].contiguous(), simulations.properties, features.graph(size).edge_index


def interactions(name: str, relations: bool = True) -> nn.Module:
    model = InteractionNetwork(SYSTEMS[name][2], hidden=32, effects=8, layers=2, relations=relations)
    states, properties, edges = bodies(name)
    model.fit(states, properties, Graph(edges, num_nodes=4), noise(6, 4, 2, seed=1))
    nn.init.normal_(model.network.edge.rest[-1].weight, std=0.1)
    return Of(model, lambda model, states, properties, edges: model(
        states, properties, Graph(edges, num_nodes=states.shape[-2])))


def changes(name: str) -> Tensor:
    """What is to be learned: bodies that are held do not change."""
    return noise(6, 4, 2, seed=1) * (1 - bodies(name)[1][..., 1:2] if name == "string" else 1)


def sensors(size: int = 4, count: int = 3) -> tuple[Tensor, ...]:
    """Readings, the time of day, and the edges and weights of a ring."""
    index = torch.arange(size)
    edges = torch.cat([torch.stack([index, (index + step) % size]) for step in (1, 2)], 1)
    known = noise(count, 2, 1, 1, seed=1).expand(-1, -1, size, -1).contiguous()
    return 3 + 2 * noise(count, 2, size), known, edges, 0.5 + torch.arange(2.0 * size) / size


def inferred(part: str) -> nn.Module:
    model = RelationalInference.paper(times=12, channels=4, hidden=16)
    nn.init.normal_(model.decoder.rest[-1].weight, std=0.1)
    calls: dict[str, Callable[..., Any]] = {
        "encoder": lambda model, x: model.encoder(x, PAIRS),
        "decoder": lambda model, x, edges: model.decoder(x, PAIRS, edges, 2),
        "whole": lambda model, x: model(x / 10, PAIRS, STARTS, 1).states}
    return Of(model, calls[part])


def told() -> tuple[Tensor, Tensor]:
    """Readings, of which about a fifth are missing."""
    return noise(5, 24), noise(5, 24, seed=1) < 0.8


IMAGES: Any = {"inputs": lambda: (noise(6, 12, 12).sigmoid(),), "loss": labels(3, 6)}
VIDEOS: Any = {"inputs": lambda: (noise(3, 3, 8, 8).gt(0).float(),), "rate": 2e-2, "steps": 100,
              "loss": lambda y: F.binary_cross_entropy_with_logits(y, noise(3, 2, 8, 8, seed=1).gt(0).float())}
MANY = {0: "samples"}
CASES = {
    "graph of pixels": Case(lambda: GraphLeNet(pixel_graph(12, 12), 3, order=4, dropout=0.0, **SIZES), **IMAGES),
    "grid of pixels": Case(lambda: GridLeNet((12, 12), 3, kernel=3, dropout=0.0, **SIZES), **IMAGES),
    **{f"non-local {name}": Case(partial(NonLocalNetwork, 3, function=name, channels=8, inner=4), **IMAGES, rate=2e-2,
                                 steps=120) for name in FUNCTIONS},
    **{name: Case(partial(SequenceClassifier, name, NOISE + MARKS, 4, channels=16, kernel=3),
                  lambda: (temporal_order(12, 14, first=9, end=14, seed=1).inputs,),
                  lambda y: F.cross_entropy(y, temporal_order(12, 14, first=9, end=14, seed=1).labels))
       for name in ARCHITECTURES},
    **{f"pooling {name}": Case(
        partial(PoolingClassifier, name, 6, entry_channels(6, 3), 3, channels=16, dim=8),
        lambda asked=asked: (labeled_entries(asked, 12, 6, classes=3, seed=2).inputs,),
        lambda y, asked=asked: F.cross_entropy(y, labeled_entries(asked, 12, 6, classes=3, seed=2).labels), 120, 2e-2)
       for name, asked in QUESTIONS.items()},
    "ConvLSTM": Case(partial(ConvLSTM, size=8, ahead=2, patch=2, hidden=32, layers=1), **VIDEOS),
    "LSTM of frames": Case(partial(ConvLSTM, size=8, ahead=2, patch=8, kernel=1, hidden=32), **VIDEOS),
    **{f"series {name}": Case(
        partial(Forecaster, history=24, horizon=4, attention=name, hidden=16, heads=2, patch=2, mean=1.0,
                deviation=2.0), told, lambda y: F.l1_loss(y, 3 * noise(5, 4, seed=2)), 200) for name in ATTENTION},
    **{f"{name} {relations}": Case(
        partial(interactions, name, relations), partial(bodies, name),
        (lambda y, name=name: F.mse_loss(y, changes(name))) if relations else None, 200,
        axes=({0: "samples", 1: "bodies"},) * 2 + ({1: "edges"},), other=partial(bodies, name, 2, 7))
       for name in SYSTEMS for relations in (True, False)},
    "DCRNN": Case(
        lambda: Of(DCRNN(diffusion(2), horizon=2, hidden=24, layers=1, known=1, mean=3.0, deviation=2.0),
                   lambda model, readings, known, edges, weights: model(
                       readings, Graph(edges, num_nodes=readings.shape[-1], edge_weight=weights), known)),
        sensors, lambda y: F.l1_loss(y, 3 + 2 * noise(3, 2, 4, seed=1)), 200, 3e-2,
        axes=({0: "samples", 2: "sensors"},) * 2 + ({1: "edges"}, {0: "edges"}), other=partial(sensors, 7, 2)),
    "tours": Case(partial(TourModel, channels=16, layers=2, heads=2, hidden=32),
                  lambda: (uniform(8, 7, 0), order(8, 7)), lambda y: -y.sum(-1).mean(), 60,
                  axes=({0: "samples", 1: "nodes"},) * 2, other=lambda: (uniform(3, 11, 1), order(3, 11))),
    "NRI encoder": Case(partial(inferred, "encoder"), lambda: (noise(5, 12, 4, 4),)),
    "NRI decoder": Case(partial(inferred, "decoder"), lambda: (noise(5, 2, 4, 4), noise(5, 12, 2).sigmoid())),
    "NRI": Case(partial(inferred, "whole"), lambda: (noise(5, 12, 4, 4),), exported=False, steps=150, loss=lambda y:
                F.mse_loss(y, noise(5, 12, 4, 4)[:, STARTS[:, None] + 1] / 10)),
}


#: Of near-equal models one learns and is exported; all are with STRUCTCONV_EVERY_TEST=1.
LIKE = {"non-local gaussian", "non-local embedded_gaussian", "non-local dot_product", "LSTM of frames", "series none",
        "series content", "gravity True", "gravity False", "string True", "string False", "balls False",
        "pooling spatial", "grid of pixels"}
#: The others are exported with STRUCTCONV_EVERY_TEST=1: the suite of the library exports their layers.
EXPORTED = {"DCRNN", "tours", "series period"}


def some(names: list[str]) -> list[str]:
    return [name for name in names if EVERY or name not in LIKE]


def made(case: Case, seed: int = 0, stir: float = 0.0) -> nn.Module:
    """The model in training; stirred, none of its weights is 0, nor are running statistics those of a new one."""
    torch.manual_seed(seed)
    model = case.make().train()
    if stir:
        model(*case.inputs())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(stir * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("name", some([name for name, case in CASES.items() if case.loss is not None]))
def test_it_learns_a_small_batch(name):
    case = CASES[name]
    model, inputs = made(case), case.inputs()
    check_learns(model, lambda: case.loss(model(*inputs)), case.steps, case.rate)


@pytest.mark.parametrize("name", CASES)
def test_a_sample_alone_is_what_it_is_among_others_and_a_saved_model_is_the_same(name):
    case = CASES[name]
    model, inputs = made(case, stir=0.1).eval(), case.inputs()
    count = len(inputs[0])
    alone = model(*(x[1:2] if len(x) == count else x for x in inputs))
    torch.testing.assert_close(alone, model(*inputs)[1:2], rtol=1e-4, atol=1e-4)
    check_saved(model, made(case, 1, stir=0.1).eval(), *inputs)


@pytest.mark.parametrize("name", [
    name for name, case in CASES.items() if case.exported and (EVERY or name in EXPORTED)])
def test_export_for_any_batch(name):
    case = CASES[name]
    model, inputs = made(case, stir=0.1).eval(), case.inputs()
    dims = {word: torch.export.Dim(word, min=3 if word == "nodes" else 2)
            for word in ("samples", "bodies", "edges", "sensors", "nodes")}
    shapes = tuple({place: dims[word] for place, word in axes.items()} for axes in case.axes or (MANY,) * len(inputs))
    program = torch.export.export(model, inputs, dynamic_shapes=(shapes,) if isinstance(model, Of) else shapes).module()
    other = case.other() if case.other else tuple(x[:2] for x in inputs)
    torch.testing.assert_close(program(*other), model(*other), rtol=1e-4, atol=1e-4)
