"""Recipes over sequences made from a seed: train, try, evaluate, resume, tables, pictures, reproduce without files."""

import json
import math

import pytest

from structconv.cli import main
from structconv_systems.data.generated import QUESTIONS
from structconv_systems.models.architectures import ARCHITECTURES
from structconv_systems.models.pooling import POOLINGS
from structconv_systems.recipes.options.comparisons import Architectures, Pooling
from structconv_systems.timing import exponent
from structconv_systems.train.effect import LEARNED, ONE_SEED, share_left
from systems.tests.recipes.runs import Runs, check_laws, summary_of
from tests.support.drawn import slow

TINY = ["steps=4", "validate_every=2", "checkpoint_every=2", "threads=1", "warmup=1", "seeds=2", "samples=40",
        "held_out=16", "batch_size=8", "channels=8"]
TRAINED = {"architectures": [*TINY, "length=16", "near=4", "kernel=4", "longest=256", "rounds=3"],
           "pooling": [*TINY, "length=8", "classes=3", "dim=4"]}
PICTURES = {"architectures": ["cost.png"], "pooling": [f"weights-{question}.png" for question in QUESTIONS]}
EACH = pytest.mark.parametrize("name", list(TRAINED))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"), lambda name: ["train", name, *TRAINED[name]])


@EACH
def test_a_run_keeps_the_laws_and_draws(runs, name, tmp_path, capsys):
    check_laws(runs[name], tmp_path, capsys)
    for picture in PICTURES[name]:
        assert (runs[name] / "pictures" / picture).read_bytes().startswith(b"\x89PNG")
    assert "accuracy, %" in capsys.readouterr().out


def test_the_rows_are_every_layer_on_every_task(runs):
    groups = {name: list(summary_of(runs[name])["groups"]) for name in TRAINED}
    assert groups["architectures"] == [f"{layer}-{task}" for task in ("far", "near") for layer in ARCHITECTURES]
    assert groups["pooling"] == [f"{name}-{question}" for question in QUESTIONS for name in POOLINGS]


def test_the_cost_of_a_layer_is_measured_counted_and_printed(runs, capsys):
    folder = runs["architectures"]
    cost = summary_of(folder)["cost"]
    assert cost["lengths"] == [64, 128, 256]
    for name, slope in (("convolution", 1.0), ("dilated", 1.0), ("recurrence", 1.0), ("attention", 1.7)):
        row = cost["layers"][name]
        assert row["flops"] == row["predicted_flops"]
        assert min(row["seconds"]) > 0
        assert row["exponents"]["flops"] >= slope - 1e-9
    assert cost["layers"]["convolution"]["path"] == [21, 43, 85]
    assert main(["resume", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "over n=64 ... 256" in printed
    assert "64 ... 256" in printed and "21 ... 85" in printed


def test_exponents_are_those_of_powers():
    assert math.isclose(exponent([64, 128, 256], [5.0, 20.0, 80.0]), 2.0)


@EACH
def test_trying_writes_nothing(name, tried):
    actual = tried(["train", name, *TRAINED[name]])
    assert all(row["flops_per_step"] > 0 for row in actual["groups"].values())
    assert actual["trainings"] == 2 * (8 if name == "architectures" else 9)


@slow
def test_recipes_without_files_are_reproduced_without_a_folder(tmp_path, capsys, monkeypatch):
    for kind, name in ((Architectures, "architectures"), (Pooling, "pooling")):
        values = dict(option.split("=") for option in TRAINED[name] if not option.startswith("seeds"))
        monkeypatch.setattr(kind, "presets", {"quick": {**values, "seeds": 1}})
    words = ["reproduce", "architectures", "pooling", "--preset", "quick", "--out", str(tmp_path / "out"), "--json"]
    code = main(words)
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["outcomes"]
    assert code == int(any(row["reason"] != ONE_SEED for row in rows))  # 1 where the sign is wrong
    assert [row["recipe"] for row in rows] == ["architectures", "pooling"]
    assert rows[0]["command"] == "structconv reproduce architectures --preset quick"
    assert "structconv reproduce pooling --preset quick" in (tmp_path / "out" / "results" / "pooling.md").read_text()
    assert main([*words, "--budget", "0"]) == code
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["outcomes"]) == 2


@slow
def test_a_quick_preset_that_is_too_short_for_the_effect_asserts_that_the_model_learns(tmp_path, capsys, monkeypatch):
    values = dict(option.split("=") for option in TRAINED["pooling"] if not option.startswith("seeds"))
    monkeypatch.setattr(Pooling, "presets", {"quick": {**values, "steps": 20, "seeds": 1}})
    monkeypatch.setattr(Pooling, "learning", "loss")
    words = ["reproduce", "pooling", "--preset", "quick", "--out", str(tmp_path / "out"), "--json"]
    code = main(words)
    learned = json.loads(capsys.readouterr().out.splitlines()[-1])["outcomes"][0]["learned"]
    assert learned > 0 and code == (learned >= LEARNED)
    word = "does not learn" if code else "learns"
    assert f"| {word}, x{learned:.2g} |" in (tmp_path / "out" / "results.md").read_text()


@pytest.mark.parametrize(("losses", "share"), [
    ([4.0, 2.0], 0.5), ([4.0, None], 1.0), ([None, 2.0], 1.0), ([0.0, 0.0], 1.0), ([4.0] * 10 + [None, 1.0] * 5, 0.25)])
def test_a_loss_that_is_not_finite_or_zero_did_not_fall(losses, share):
    lines = [{"job": "a/seed-0", "step": step, "loss": loss} for step, loss in enumerate(losses)]
    assert share_left(lines, "loss", {"a"}) == share


def test_a_file_of_outcomes_that_is_damaged_is_refused_before_any_training(tmp_path, capsys):
    (tmp_path / "results.json").write_text("{")
    assert main(["reproduce", "pooling", "--preset", "quick", "--out", str(tmp_path)]) == 3
    assert "results.json, line 1: expected JSON" in capsys.readouterr().err
    assert not (tmp_path / "pooling-quick").exists()


def test_recipes_with_files_ask_for_the_folder(tmp_path, capsys):
    words = ["reproduce", "pooling", "characters", "--preset", "quick", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert "--data must name the folder with text, which characters reads" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_recipes_without_a_figure_are_not_reproduced(capsys):
    assert main(["reproduce", "digits"]) == 2
    assert "structconv compare digits" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "options", "said"), [
    ("architectures", ["near=10"], "must be at least near and at most length // 2"),
    ("architectures", ["length=16"], "must be at least near and at most length // 2"),
    ("architectures", ["heads=3"], "heads must divide channels"),
    ("pooling", ["held_out=8"], "held_out must be at least length=16"),
    ("pooling", ["data=x"], "'data'")])
def test_options_that_compare_nothing_are_refused(name, options, said, refused):
    refused(["train", name, *options], said)
