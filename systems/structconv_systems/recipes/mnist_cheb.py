"""MNIST by Chebyshev filters on the graph of the pixels, and by a CNN of the same size (Defferrard et al. 2016)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from structconv import ConfigError, Graph, Grid
from structconv.structures.coarsening import coarsened
from structconv_systems.data.images import Images
from structconv_systems.models.mnist_cheb import GraphLeNet, GridLeNet, pixel_graph
from structconv_systems.pictures import graphs
from structconv_systems.recipes.base import Finished, Job, Run, Study, parameters_of
from structconv_systems.recipes.generated import ImageTask, image_parts, trainings
from structconv_systems.recipes.options.images import MnistCheb

__all__ = ["RUNNER", "of_graph", "of_grid"]


def of_graph(recipe: MnistCheb, images: Images) -> GraphLeNet:
    """Build the model over the graph of the pixels of such images."""
    height, width = images.inputs.shape[1:]
    if recipe.neighbors >= height * width:
        raise ConfigError(recipe.name, f"neighbors must be below the {height * width} pixels", recipe.neighbors)
    levels = min(height, width).bit_length() - 1
    if len(recipe.channels) > levels:
        raise ConfigError(recipe.name, f"channels must be of {levels} levels at most: the CNN beside the graph halves "
                          f"images of {height} x {width} behind each", recipe.channels)
    return GraphLeNet(pixel_graph(height, width, recipe.neighbors), len(images.names), channels=recipe.channels,
                      order=recipe.order, hidden=recipe.hidden, dropout=recipe.dropout)


def of_grid(recipe: MnistCheb, images: Images) -> GridLeNet:
    """Build the CNN of the same size."""
    height, width = images.inputs.shape[1:]
    return GridLeNet((height, width), len(images.names), channels=recipe.channels, kernel=recipe.kernel,
                     hidden=recipe.hidden, dropout=recipe.dropout)


def _jobs(recipe: MnistCheb, run: Run | None) -> list[Job]:
    parts = image_parts(recipe)
    return [job for group, make in (("graph", of_graph), ("cnn", of_grid))
            for job in trainings(recipe, group, partial(make, recipe, parts["train"]), parts, ImageTask)]


def _finish(recipe: MnistCheb, finished: Finished) -> dict[str, Any]:
    """Count parameters, and draw the graph of the pixels and of their clusters."""
    tasks = finished.tasks()
    height, width = tasks["graph"].parts["train"].inputs.shape[1:]
    points = Grid((height, width)).coordinates().flip(-1).float() * torch.tensor([1.0, -1.0])
    graph, edges = pixel_graph(height, width, recipe.neighbors), {}
    edges[f"{graph.num_nodes} pixels"] = graph.edge_index
    cluster = torch.arange(graph.num_nodes)
    for _ in recipe.channels:
        clusters, graph = coarsened(graph, 2)
        cluster = clusters.target[cluster]
        edges[f"{graph.num_nodes} clusters"] = _within(cluster, graph)
    finished.run.draw("graphs", graphs(points, edges), "The graph of the pixels, then its clusters, each drawn from "
                      "its first pixel. Axes: column and row of a pixel.")
    return {"parameters": {name: parameters_of(task) for name, task in tasks.items()}}


def _within(cluster: Tensor, graph: Graph) -> Tensor:
    """Return edges from each cluster's first pixel to its others, (2, E)."""
    order = cluster.argsort(stable=True)
    sizes = cluster.bincount(minlength=graph.num_nodes)
    first = order[sizes.cumsum(0) - sizes]
    return torch.stack([first[cluster], torch.arange(len(cluster))])


RUNNER = Study(jobs=_jobs, columns={"test_accuracy": "accuracy, %", "test_loss": "cross-entropy"},
               finish=_finish).runner
