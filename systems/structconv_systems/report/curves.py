"""Validation figures of trainings, over steps and over minutes."""

from collections import defaultdict
from collections.abc import Mapping

from structconv_systems.plots import seeds_png
from structconv_systems.train.run import Run

__all__ = ["CURVES", "training_curves"]

#: The caption of such a picture.
CURVES = ("{} while training: a curve for each seed, a color for each group; left over steps, right over minutes (the "
          "step times the mean time of a step of this training, with validation).")

_Points = list[tuple[float, float]]


def training_curves(run: Run, seconds: Mapping[str, float], titles: Mapping[str, str] | None = None
                    ) -> dict[str, bytes]:
    """Return a PNG for each validation figure that a training has more than once, by the figure's name.

    Args:
        run: with its metrics.
        seconds: how long each training took, by its name.
        titles: names of groups for people.
    """
    points: dict[str, dict[str, _Points]] = defaultdict(lambda: defaultdict(list))
    last: dict[str, int] = {}
    for line in run.metrics:
        last[line["job"]] = line["step"]
        for metric, value in line.items():
            if metric.startswith("val_") and value is not None:
                points[metric][line["job"]].append((line["step"], value))
    pictures = {}
    for metric, jobs in points.items():
        steps, minutes = (defaultdict(list) for _ in range(2))
        for job, curve in jobs.items():
            if len(curve) > 1:
                group, (x, y) = job.partition("/")[0], zip(*curve, strict=True)
                title = (titles or {}).get(group, group)
                steps[title].append((x, y))
                minutes[title].append(([seconds[job] / 60 * step / last[job] for step in x], y))
        if steps:
            pictures[metric] = seeds_png({"step": steps, "minutes": minutes}, y_label=metric.replace("_", " "))
    return pictures
