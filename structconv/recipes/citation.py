"""Training on a citation graph by the published protocols: the three Cora recipes."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.bases.sparse import Sparse
from structconv.data.planetoid import Planetoid, read_planetoid
from structconv.models import citation as networks
from structconv.recipes.options.citation import Cora, CoraCheb, CoraGAT, CoraGCN
from structconv.report.table import print_table
from structconv.structures.graph import Graph
from structconv.train.checkpoint import Checkpoints
from structconv.train.interrupt import Interrupt
from structconv.train.loop import Schedule, Task, fit
from structconv.train.progress import Progress
from structconv.train.run import Run
from structconv.train.stopping import LossWindow, Patience, Stopping
from structconv.train.study import Runner
from structconv.train.summary import mean_and_std

__all__ = ["CitationTask", "evaluate", "execute", "show"]


class CitationTask(Task):
    """Full-batch classification of nodes: one step is one epoch.

    The loss is the cross-entropy over the training nodes. The weight decay is Adam's L2 penalty, on the first layer
    (Kipf and Welling) or on everything (Velickovic et al.).
    """

    def __init__(self, recipe: Cora, data: Planetoid) -> None:
        self.words, self.graph = row_normalised(data), Graph(data.edge_index, num_nodes=data.num_nodes)
        self.labels, self.parts = data.labels, {"train": data.train, "val": data.validation, "test": data.test}
        model = network(recipe, data)
        self.model: nn.Module = model
        decayed = model.parameters() if isinstance(recipe, CoraGAT) else model.first.parameters()
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
        """Loss, weight decay included as in the published rule, and accuracy on the validation nodes."""
        loss, accuracy = self._measure(self._outputs(), "val")
        penalty = sum(group["weight_decay"] / 2 * sum(float(p.detach().square().sum()) for p in group["params"])
                      for group in self.optimizer.param_groups)
        return {"val_loss": loss.item() + penalty, "val_accuracy": accuracy}

    def test(self) -> dict[str, float]:
        """Accuracy on the test nodes."""
        return {"test_accuracy": self._measure(self._outputs(), "test")[1]}

    def _outputs(self) -> Tensor:
        self.model.eval()
        with torch.no_grad():
            return self.model(self.words, self.graph)

    def _measure(self, outputs: Tensor, part: str) -> tuple[Tensor, float]:
        nodes = self.parts[part]
        outputs, labels = outputs[nodes], self.labels[nodes]
        return F.cross_entropy(outputs, labels), int((outputs.argmax(-1) == labels).sum()) / len(labels)


def network(recipe: Cora, data: Planetoid) -> networks.CitationNetwork:
    """The recipe's model."""
    sizes = data.num_features, data.num_classes
    if isinstance(recipe, CoraGAT):
        return networks.gat(*sizes, heads=recipe.heads, hidden=recipe.hidden, dropout=recipe.dropout)
    if isinstance(recipe, CoraCheb):
        return networks.chebyshev(*sizes, hidden=recipe.hidden, order=recipe.order, dropout=recipe.dropout)
    assert isinstance(recipe, CoraGCN)
    return networks.gcn(*sizes, hidden=recipe.hidden, dropout=recipe.dropout)


def row_normalised(data: Planetoid) -> Sparse:
    """The features as a basis from words to papers whose values sum to 1 for each paper that has words."""
    import numpy as np

    matrix = data.features.tocoo()
    sums = np.asarray(data.features.sum(1)).ravel()
    values = torch.from_numpy(matrix.data / sums[matrix.row])
    edges = torch.from_numpy(np.stack([matrix.col, matrix.row]).astype("int64"))
    return Sparse(Graph(edges, num_inputs=data.num_features, num_outputs=data.num_nodes), values)


def execute(recipe: Cora, run: Run, interrupt: Interrupt, progress: Progress) -> dict[str, Any]:
    """Train with each seed, or continue; the run's ``summary.json`` holds what is returned."""
    progress.phase("reading Cora")
    data = read_planetoid(recipe.data, verify=recipe.verify)
    progress.jobs(recipe.seeds)
    results = []
    for seed in range(recipe.seeds):
        schedule = Schedule(steps=recipe.epochs, seed=seed, stopping=_stopping(recipe))
        result = fit(lambda: CitationTask(recipe, data), schedule, run=run, job=_job(seed), interrupt=interrupt,
                     progress=progress)
        progress.job_done(f"seed {seed}: test accuracy {100 * result['test_accuracy']:.2f} after {result['steps']} "
                          f"epochs, {result['seconds']:.1f} s")
        results.append(result)
    summary = _summary(recipe, run, [result["test_accuracy"] for result in results],
                       sum(result["seconds"] for result in results))
    return run.write_summary(summary)


def evaluate(recipe: Cora, run: Run, progress: Progress) -> dict[str, Any]:
    """Test accuracies of the final weights in the run's checkpoints, computed anew."""
    progress.phase("reading Cora")
    data, start = read_planetoid(recipe.data, verify=recipe.verify), time.perf_counter()
    task = CitationTask(recipe, data)
    accuracies = []
    for seed in range(recipe.seeds):
        task.model.load_state_dict(Checkpoints(run.checkpoint_folder(_job(seed))).final(progress.note).weights)
        accuracies.append(task.test()["test_accuracy"])
    return _summary(recipe, run, accuracies, time.perf_counter() - start)


def show(recipe: Cora, summary: dict[str, Any]) -> None:
    """Print mean and deviation beside the paper's figure."""
    measured = f"{summary['test_accuracy_mean']:.2f} ± {summary['test_accuracy_std']:.2f}"
    print_table(("recipe", "seeds", "test accuracy, %", "paper, %", "seconds"),
                [(recipe.name, str(recipe.seeds), measured, summary["paper"], f"{summary['seconds']:.1f}")])
    print(f"run folder: {summary['run']}")


def _job(seed: int) -> str:
    return f"seed-{seed}"


def _stopping(recipe: Cora) -> Stopping:
    if isinstance(recipe, CoraGAT):
        return Patience(recipe.patience)
    assert isinstance(recipe, CoraGCN)
    return LossWindow(recipe.window)


def _summary(recipe: Cora, run: Run, accuracies: list[float], seconds: float) -> dict[str, Any]:
    mean, std = mean_and_std([100 * accuracy for accuracy in accuracies])
    return {"recipe": recipe.name, "seeds": recipe.seeds, "test_accuracy_mean": mean, "test_accuracy_std": std,
            "seconds": seconds, "paper": recipe.paper, "test_accuracies": [100 * a for a in accuracies],
            "run": str(run.folder)}


RUNNER = Runner(execute=execute, evaluate=evaluate, show=show)
