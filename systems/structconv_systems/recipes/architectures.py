"""Convolution, recurrence and self-attention on the same sequences: what each learns, and what a layer costs."""

from functools import partial
from typing import Any

import torch

from structconv.analysis.flops import forward_flops
from structconv.commands.table import print_table
from structconv_systems.data.generated import MARKS, NOISE, Labeled, temporal_order
from structconv_systems.models import architectures as models
from structconv_systems.plots import growth_png
from structconv_systems.recipes.base import Finished, Job, Progress, Run, Study
from structconv_systems.recipes.generated import parts_of, trainings
from structconv_systems.recipes.options.comparisons import Architectures
from structconv_systems.timing import alternate, exponent, halves

__all__ = ["RUNNER", "measured_costs", "network", "sequences"]

_TASKS = ("far", "near")
_SHORTEST = 64
_COST = {"convolution": "k n d²", "dilated": "k n d²", "recurrence": "n d²", "attention": "n² d"}
_HEADERS = ("layer", "flops are", "Mflop", "exponent", "ms", "exponent of time", "of its longer half", "in sequence",
            "path")


def network(recipe: Architectures, architecture: str) -> models.SequenceClassifier:
    """Build the model of one architecture; dilated convolutions have as many layers as reach the whole sequence."""
    layers = models.dilated_layers(recipe.length, recipe.kernel) if architecture == "dilated" else recipe.layers
    return models.SequenceClassifier(architecture, NOISE + MARKS, MARKS ** 2, channels=recipe.channels, layers=layers,
                              kernel=recipe.kernel, heads=recipe.heads)


def sequences(recipe: Architectures, task: str) -> dict[str, Labeled]:
    """Draw the parts of a task: two marks in the first half ("far") or the last entries ("near"), which give the label.
    """
    first, end = (0, recipe.length // 2) if task == "far" else (recipe.length - recipe.near, recipe.length)
    return parts_of(recipe, lambda samples, seed: temporal_order(samples, recipe.length, first=first, end=end,
                                                                 seed=seed))


def _jobs(recipe: Architectures, run: Run | None) -> list[Job]:
    return [job for task in _TASKS for parts in [sequences(recipe, task)] for architecture in models.ARCHITECTURES
            for job in trainings(recipe, f"{architecture}-{task}", partial(network, recipe, architecture), parts)]


@torch.no_grad()
def measured_costs(recipe: Architectures, progress: Progress) -> dict[str, Any]:
    """Time one layer of each architecture by length, and count and predict its flops."""
    layers = {name: models.layer_of(name, recipe.channels, kernel=recipe.kernel, heads=recipe.heads).eval()
              for name in models.ARCHITECTURES}
    lengths = halves(recipe.longest, _SHORTEST)
    measured: dict[str, dict[str, list[float]]] = {
        name: {"seconds": [], "flops": [], "predicted_flops": [], "sequential": [], "path": []} for name in layers}
    other_load = []
    for length in lengths:
        progress.phase(f"timing layers over {length} entries")
        x = torch.randn(1, length, recipe.channels, generator=torch.Generator().manual_seed(0))
        times = alternate({name: partial(layer, x) for name, layer in layers.items()}, repeats=recipe.rounds)
        for name, layer in layers.items():
            cost = models.predicted(name, length, recipe.channels, kernel=recipe.kernel)
            row = {"seconds": times[name].median, "flops": forward_flops(layer, x), "predicted_flops": cost.flops,
                   "sequential": cost.sequential, "path": cost.path}
            for key, number in row.items():
                measured[name][key].append(number)
        other_load.append(times[models.ARCHITECTURES[0]].other_load)
    return {"lengths": lengths, "channels": recipe.channels, "kernel": recipe.kernel, "other_load": other_load,
            "layers": {name: {**row, "exponents": _exponents(lengths, row)} for name, row in measured.items()}}


def _exponents(lengths: list[int], row: dict[str, list[float]]) -> dict[str, float]:
    half = len(lengths) // 2
    return {"seconds": exponent(lengths, row["seconds"]),
            "seconds_of_longer_half": exponent(lengths[half - 1:], row["seconds"][half - 1:]),
            **{key: exponent(lengths, row[key]) for key in ("flops", "predicted_flops")}}


def _finish(recipe: Architectures, finished: Finished) -> dict[str, Any]:
    costs = measured_costs(recipe, finished.progress)
    finished.run.draw("cost.png", growth_png(
        costs["lengths"], costs["layers"], "predicted_flops", x_label="entries n; dashed: by predicted flops",
        y_label="ms of a layer"), "Milliseconds of a layer by number of entries, both logarithmic. Dashed: its "
        "predicted flops, scaled to the time of the longest.")
    return {"cost": costs}


def _show(recipe: Architectures, summary: dict[str, Any]) -> None:
    """Print the costs of the layers, which `evaluate` does not measure."""
    if "cost" in summary:
        costs = summary["cost"]
        shortest, *_, longest = costs["lengths"]
        title = f"a layer of d={costs['channels']}, k={costs['kernel']}, over n={shortest} ... {longest}"
        print_table(_HEADERS, [_row(name, row) for name, row in costs["layers"].items()], title=title, texts=2)


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    exponents = row["exponents"]
    return (name, f"O({_COST[name]})", f"{row['flops'][0] / 1e6:.2f} ... {row['flops'][-1] / 1e6:.0f}",
            f"{exponents['flops']:.2f} (predicted {exponents['predicted_flops']:.2f})",
            f"{1e3 * row['seconds'][0]:.3g} ... {1e3 * row['seconds'][-1]:.3g}", f"{exponents['seconds']:.2f}",
            f"{exponents['seconds_of_longer_half']:.2f}", f"{row['sequential'][0]} ... {row['sequential'][-1]}",
            f"{row['path'][0]} ... {row['path'][-1]}")


RUNNER = Study(jobs=_jobs, columns={"test_accuracy": "accuracy, %"}, finish=_finish, show_more=_show).runner
