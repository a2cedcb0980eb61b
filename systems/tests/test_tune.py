"""The table of validations by learning rate."""

import gzip
import json
import os
import signal

import pytest

from structconv.cli import main
from structconv_systems.data.knowledge import read_classes
from structconv_systems.recipes.citation import CitationTask
from structconv_systems.recipes.generated import Classification
from structconv_systems.recipes.options.knowledge import RGCNEntities
from structconv_systems.recipes.rgcn_entities import EntityTask
from structconv_systems.train.run import Run
from systems.tests.data.test_planetoid import tiny

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


def test_an_interrupted_one_says_how_to_continue(tmp_path, capsys, monkeypatch, untested):
    step = Classification.train_step

    def interrupted(self, number):
        os.kill(os.getpid(), signal.SIGINT)
        return step(self, number)

    with monkeypatch.context() as within:
        within.setattr(Classification, "train_step", interrupted)
        assert main([*WORDS, "--out", str(tmp_path)]) == 75
    assert capsys.readouterr().err.rstrip().endswith("stopped after step 1; the same command continues")
    assert main([*WORDS, "--out", str(tmp_path)]) == 0


def test_a_rate_that_diverges_leaves_the_others_in_the_table(tmp_path, capsys, untested):
    words = [*WORDS, "--out", str(tmp_path), "steps=12", "warmup=0"]
    words[words.index("steps=4")] = "batch_size=8"
    words[2] = "1e30,1e-3"
    assert main(words) == 0
    bad, good = row_of(capsys, "attention-near")
    assert bad == "-" and float(good) > 0


@pytest.mark.parametrize(("words", "groups"), [
    (["cora-gcn", "1e-2,3e-2,1e-2", "dataset=tiny", "epochs=2"], ["cora-gcn", "mlp"]),
    (["cora-gat", "1e-2,3e-2", "dataset=tiny", "epochs=2"], ["cora-gat", "uniform", "mlp"]),
    (["rgcn-entities", "1e-2,3e-2", "epochs=2"], ["rgcn-entities", "relation-dropout", "without-types"])])
def test_a_recipe_of_whole_passes_is_tuned_by_its_validation(words, groups, tmp_path, capsys, monkeypatch):
    """Entities have a validation part there only."""
    (tmp_path / "planetoid").mkdir()
    tiny(tmp_path / "planetoid")
    entities(tmp_path / "kg" / "aifb")
    for kind in (CitationTask, EntityTask):
        monkeypatch.setattr(kind, "test", lambda self: pytest.fail("tested"))
    assert main(["tune", *words, "--data", str(tmp_path), "--out", str(tmp_path / "out"), "--json"]) == 0
    actual = json.loads(capsys.readouterr().out.splitlines()[-1])["validation"]
    assert list(actual) == groups
    folders = [folder for folder in (tmp_path / "out").iterdir() if folder.is_dir()]
    assert len(folders) == 2
    for folder in folders:
        rate = {1e-2: "1e-2", 3e-2: "3e-2"}[json.loads(Run.open(folder).config_text)["learning_rate"]]
        for group, row in actual.items():
            assert row[rate] == max(line["val_accuracy"] for line in Run.open(folder).metrics
                                    if line["job"] == f"{group}/seed-0" and "val_accuracy" in line)


def entities(folder):
    """Ten of two classes, with a fact each."""
    folder.mkdir(parents=True)
    with gzip.open(folder / "aifb_stripped.nt.gz", "wt") as file:
        file.write("".join(f"<x:{n}> <x:in> <x:{'even' if n % 2 == 0 else 'odd'}> .\n" for n in range(10)))
    for name, numbers in (("training", range(7)), ("test", range(7, 10))):
        rows = "".join(f"x:{n}\t{n % 2}\n" for n in numbers)
        (folder / f"{name}Set.tsv").write_text("person\tlabel_kind\n" + rows)


def test_entities_that_are_held_out_do_not_train(tmp_path):
    entities(tmp_path / "facts")
    data = read_classes(*(tmp_path / "facts" / name for name in ("aifb_stripped.nt.gz", "trainingSet.tsv",
                                                                 "testSet.tsv")))
    for share, count in ((0.0, 0), (0.01, 1), (0.5, 4)):
        task = EntityTask(RGCNEntities(data=str(tmp_path), held_out=share), data, seed=1)
        val = task.nodes["val"].tolist() if count else []
        assert len(val) == count and {*val} | {*task.nodes["train"].tolist()} == {*data.nodes["train"].tolist()}
        assert len(task.nodes["train"]) == 7 - count
        assert list(task.validate()) == (["val_loss", "val_accuracy"] if count else [])
        known = dict(zip(data.nodes["train"].tolist(), data.labels["train"].tolist(), strict=True))
        for part in ("train", "val") if count else ("train",):
            assert task.labels[part].tolist() == [known[node] for node in task.nodes[part].tolist()]


@pytest.mark.parametrize(("words", "message"), [
    (["digits", "1e-3"], "a recipe must have groups that train at `learning_rate`; got digits"),
    (["rgcn-entities", "1e-3", "held_out=0"], "trainings must have a validation part; got none"),
    (["rgcn-entities", "1e-3", "held_out=0.99"], "held_out must leave one of 7 training entities; got 0.99"),
    (["tsp", "1e-3", "--groups", "atention"], "--groups must be of the recipe's; got 'atention'. Did you mean"),
    (["tsp", "fast"], "learning_rate must be a number; got 'fast'"),
    (["tsp", "1e-3", "rates=attention=1"], "rates must be given once"),
    (["tsp", ","], "rates must be numbers, with commas between them; got ','"),
    (["transformer", "1e-3"], "--data must name the folder with multi30k")])
def test_a_bad_word_is_one_line(words, message, tmp_path, capsys):
    if words[0] == "rgcn-entities":
        entities(tmp_path / "data" / "kg" / "aifb")
        words = [*words, "--data", str(tmp_path / "data")]
    assert main(["tune", *words, "--out", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
