"""Training on a citation graph by the published protocols: the three Cora recipes."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.bases.sparse import Sparse
from structconv.structures.graph import Graph
from structconv_systems.data.planetoid import Planetoid, read_planetoid
from structconv_systems.models import citation as networks
from structconv_systems.recipes.base import Job, Parts, Run, Schedule, Study, Task
from structconv_systems.recipes.options.graphs import Cora, CoraCheb, CoraGAT, CoraGCN
from structconv_systems.train.stopping import LossWindow, Patience

__all__ = ["RUNNER", "CitationTask", "network", "row_normalized"]

_WORDS, _GCN, _UNIFORM = "mlp", "gcn", "uniform"


class CitationTask(Task):
    """Full-batch classification of nodes: one step is one epoch.

    The loss is the cross-entropy over the training nodes. The weight decay is Adam's L2 penalty, on the first layer
    (Kipf and Welling) or on everything (Velickovic et al.).
    """

    def __init__(self, recipe: Cora, data: Planetoid, group: str = "") -> None:
        self.words, self.graph = row_normalized(data), Graph(data.edge_index, num_nodes=data.num_nodes)
        self.labels = data.labels
        self.parts = Parts({"train": data.train, "val": data.validation, "test": data.test}, of="nodes")
        model = network(recipe, data, group)
        self.model: nn.Module = model
        self.attends = isinstance(recipe, CoraGAT)
        decayed = model.parameters() if self.attends else model.first.parameters()
        chosen = {id(parameter) for parameter in decayed}
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.model.parameters() if id(p) in chosen], "weight_decay": recipe.weight_decay},
            {"params": [p for p in self.model.parameters() if id(p) not in chosen]}]
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(
            [group for group in groups if group["params"]], lr=recipe.learning_rate)

    def train_step(self, step: int) -> dict[str, float]:
        """One epoch over the training nodes."""
        self.model.train()
        self.optimizer.zero_grad()
        loss, accuracy = self._measure(self.model(self.words, self.graph), "train")
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item(), "accuracy": accuracy}

    def validate(self) -> dict[str, float]:
        """Loss and accuracy in percent on the validation nodes; the rule of Kipf and Welling includes weight decay."""
        loss, accuracy = self._measure(self._outputs(), "val")
        penalty = 0.0 if self.attends else sum(
            group["weight_decay"] / 2 * sum(float(p.detach().square().sum()) for p in group["params"])
            for group in self.optimizer.param_groups)
        return {"val_loss": loss.item() + penalty, "val_accuracy": accuracy}

    def test(self) -> dict[str, float]:
        """Accuracy on the test nodes, in percent."""
        return {"test_accuracy": self._measure(self._outputs(), "test")[1]}

    def _outputs(self) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            return self.model(self.words, self.graph)

    def _measure(self, outputs: Tensor, part: str) -> tuple[Tensor, float]:
        nodes = self.parts[part]
        outputs, labels = outputs[nodes], self.labels[nodes]
        return F.cross_entropy(outputs, labels), 100 * int((outputs.argmax(-1) == labels).sum()) / len(labels)


def network(recipe: Cora, data: Planetoid, group: str = "") -> networks.CitationNetwork:
    """Build the model; group ``mlp`` has no graph, and in ``uniform`` all neighbors have equal weights."""
    sizes = data.num_features, data.num_classes
    assert isinstance(recipe, CoraGCN | CoraGAT)
    if group == _WORDS:
        wide = recipe.heads * recipe.hidden if isinstance(recipe, CoraGAT) else recipe.hidden
        return networks.perceptron(*sizes, hidden=wide, dropout=recipe.dropout)
    if isinstance(recipe, CoraGAT):
        return networks.gat(*sizes, heads=recipe.heads, hidden=recipe.hidden, dropout=recipe.dropout,
                            uniform=group == _UNIFORM)
    if isinstance(recipe, CoraCheb):
        return networks.chebyshev(*sizes, hidden=recipe.hidden, order=recipe.order, dropout=recipe.dropout)
    assert isinstance(recipe, CoraGCN)
    return networks.gcn(*sizes, hidden=recipe.hidden, dropout=recipe.dropout)


def row_normalized(data: Planetoid) -> Sparse:
    """The features as a basis from words to papers whose values sum to 1 for each paper that has words."""
    matrix = data.features.tocoo()
    sums = np.asarray(data.features.sum(1)).ravel()
    values = torch.from_numpy(matrix.data / sums[matrix.row])
    edges = torch.from_numpy(np.stack([matrix.col, matrix.row]).astype("int64"))
    return Sparse(Graph(edges, num_inputs=data.num_features, num_outputs=data.num_nodes), values)


def _jobs(recipe: Cora, run: Run | None) -> list[Job]:
    data = read_planetoid(recipe.data, recipe.dataset, verify=recipe.verify)
    return [Job(name=f"{group}/seed-{seed}", make=partial(CitationTask, own, data, group),
                schedule=partial(_schedule, recipe, seed), higher=True,
                metric="val_accuracy" if own is recipe else "")  # the rate of others is their own
            for group, own in _groups(recipe).items() for seed in range(recipe.seeds)]


def _groups(recipe: Cora) -> dict[str, Cora]:
    """Return the options of each group; the GCN beside a GAT has options of its own."""
    if not isinstance(recipe, CoraGAT):
        return {recipe.name: recipe, _WORDS: recipe}
    gcn = CoraGCN(data=recipe.data, dataset=recipe.dataset, device=recipe.device, compile=recipe.compile)
    return {recipe.name: recipe, _GCN: gcn, _UNIFORM: recipe, _WORDS: recipe}


def _schedule(recipe: Cora, seed: int) -> Schedule:
    assert isinstance(recipe, CoraGCN | CoraGAT)
    stopping = Patience(recipe.patience) if isinstance(recipe, CoraGAT) else LossWindow(recipe.window)
    return Schedule(steps=recipe.epochs, seed=seed, stopping=stopping, device=recipe.device, compile=recipe.compile)


RUNNER = Study(jobs=_jobs, columns={"test_accuracy": "test accuracy, %"}).runner
