"""Non-local blocks in a small CNN (Wang et al. 2018): accuracy with each function, attention, and cost by pixels."""

from functools import partial
from typing import Any

import torch

from structconv.commands.table import print_table
from structconv.nn import NonLocalBlock
from structconv_systems.data.images import Images, side_by_side
from structconv_systems.models.non_local import FUNCTIONS, NonLocalNetwork
from structconv_systems.plots import growth_png, images_png
from structconv_systems.recipes.base import Finished, Job, Progress, Run, Study, parameters_of
from structconv_systems.recipes.generated import ImageTask, image_parts, trainings
from structconv_systems.recipes.options.images import NonLocal
from structconv_systems.timing import alternate, exponent, halves

__all__ = ["RUNNER", "measured_costs"]

#: The functions by the names of their trainings.
_NAMED = {function.replace("_", "-"): function for function in FUNCTIONS}
_NONE, *_BLOCKS = _NAMED
_SHORTEST = 14
_HEADERS = ("block", "ms", "exponent", "planned Mflop", "exponent", "planned KiB held", "exponent")


def _parts(recipe: NonLocal) -> dict[str, Images]:
    """Return the images, or pairs of images; no image is in two parts."""
    parts = image_parts(recipe)
    if not recipe.pairs:
        return parts
    counts = {part: recipe.pairs if part == "train" else len(images) for part, images in parts.items()}
    return {part: side_by_side(images, counts[part], seed) for seed, (part, images) in enumerate(parts.items())}


def _jobs(recipe: NonLocal, run: Run | None) -> list[Job]:
    parts = _parts(recipe)
    return [job for name, function in _NAMED.items() if name in (_NONE, *recipe.blocks) for job in trainings(
        recipe, name, partial(NonLocalNetwork, len(parts["train"].names), function=function, channels=recipe.channels,
                              inner=recipe.inner), parts, ImageTask)]


@torch.no_grad()
def measured_costs(recipe: NonLocal, progress: Progress) -> dict[str, Any]:
    """Measure a block of each function by the number of pixels: seconds, and flops and memory of its plan.

    Exponents are fitted to the longer half: with few pixels a plan may differ, and calls cost more than products."""
    blocks = {name: NonLocalBlock(recipe.channels, recipe.inner, function, zero_init=False).eval()
              for name, function in zip(_BLOCKS, NonLocalBlock.FUNCTIONS, strict=True)}
    sides = halves(recipe.longest, _SHORTEST)
    pixels, other_load = [side * side for side in sides], []
    measured: dict[str, dict[str, list[float]]] = {name: {"seconds": [], "flops": [], "bytes": []} for name in blocks}
    for side in sides:
        progress.phase(f"timing blocks over {side} x {side} pixels")
        image = torch.randn(1, recipe.channels, side, side, generator=torch.Generator().manual_seed(0))
        times = alternate({name: partial(block, image) for name, block in blocks.items()}, repeats=recipe.rounds,
                          seconds=60)
        other_load.append(times[_BLOCKS[0]].other_load)
        for name, block in blocks.items():
            cost = block.plan(image).cost
            for key, number in (("seconds", times[name].median), ("flops", cost.flops), ("bytes", cost.peak_bytes)):
                measured[name][key].append(number)
    half = (len(pixels) - 1) // 2
    return {"pixels": pixels, "channels": recipe.channels, "other_load": other_load, "blocks": {
        name: {**row, "exponents": {key: exponent(pixels[half:], costs[half:]) for key, costs in row.items()}}
        for name, row in measured.items()}}


def _finish(recipe: NonLocal, finished: Finished) -> dict[str, Any]:
    tasks = finished.tasks()
    finished.run.draw("looks.png", _looks(tasks, recipe.blocks),
                      "Left: a test image, with the row and column of its brightest pixel. Then, by block, the weights "
                      "of all positions (rows and columns of the block) for that pixel, each on a scale of its own.")
    costs = measured_costs(recipe, finished.progress)
    finished.run.draw("cost.png", growth_png(
        costs["pixels"], costs["blocks"], "flops", x_label="pixels n; dashed: by planned flops",
        y_label="ms of a block"), "Milliseconds of a block by number of pixels, both logarithmic. Dashed: the flops "
        "of its plan, scaled to the time of the largest image.")
    means = {name: figures["test_accuracy"]["mean"] for name, figures in finished.groups.items()}
    return {"cost": costs, "gained": {name: means[name] - means[_NONE] for name in recipe.blocks},
            "parameters": {name: parameters_of(task) for name, task in tasks.items()}}


def _looks(tasks: dict[str, Any], blocks: tuple[str, ...]) -> bytes:
    """Draw the first test image, and the weights of all positions for its brightest pixel by each block."""
    image = next(iter(tasks.values())).parts["test"].inputs[0]
    row, column = divmod(int(image.argmax()), image.shape[1])
    panels = {f"{row}, {column} of": image}
    for name in blocks:
        panels[name] = tasks[name].model.looks(image, (row // 2, column // 2))
    return images_png(list(panels.values()), list(panels))


def _show(recipe: NonLocal, summary: dict[str, Any]) -> None:
    """Print the costs of the blocks, which `evaluate` does not measure."""
    if "cost" in summary:
        costs = summary["cost"]
        title = f"a block of {costs['channels']} channels, over n={costs['pixels'][0]} ... {costs['pixels'][-1]} pixels"
        print_table(_HEADERS, [_row(name, row) for name, row in costs["blocks"].items()], title=title)


def _row(name: str, row: dict[str, Any]) -> tuple[str, ...]:
    def ends(key: str, scale: float) -> str:
        return f"{scale * row[key][0]:.3g} ... {scale * row[key][-1]:.3g}"

    exponents = {key: f"{exponent:.2f}" for key, exponent in row["exponents"].items()}
    return (name, ends("seconds", 1e3), exponents["seconds"], ends("flops", 1e-6), exponents["flops"],
            ends("bytes", 1 / 1024), exponents["bytes"])


RUNNER = Study(jobs=_jobs, columns={"test_accuracy": "accuracy, %", "test_loss": "cross-entropy"},
               finish=_finish, show_more=_show).runner
