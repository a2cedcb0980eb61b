"""The recipes on citation graphs, on a synthetic one: train, evaluate, resume, compare."""

import dataclasses

import pytest

from structconv_systems.recipes import citation
from structconv_systems.recipes.citation import CitationTask
from systems.tests.data.test_planetoid import tiny
from systems.tests.recipes.runs import check_fair_and_blind, check_laws, trained

#: No rule stops before the checkpoint of step 100, from which the run is resumed.
TRAINED = {"cora-gcn": ["window=200"], "cora-cheb": ["window=200", "order=1"], "cora-gat": ["patience=200"]}


@pytest.mark.parametrize("name", list(TRAINED))
def test_a_run_keeps_the_laws(name, tmp_path, capsys):
    tiny(tmp_path)
    words = ["train", name, *TRAINED[name], "dataset=tiny", "epochs=105", "seeds=2", "threads=1"]
    summary = check_laws(trained(tmp_path / "run", [*words, "--data", str(tmp_path)]), tmp_path, capsys)
    assert {name, "mlp"} <= set(summary["groups"])
    assert all(result["steps"] == 105 for result in summary["results"].values())


def test_a_baseline_with_other_training_data_is_noticed(tmp_path, monkeypatch):
    class Other(CitationTask):
        def __init__(self, recipe, data, group):
            super().__init__(recipe, dataclasses.replace(data, train=data.train + (group == "mlp")), group)

    tiny(tmp_path)
    run = trained(tmp_path / "run", ["train", "cora-gcn", "dataset=tiny", "epochs=2", "--data", str(tmp_path)])
    check_fair_and_blind(run)
    monkeypatch.setattr(citation, "CitationTask", Other)
    with pytest.raises(AssertionError, match="mlp"):
        check_fair_and_blind(run)
