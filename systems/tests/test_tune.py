"""The table of validations by learning rate."""

from __future__ import annotations

import json

import pytest

from structconv.cli import main
from structconv_systems.recipes.generated import Classification
from structconv_systems.train.run import Run

WORDS = ["tune", "architectures", "1e-4,1e-2", "--preset", "quick", "--groups", "recurrence-near,attention-near",
         "samples=64", "held_out=32", "steps=4", "validate_every=2", "channels=8", "length=32", "longest=128"]


def row_of(capsys, group):
    """The cells of a group in the table."""
    line = next(line for line in capsys.readouterr().out.splitlines() if group in line)
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


@pytest.fixture
def untested(monkeypatch):
    monkeypatch.setattr(Classification, "test", lambda self: pytest.fail("tested"))


def test_it_says_the_best_validation_of_each_group_and_rate(tmp_path, capsys, monkeypatch, untested):
    assert main([*WORDS, "--out", str(tmp_path), "--json"]) == 0
    actual = json.loads(capsys.readouterr().out.splitlines()[-1])["validation"]
    assert {group: list(row) for group, row in actual.items()} == {
        "recurrence-near": ["1e-4", "1e-2"], "attention-near": ["1e-4", "1e-2"]}
    for folder in tmp_path.iterdir():
        rate = {1e-4: "1e-4", 1e-2: "1e-2"}[json.loads(Run.open(folder).config_text)["learning_rate"]]
        for group, row in actual.items():
            losses = [line["val_loss"] for line in Run.open(folder).metrics
                      if line["job"] == f"{group}/seed-0" and "val_loss" in line]
            assert len(losses) == 2 and row[rate] == min(losses)
    monkeypatch.setattr(Classification, "train_step", lambda self, step: pytest.fail("trained"))
    assert main([*WORDS, "--out", str(tmp_path)]) == 0
    assert row_of(capsys, "attention-near") == [f"{best:.4g}" for best in actual["attention-near"].values()]


def test_a_rate_that_diverges_leaves_the_others_in_the_table(tmp_path, capsys, untested):
    words = [*WORDS, "--out", str(tmp_path), "steps=12", "warmup=0"]
    words[words.index("steps=4")] = "batch_size=8"
    words[2] = "1e30,1e-3"
    assert main(words) == 0
    bad, good = row_of(capsys, "attention-near")
    assert bad == "-" and float(good) > 0


@pytest.mark.parametrize(("words", "message"), [
    (["cora-gcn", "1e-3"], "a recipe must have groups that train at `learning_rate`; got cora-gcn"),
    (["tsp", "1e-3", "--groups", "atention"], "--groups must be of the recipe's; got 'atention'. Did you mean"),
    (["tsp", "fast"], "learning_rate must be a number; got 'fast'"),
    (["tsp", "1e-3", "rates=attention=1"], "rates must be given once"),
    (["tsp", ","], "rates must be numbers, with commas between them; got ','"),
    (["transformer", "1e-3"], "--data must name the folder with multi30k")])
def test_a_bad_word_is_one_line(words, message, tmp_path, capsys):
    assert main(["tune", *words, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
