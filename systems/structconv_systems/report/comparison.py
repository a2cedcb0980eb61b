"""The report of `compare`: table, accuracy curves, every basis and learned attention, in one HTML file."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from structconv.pictures import basis_png
from structconv_systems.models.digits import PixelNetwork
from structconv_systems.plots import images_png
from structconv_systems.report.page import CURVES, figure, page, paragraph, section, table, training_curves
from structconv_systems.train.effect import with_spread
from structconv_systems.train.run import Run

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
        models: trained networks by basis. images: test images (B, M, 1); the first one is drawn.
    """
    titles = {name: entry["title"] for name, entry in summary["bases"].items()}
    seconds = {f"{name}/seed-{seed}": entry["seconds"] / summary["seeds"] for name, entry in summary["bases"].items()
               for seed in range(summary["seeds"])}
    caption = CURVES.format("Validation accuracy")
    drawn = training_curves(run, seconds, titles).get("val_accuracy")
    curves = [_saved(run, "accuracy", drawn, caption)] if drawn else []
    parts = [paragraph(f"One network, {len(titles)} ways to relate the pixels of an image. Each was trained with "
                       f"{summary['seeds']} seeds; the spread is the standard deviation over them."),
             section("Results", [table(HEADERS, table_rows(summary)), *curves]),
             section("Bases", list(_basis_figures(run, titles, models, images))),
             section("Learned attention", list(_attention_figures(run, titles, models, images)))]
    run.write("report.html", page("8x8 digits through different bases", parts))


def _saved(run: Run, name: str, png: bytes, caption: str) -> str:
    run.draw(f"{name}.png", png, caption)
    return figure(png, caption)


def _basis_figures(run: Run, titles: dict[str, str], models: dict[str, PixelNetwork], images: Tensor) -> Iterator[str]:
    for name, model in models.items():
        with torch.no_grad():
            basis = model.first_basis(images[0])
            yield _saved(run, f"basis-{name}", basis_png(basis.dense(), x_label="output pixel", y_label="input pixel"),
                         f"{titles[name]}: K = {basis.size} in the first layer. Rows: input pixels; columns: output "
                         "pixels, in row-major order.")


def _attention_figures(run: Run, titles: dict[str, str], models: dict[str, PixelNetwork],
                       images: Tensor) -> Iterator[str]:
    """Draw the weights of all pixels for two pixels by each network whose basis depends on the image."""
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
            yield _saved(run, f"attention-{name}-{pixel}",
                         images_png(maps, ["image", *(f"A{k + 1}" for k in range(heads))]),
                         f"{titles[name]}: weights of all pixels (rows and columns of the image) for the pixel in "
                         f"{place}, each matrix on its own scale.")
