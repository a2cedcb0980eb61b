"""What the machine can do: stored, read back, never measured unasked."""

import json
from pathlib import Path

import pytest
import torch

from structconv.planning import machine as machines
from structconv.planning import measure
from structconv.planning.machine import TYPICAL, Machine, cache_folder, load


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRUCTCONV_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(machines, "_KNOWN", {})
    return tmp_path / "cache"


def test_typical_until_measured(folder, monkeypatch):
    monkeypatch.setattr(machines, "_best", lambda *_: pytest.fail("measured unasked"))
    assert machines.rates("cpu") == TYPICAL["cpu"]
    assert machines.rates(torch.device("cuda", 1)) == TYPICAL["cuda"]
    assert not folder.exists()


def test_measured_rates_are_stored_and_used(folder):
    actual = measure("cpu", seconds=0.01)
    assert min(actual.gflops, actual.copy_gbs, actual.gather_gbs) > 0
    assert machines.rates("cpu") is actual
    assert load("cpu") == actual
    assert load("cuda") is None
    assert [path.name for path in folder.iterdir()] == ["machine.json"]
    machines._KNOWN.clear()
    assert machines.rates("cpu") == actual


@pytest.mark.parametrize("text", ["", "[]", "{", '{"cpu": 3}', '{"cpu": {"gflops": 1}}',
                                  json.dumps({"cpu": {"gflops": 0, "copy_gbs": 1, "gather_gbs": 1}}),
                                  json.dumps({"cpu": {"gflops": "x", "copy_gbs": 1, "gather_gbs": 1}})])
def test_a_broken_file_means_typical(folder, text):
    folder.mkdir()
    (folder / "machine.json").write_text(text)
    assert machines.rates("cpu") == TYPICAL["cpu"]
    machines._store("cpu", Machine(1.0, 1.0, 1.0))
    assert load("cpu") == Machine(1.0, 1.0, 1.0)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.delenv("STRUCTCONV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "structconv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "structconv"
    monkeypatch.setenv("STRUCTCONV_CACHE", "~/own")
    assert cache_folder() == tmp_path / "own"


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    def home():
        raise RuntimeError("no home")

    monkeypatch.delenv("STRUCTCONV_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert load("cpu") is None
    with pytest.raises(OSError, match="structconv"):
        machines._store("cpu", Machine(1.0, 1.0, 1.0))
