"""The recipes on images: train, pictures, evaluate on other images, resume, what they refuse."""

import numpy as np
import pytest
import torch
from PIL import Image

from structconv.cli import main
from structconv.errors import DataError
from structconv_systems.data.images import Images, side_by_side
from structconv_systems.models.non_local import FUNCTIONS
from systems.tests.data.test_idx import write_mnist
from systems.tests.recipes.runs import Runs, check_laws, evaluated, others, summary_of

TINY = ["steps=2", "validate_every=2", "checkpoint_every=1", "warmup=1", "held_out=10", "batch_size=8", "seeds=1"]
OPTIONS = {"mnist-cheb": [*TINY, "channels=2,4", "order=3", "kernel=3", "hidden=8"],
           "nonlocal": [*TINY, "channels=4", "inner=2", "longest=56", "rounds=3", "pairs=40"]}
PICTURES = {"mnist-cheb": ["graphs.png", "graphs.svg"], "nonlocal": ["looks.png", "cost.png"]}
EACH = pytest.mark.parametrize("name", list(OPTIONS))


def write(folder, stem, count, side=8, classes=3):
    random = np.random.default_rng(count)
    write_mnist(folder, stem, random.integers(0, 256, (count, side, side)), np.arange(count) % classes, packed=True)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder, "train", 30)
    write(folder, "t10k", 12)
    write(folder, "other", 7)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data):
    return Runs(tmp_path_factory.mktemp("runs"), lambda name: ["train", name, "--data", str(data), *OPTIONS[name]])


@EACH
def test_a_run_keeps_the_laws_says_its_figure_and_draws(runs, name, tmp_path, capsys):
    summary = check_laws(runs[name], tmp_path, capsys)
    groups = ["graph", "cnn"] if name == "mnist-cheb" else [function.replace("_", "-") for function in FUNCTIONS]
    assert list(summary["groups"]) == list(summary["parameters"]) == groups
    assert (summary["headline"]["state"], summary["headline"]["low"]) == ("not shown", None)  # of one seed
    assert all((runs[name] / "pictures" / picture).stat().st_size > 1000 for picture in PICTURES[name])


@EACH
def test_other_images_are_measured(runs, name, data, tmp_path, capsys, monkeypatch):
    """By a stem in the folder of the data, and by a folder with one for each class."""
    monkeypatch.chdir(tmp_path)
    for label in ("0", "1", "2"):
        (tmp_path / "own" / label).mkdir(parents=True)
        Image.new("L", (8, 8), 80).save(tmp_path / "own" / label / "a.png")
    actual = [evaluated(runs[name], capsys, "--test", test) for test in ("other", "own")]
    assert [summary["test"]["name"] for summary in actual] == ["other", "own"]
    first = next(iter(actual[1]["groups"].values()))
    if name == "mnist-cheb":  # three images, one of each class
        assert first["test_accuracy"]["mean"] == pytest.approx(100 / 3)


def test_pairs_are_of_one_part_and_half_of_them_the_same():
    images = torch.arange(60.0).view(60, 1, 1).expand(-1, 2, 3) / 60
    data = Images(inputs=images, labels=torch.arange(60) % 3, names=("a", "b", "c"))
    pairs = side_by_side(data, 400, 0)
    assert pairs.inputs.shape == (400, 2, 6)
    left, right = (60 * pairs.inputs[:, 0, column] for column in (0, 3))
    assert torch.equal((left.round() % 3 == right.round() % 3).long(), pairs.labels)
    assert 0.4 < pairs.labels.float().mean() < 0.6
    assert torch.equal(side_by_side(data, 400, 0).inputs, pairs.inputs)
    with pytest.raises(DataError, match="two classes at least"):
        side_by_side(data[:1], 4, 0)


def test_the_costs_of_blocks(runs, capsys):
    cost = summary_of(runs["nonlocal"])["cost"]
    assert cost["pixels"] == [196, 784, 3136]
    exponents = {name: row["exponents"] for name, row in cost["blocks"].items()}
    assert exponents["dot-product"]["flops"] == pytest.approx(1, abs=0.01)
    assert all(exponents[name]["flops"] > 1.8 for name in exponents if name != "dot-product")
    assert all(actual["bytes"] == pytest.approx(1, abs=0.01) for actual in exponents.values())
    assert all(min(row["seconds"]) > 0 for row in cost["blocks"].values())
    assert main(["resume", str(runs["nonlocal"])]) == 0
    assert "over n=196 ... 3136 pixels" in capsys.readouterr().out


@pytest.mark.parametrize(("change", "said", "code"), [
    ("held_out=30", "more than held_out=30 images; got 30", 3), ("test=small", "images of 8 x 8 pixels", 3),
    ("test=more", "expected the classes 0, 1, 2; got 0, 1, 2, 3", 3), ("train=none", "expected a file", 3),
    ("channels=", "channels must be given for one level", 2), ("kernel=4", "kernel must be odd", 2),
    ("channels=2,2,2,2", "channels must be of 3 levels at most", 2)])
def test_what_does_not_fit_is_refused(change, said, code, data, refused):
    write(data, "small", 4, side=6)
    write(data, "more", 4, classes=4)
    refused(["train", "mnist-cheb", "--data", str(data), *others(OPTIONS["mnist-cheb"], change)], said, code)


def test_channels_of_the_block_are_even(data, refused):
    refused(["train", "nonlocal", "--data", str(data), "channels=5"], "channels must be even")
