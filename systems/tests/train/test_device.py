"""The option `device`: what a name stands for, and what moves. Recipes on a second device: `check_laws`."""

import json
from dataclasses import dataclass

import pytest
import torch

from structconv.cli import main
from structconv.errors import ConfigError
from structconv_systems.recipes.options.tsp import TSP
from structconv_systems.train import device
from structconv_systems.train.config import resolve
from structconv_systems.train.device import chosen, moved
from structconv_systems.train.parts import Parts, final_evaluation

TINY = ["steps=2", "validate_every=2", "nodes=5", "channels=8", "layers=1", "heads=2", "hidden=16", "batch_size=8",
        "copies=4", "instances=4", "samples=2", "seeds=1"]


def test_auto_is_the_first_that_is_there(monkeypatch):
    for there, expected in ((("cuda", "mps"), "cuda"), (("mps",), "mps"), ((), "cpu")):
        monkeypatch.setattr(device, "_present", lambda name, there=there: name in there)
        assert chosen("auto") == expected and chosen("cpu") == "cpu"


def test_a_device_that_is_not_there_is_refused_before_anything_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(device, "_present", lambda name: False)
    with pytest.raises(ConfigError, match="device: mps must be there"):
        chosen("mps")
    assert main(["train", "tsp", *TINY, "--device", "cuda", "--out", str(tmp_path / "run")]) == 2
    assert "cuda must be there" in capsys.readouterr().err and not (tmp_path / "run").exists()
    assert main(["train", "tsp", *TINY, "--device", "tpu", "--out", str(tmp_path / "run")]) == 2


def test_a_run_writes_the_device_down_and_it_is_no_other_result(tmp_path, capsys):
    assert main(["train", "tsp", *TINY, "--device", "auto", "--out", str(tmp_path / "run")]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["device"] == chosen("auto")
    assert resolve(TSP, {"device": "cuda"}).overrides == {}


def test_time_is_estimated_on_the_device_that_auto_stands_for(tmp_path, capsys):
    """As it is done for `--budget`."""
    assert main(["reproduce", "tsp", *TINY, "device=auto", "--budget", "0", "--out", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == ["tsp"]


def test_only_copies_of_data_move():
    """What two tasks share stays where it is; what a task has twice it has once, moved; parameters stay themselves."""
    @dataclass
    class Data:
        numbers: torch.Tensor
        parts: Parts

    class Task:
        def __init__(self, data):
            self.model = torch.nn.Linear(2, 2)
            self.weights, self.data, self.again = list(self.model.parameters()), data, data

    data = Data(torch.ones(3), Parts({"test": torch.ones(2)}))
    task = Task(data)
    assert moved(task, "cpu") is task
    there = moved(task, "meta")
    assert there.data.numbers.device.type == "meta" and there.again is there.data is not data
    with final_evaluation():
        assert there.data.parts["test"].device.type == "meta" and data.parts["test"].device.type == "cpu"
    assert data.numbers.device.type == "cpu" and there.model is task.model
    assert all(one is other for one, other in zip(there.weights, task.weights, strict=True))
