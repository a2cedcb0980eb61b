"""The page of a study: curves of every seed, captions, and what a run of an earlier version lacks."""

import json
import re
from pathlib import Path
from unittest import mock

import pytest

import structconv_systems.recipes
from structconv.cli import main
from structconv_systems.recipes.register import recipe_of
from structconv_systems.report import page
from structconv_systems.train.run import Run

SEEDS = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Sixteen trainings of eight groups."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["channels=4", "layers=1", "length=16", "near=4", "samples=20", "held_out=10", "batch_size=10", "steps=4",
             "validate_every=2", "longest=512", "rounds=3", f"seeds={SEEDS}"]
    assert main(["train", "architectures", *words, "--out", str(folder)]) == 0
    return folder


def test_each_seed_has_a_curve_over_steps_and_over_minutes(run):
    seconds = {name: row["seconds"] for name, row in json.loads((run / "summary.json").read_text())["results"].items()}
    with mock.patch.object(page, "seeds_png", lambda frames, y_label: frames):
        drawn = page.training_curves(Run.open(run), seconds)
    assert drawn.keys() == {"val_loss", "val_accuracy"}
    groups = {name.partition("/")[0] for name in seconds}
    for frames in drawn.values():
        assert frames["step"].keys() == frames["minutes"].keys() == groups
        assert all(len(each) == SEEDS and all(x == (2, 4) for x, _ in each) for each in frames["step"].values())
    for group, each in drawn["val_loss"]["minutes"].items():
        ends = [seconds[f"{group}/seed-{seed}"] / 60 for seed in range(SEEDS)]
        assert [x for x, _ in each] == [[end / 2, end] for end in ends]


def test_the_page_has_split_curves_and_captions(run):
    page = (run / "report.html").read_text()
    assert "<td>split</td><td>train 20, val 10, test 10 generated sequences</td>" in page
    assert "val loss while training: a curve for each seed" in page
    assert "Milliseconds of a layer by number of entries" in page


def test_a_run_of_an_earlier_version_has_a_page(run, tmp_path):
    """Without captions and without the split of its trainings."""
    for name in ("config.json", "environment.json", "files.json", "metrics.jsonl", "pictures/cost.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((run / name).read_bytes())
    summary = json.loads((run / "summary.json").read_text())
    for row in summary["results"].values():
        del row["split"]
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    entry, recipe = recipe_of(Run.open(tmp_path))
    entry.runner().report(recipe, Run.open(tmp_path))
    page = (tmp_path / "report.html").read_text()
    assert "<figcaption>cost</figcaption>" in page and "<td>split</td>" not in page


def test_recipes_draw_pictures_with_captions():
    """`Run.draw`, which takes a caption, is the way into the folder."""
    sources = {path.name: path.read_text(encoding="utf-8")
               for path in Path(structconv_systems.recipes.__file__).parent.glob("*.py")}
    assert sum(len(re.findall(r"run\.draw\(", text)) for text in sources.values()) > 20
    assert not [name for name, text in sources.items() if re.search(r"write\(\s*f?\"pictures", text)]
