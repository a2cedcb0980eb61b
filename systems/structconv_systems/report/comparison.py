"""The report of `compare`: table, accuracy curves, every basis and learned attention, in one HTML file."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from structconv.pictures import basis_png
from structconv_systems.models.digits import PixelNetwork
from structconv_systems.plots import curves_png, images_png
from structconv_systems.report.html import figure, page, paragraph, section, table
from structconv_systems.train.run import Run
from structconv_systems.train.summary import with_spread

__all__ = ["HEADERS", "table_rows", "write_report"]

HEADERS = ("basis", "test accuracy, %", "parameters", "Mflop an image", "seconds", "receptive field, pixels")


def table_rows(summary: dict[str, Any]) -> list[tuple[str, ...]]:
    """The summary's rows under `HEADERS`."""
    return [(entry["title"], with_spread(entry["test_accuracy_mean"], entry["test_accuracy_std"], 1),
             f"{entry['parameters']:,}", f"{entry['flops'] / 1e6:.2f}", f"{entry['seconds']:.1f}",
             f"{entry['receptive_field']} of {entry['pixels']}") for entry in summary["bases"].values()]


def write_report(run: Run, summary: dict[str, Any], models: dict[str, PixelNetwork], images: Tensor) -> None:
    """Write ``pictures/*.png`` and ``report.html`` into the run's folder.

    Args:
        run: with its metrics.
        summary: what the recipe returns.
        models: trained networks by basis.
        images: test images (B, M, 1); content-based bases are drawn for the first.
    """
    titles = {name: entry["title"] for name, entry in summary["bases"].items()}
    curves = _saved(run, "accuracy", curves_png(_curves(run, titles), x_label="step",
                                                y_label="validation accuracy, % (mean over seeds)"))
    parts = [paragraph(f"One network, {len(titles)} ways to relate the pixels of an image. Each was trained with "
                       f"{summary['seeds']} seeds; the spread is the standard deviation over them."),
             section("Results", [table(HEADERS, table_rows(summary)), figure(curves, "Accuracy while training")]),
             section("Bases", list(_basis_figures(run, titles, models, images))),
             section("Learned attention", list(_attention_figures(run, titles, models, images)))]
    run.write("report.html", page("8x8 digits through different bases", parts))


def _saved(run: Run, name: str, png: bytes) -> bytes:
    run.write(f"pictures/{name}.png", png)
    return png


def _curves(run: Run, titles: dict[str, str]) -> dict[str, tuple[list[float], list[float]]]:
    """Mean validation accuracy over seeds by step, for each basis."""
    curves: dict[str, dict[int, list[float]]] = {name: defaultdict(list) for name in titles}
    for line in run.metrics:
        name = line["job"].partition("/")[0]
        if "val_accuracy" in line and name in curves:
            curves[name][line["step"]].append(line["val_accuracy"])
    return {titles[name]: ([float(step) for step in by_step],
                           [100 * sum(values) / len(values) for values in by_step.values()])
            for name, by_step in curves.items()}


def _basis_figures(run: Run, titles: dict[str, str], models: dict[str, PixelNetwork],
                   images: Tensor) -> Iterator[str]:
    for name, model in models.items():
        with torch.no_grad():
            basis = model.first_basis(images[0])
            png = _saved(run, f"basis-{name}", basis_png(basis.dense()))
        yield figure(png, f"{titles[name]}: K = {basis.size} in the first layer; inputs down, outputs "
                          "across.")


def _attention_figures(run: Run, titles: dict[str, str], models: dict[str, PixelNetwork],
                       images: Tensor) -> Iterator[str]:
    """Draw the weights of two pixels, matrix by matrix, for the networks whose basis depends on the image."""
    for name, model in models.items():
        if not model.variant.learned:
            continue
        with torch.no_grad():
            dense_KMN = model.first_basis(images[0]).dense()
        heads = min(len(dense_KMN), 4)
        shape = model.shape
        for pixel in (shape[1] * (shape[0] // 4) + shape[1] // 2, shape[1] * (shape[0] // 2) + shape[1] // 2):
            maps = [images[0, :, 0].view(shape), *(dense_KMN[k, :, pixel].view(shape) for k in range(heads))]
            place = f"row {pixel // shape[1]}, column {pixel % shape[1]}"
            png = _saved(run, f"attention-{name}-{pixel}",
                         images_png(maps, ["image", *(f"A{k + 1}" for k in range(heads))]))
            yield figure(png, f"{titles[name]}: where the pixel in {place} looks, each matrix in its own brightness.")
