"""Pooling by place, by content and by relations, on questions that each of them decides; and their weights."""

from functools import partial

import torch

from structconv.pictures import basis_png
from structconv_systems.data.generated import QUESTIONS, Labeled, entry_channels, labeled_entries
from structconv_systems.models.pooling import POOLINGS, PoolingClassifier
from structconv_systems.recipes.base import Finished, Job, Run, Study
from structconv_systems.recipes.generated import Classification, parts_of, trainings
from structconv_systems.recipes.options.comparisons import Pooling

__all__ = ["RUNNER", "WINS", "PoolingTask", "entries", "network"]

#: The questions that each pooling is predicted to answer.
WINS = {"spatial": ("place",), "context": ("content",), "self-attention": ("content", "relation")}


def network(recipe: Pooling, name: str) -> PoolingClassifier:
    """Build the model of one pooling."""
    return PoolingClassifier(name, recipe.length, entry_channels(recipe.length, recipe.classes), recipe.classes,
                             channels=recipe.channels, dim=recipe.dim)


def entries(recipe: Pooling, question: str) -> dict[str, Labeled]:
    """Draw the parts of the sequences, with the labels of a question."""
    return parts_of(recipe, lambda samples, seed: labeled_entries(question, samples, recipe.length,
                                                                   classes=recipe.classes, seed=seed))


class PoolingTask(Classification):
    """Accuracy, and the mean weight of the entry that decides, in percent."""

    model: PoolingClassifier

    def figures(self, part: str) -> dict[str, float]:
        data = self.parts[part]
        weights = torch.cat([self.model.weights(inputs) for inputs in data.inputs.split(256)])
        return {**super().figures(part), f"{part}_weight": 100 * weights.gather(1, data.positions).mean().item()}


def _jobs(recipe: Pooling, run: Run | None) -> list[Job]:
    return [job for question in QUESTIONS for parts in [entries(recipe, question)] for name in POOLINGS
            for job in trainings(recipe, f"{name}-{question}", partial(network, recipe, name), parts, PoolingTask)]


def _finish(recipe: Pooling, finished: Finished) -> None:
    """Draw the weights of a few test sequences, a picture for each question."""
    tasks = finished.tasks()
    for question in QUESTIONS:
        poolings = {name: tasks[f"{name}-{question}"] for name in POOLINGS}
        finished.run.draw(f"weights-{question}.png", _picture(recipe, poolings),
                          f"Question: {question}. The entry that decides, and the weights of each pooling. Rows: "
                          "entries of a sequence; columns: test sequences; each sums to 1. Last panel: attention "
                          "between the entries of the first test sequence, attended ones as rows.")


@torch.no_grad()
def _picture(recipe: Pooling, tasks: dict[str, PoolingTask]) -> bytes:
    """Draw which entries decide and the weights of each pooling; last, attention between the entries of a sequence."""
    data, count = tasks[POOLINGS[0]].parts["test"], recipe.length
    x, positions = data.inputs[:count], data.positions[:count]
    panels = [torch.zeros(x.shape[:2]).scatter(1, positions, 1.0), *(task.model.weights(x) for task in tasks.values())]
    attention = tasks["self-attention"].model.attention(x[0])
    return basis_png(torch.stack([*(panel.mT for panel in panels), attention]),
                     ["decides", *POOLINGS, "attention of one"], x_label="test sequence", y_label="entry")


RUNNER = Study(jobs=_jobs, columns={"test_accuracy": "accuracy, %", "test_weight": "weight of what decides, %"},
               finish=_finish).runner
