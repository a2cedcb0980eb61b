"""The table of validations by learning rate."""

from __future__ import annotations

import pytest

from structconv_systems.recipes.generated import Classification
from structconv_systems.train.run import Run
from tools import rates

WORDS = ["architectures", "1e-4,1e-2", "samples=64", "held_out=32", "steps=4", "validate_every=2", "channels=8",
         "length=32", "longest=128", "--preset", "quick", "--groups", "recurrence-near,attention-near"]


def test_the_table_has_the_best_validation_of_each_group_and_rate(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Classification, "test", lambda self: pytest.fail("tested"))
    rates.main([*WORDS, "--out", str(tmp_path)])
    table = capsys.readouterr().out
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    assert [line[0] for line in lines] == ["group", "---", "recurrence-near", "attention-near"]
    assert lines[0][1:] == ["1e-4", "1e-2"]
    for run, place in ((Run.open(folder), 1 if "0.0001" in folder.name else 2) for folder in tmp_path.iterdir()):
        for group, *cells in lines[2:]:
            validated = [line["val_loss"] for line in run.metrics
                         if line["job"] == f"{group}/seed-0" and "val_loss" in line]
            assert len(validated) == 2
            assert float(cells[place - 1]) == pytest.approx(min(validated), rel=1e-3)
    monkeypatch.setattr(Classification, "train_step", lambda self, step: pytest.fail("trained"))
    rates.main([*WORDS, "--out", str(tmp_path)])
    assert capsys.readouterr().out == table


def test_a_recipe_without_groups_of_that_kind_is_refused():
    with pytest.raises(SystemExit, match="cora-gcn has no groups with a learning rate"):
        rates.main(["cora-gcn", "1e-3"])
