"""The recipe `molecules` as its user meets it: train, evaluate on other files, resume, skip, and what is refused."""

import math

import pytest
import torch

from structconv.cli import main
from structconv_systems.data.molecules import descriptors
from structconv_systems.recipes.molecules import RUNNER, Forest, MoleculesTask, Table
from structconv_systems.recipes.options.graphs import Molecules
from structconv_systems.train.parts import final_evaluation
from systems.tests.recipes.runs import check_laws, evaluated, others, summary_of, trained

pytest.importorskip("rdkit")
TINY = ["file=a.csv", "target=carbons", "steps=6", "validate_every=3", "checkpoint_every=2", "warmup=2", "channels=8",
        "edge_hidden=6", "batch_size=8", "members=2", "seeds=1", "readout_steps=2"]
COUNT = 40


def rows(count, first=1):
    """Chains and rings, and how many carbons each has."""
    made = [("C" * (i % 7 + 1) + "O", i % 7 + 1) if i % 2 else ("C1" + "C" * (i % 5 + 2) + "1", i % 5 + 3)
            for i in range(first, first + count)]
    return "smiles,carbons\n" + "".join(f"{smiles},{carbons}\n" for smiles, carbons in made)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    (root / "a.csv").write_text(rows(COUNT))
    return root


def words_of(folder, *more):
    return ["train", "molecules", "--data", str(folder), *others(TINY, *more)]


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run", words_of(folder))


def test_a_run_keeps_the_laws_and_has_its_figures_and_pictures(run, tmp_path, capsys):
    summary = check_laws(run, tmp_path, capsys)
    assert summary["headline"]["published"].startswith("0.58 on ESOL")
    assert set(summary["results"]) == {"molecules/seed-0", "random-forest/seed-0", "random-forest-descriptors/seed-0"}
    errors = {name: group["test_rmse"]["mean"] for name, group in summary["groups"].items()}
    best = min(errors["random-forest"], errors["random-forest-descriptors"])
    assert summary["headline"]["value"] == pytest.approx(best / errors["molecules"])
    assert summary["skipped"] == 0
    assert (run / "pictures" / "predicted.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "pictures" / "predicted.svg").read_bytes().startswith(b"<?xml")
    assert "RMSE" in (run / "report.html").read_text()


@pytest.mark.parametrize(("options", "published"), [
    ({"file": "FreeSolv.csv", "target": "expt"}, 1.765), ({"file": "Lipophilicity.csv", "target": "exp"}, 1.218),
    ({}, 1.845), ({"target": "Molecular Weight"}, None), ({"test": "my.csv"}, None), ({"file": "my.csv"}, None)])
def test_the_published_effect_is_that_on_its_data(options, published):
    assert Molecules(**options).expected.published == (published and pytest.approx(published, abs=1e-3))


def test_it_is_measured_on_another_file(run, tmp_path, folder, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    summary = summary_of(run)
    (tmp_path / "c.csv").write_text(rows(5, 20))
    actual = evaluated(run, capsys, "--test", "c.csv")["groups"]["molecules"]["test_rmse"]["mean"]
    assert actual != summary["groups"]["molecules"]["test_rmse"]["mean"]
    assert summary_of(run) == summary
    assert main(["evaluate", str(run), "--test", "absent.csv"]) == 3
    assert "absent.csv" in capsys.readouterr().err


@final_evaluation()
def test_what_is_measured_is_the_error_of_the_test_part(folder):
    recipe = Molecules(data=str(folder), file="a.csv", target="carbons", channels=8)
    table = Table.read(recipe)
    places = [table.rows(seed) for seed in (0, 1)]
    for one in places:
        assert [len(part) for part in one.values()] == [32, 4, 4]
        assert sorted(place for part in one.values() for place in part) == list(range(COUNT))
    assert places[0] != places[1] and places[0] == table.rows(0)
    task = MoleculesTask(recipe, table, 0)
    figures, expected = task.test(), table.molecules.targets[places[0]["test"]]
    actual = torch.cat([task.model(*table.molecules.batch([place])) for place in places[0]["test"]])
    assert figures["test_rmse"] == pytest.approx((actual - expected).square().mean().sqrt().item(), rel=1e-5)
    assert figures["test_mae"] == pytest.approx((actual - expected).abs().mean().item(), rel=1e-5)
    train = table.molecules.targets[places[0]["train"]]
    for member in task.model.members:
        assert member.mean == train.mean() and member.variance == pytest.approx(train.var(correction=0).item())


def test_what_is_nan_has_the_median_of_the_training_part(folder):
    """The median of 1, 2, 10 and so on, and not the mean; a feature without any number is 0."""
    table = Table.read(Molecules(data=str(folder), file="a.csv", target="carbons"))
    columns = torch.full((COUNT, 2), math.nan)
    columns[:, 0] = table.molecules.targets ** 3
    columns[table.rows(0)["train"][::3], 0] = math.nan
    forest = Forest(table, 0, lambda smiles: columns.numpy() if len(smiles) == COUNT else smiles, 20, (1.0,))
    median = columns[table.rows(0)["train"], 0].nanmedian()
    actual, expected = (forest([[value, other]]) for value, other in ((math.nan, math.nan), (median, 0.0)))
    assert torch.equal(actual, expected) and not torch.equal(actual, forest([[columns[:, 0].nanmean(), 0.0]]))


def test_descriptors_are_computed_once_for_all_seeds(folder, monkeypatch):
    calls = []
    monkeypatch.setattr("structconv_systems.recipes.molecules.descriptors",
                        lambda smiles: calls.append(smiles) or descriptors(smiles))
    recipe = Molecules(data=str(folder), file="a.csv", target="carbons", seeds=2)
    for job in RUNNER.jobs(recipe, None):
        if job.name.startswith("random-forest-descriptors"):
            job.make().validate()
    assert len(calls) == 1 and len(calls[0]) == COUNT


def test_bad_molecules_end_a_run_or_are_counted(tmp_path, refused):
    (tmp_path / "a.csv").write_text(rows(COUNT) + "C(,3\nC1C,4\n")
    refused(words_of(tmp_path), "a.csv, line 42: expected a molecule as SMILES in the column 'smiles'; got 'C('.", 3)
    with pytest.warns(UserWarning, match=r"a\.csv: 2 of 42 molecules are left out, .*; the first is in line 42"):
        run = trained(tmp_path / "run", words_of(tmp_path, "--skip-bad"))
    assert summary_of(run)["skipped"] == 2


@pytest.mark.parametrize(("more", "code", "said"), [
    (["target=oxygens"], 3, "a.csv, line 1: expected a column 'oxygens'; got 'smiles', 'carbons'"),
    (["smiles=carbon"], 3, "Did you mean 'carbons'?"),
    (["file=absent.csv"], 3, "absent.csv: expected a file; got no such file"),
    (["valid=0.01"], 3, "a.csv: expected molecules for training, validation and the test; got 40"),
    (["readout=median"], 2, "readout must be one of sum, mean, max, softmax, set2set; got 'median'"),
    (["train=0.9", "valid=0.1"], 2, "train and valid must leave something for the test; got 0.9 and 0.1"),
    (["message_steps=0"], 2, "message_steps must be at least 1; got 0")])
def test_what_is_refused(folder, more, code, said, refused):
    refused(words_of(folder, *more), said, code)


def test_trying_writes_nothing(folder, tried):
    assert all(row["seconds"] > 0 for row in tried(words_of(folder))["groups"].values())
