"""Checkpoints: round trip, corruption by name, what is kept, and no pickles."""

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

from structconv.errors import StructureError
from structconv_systems.data.text import sha256_of
from structconv_systems.train.checkpoint import Checkpoint, Checkpoints, load, pack, unpack
from structconv_systems.train.loop import capture_generators, restore_generators, seed_everything


def stepped(optimizer_class: type[torch.optim.Optimizer], **options: float) -> torch.optim.Optimizer:
    model = nn.Linear(3, 2)
    optimizer = optimizer_class(model.parameters(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
    return optimizer


def same(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return type(first) is type(second) and len(first) == len(second) and all(map(same, first, second))
    return first == second


@pytest.mark.parametrize(("kind", "options"), [(torch.optim.Adam, {"lr": 0.1, "amsgrad": True}),
                                               (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})])
def test_optimizer_state_round_trip(tmp_path, kind, options):
    state = {"optimizer": stepped(kind, **options).state_dict(), "none": None, "tuple": (1, [2.5, "x"]),
             "bf16": torch.ones(2, dtype=torch.bfloat16)}
    Checkpoints(tmp_path).save(Checkpoint(step=2, weights={}, state=state))
    assert same(load(tmp_path / "step-00000002").state, state)


def test_generators_continue_where_they_were():
    seed_everything(5)
    np.random.standard_normal()
    state = unpack(json.loads(json.dumps(pack(capture_generators(), "g", tensors := {}))), tensors)
    expected = random.random(), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()
    seed_everything(6)
    restore_generators(state)
    assert (random.random(), np.random.standard_normal(3).tolist(), torch.randn(3).tolist()) == expected


def at(step: int, **more: bool) -> Checkpoint:
    weights = {"w": torch.full((3,), float(step))}
    return Checkpoint(step=step, weights=weights, state={"s": torch.tensor(step)}, **more)


def test_the_last_two_are_kept_and_final_comes_last(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    for step in (5, 10, 15):
        checkpoints.save(at(step))
    assert [place.name for place in checkpoints.files()] == ["step-00000010", "step-00000015"]
    checkpoints.save(at(15, final=True))
    assert [place.name for place in checkpoints.files()] == ["step-00000015", "final"]
    assert checkpoints.latest(pytest.fail).final


def test_those_that_training_left_behind_are_removed_before_those_that_it_wrote(tmp_path):
    """Both were corrupt, and training began anew."""
    checkpoints = Checkpoints(tmp_path)
    for step in (100, 150):
        (checkpoints.save(at(step)) / "weights.safetensors").unlink()
    assert checkpoints.latest(lambda text: None) is None
    for step in (60, 80, 90):
        checkpoints.save(at(step))
        assert checkpoints.latest(pytest.fail).step == step
    assert [place.name for place in checkpoints.files()] == ["step-00000080", "step-00000090"]


@pytest.mark.parametrize("name", ["weights.safetensors", "state.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_corrupt_one_is_named_and_the_one_before_is_used(tmp_path, name, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at(5))
    bad = checkpoints.save(at(10)) / name
    content = bytearray(bad.read_bytes())
    content[-2] ^= 1
    bad.write_bytes(content if damage == "flip" else content[:-1])
    if damage == "remove":
        bad.unlink()
    warnings: list[str] = []
    assert checkpoints.latest(warnings.append).step == 5
    assert len(warnings) == 1
    assert str(bad) in warnings[0]
    assert "corrupt" in warnings[0]
    checkpoints.save(at(10))
    assert checkpoints.latest(pytest.fail).step == 10


@pytest.mark.parametrize("manifest", ["", "{}", "[]", '{"sha256": {}}', '{"sha256": []}', "\x00"])
def test_a_damaged_manifest_is_corrupt_too(tmp_path, manifest):
    place = Checkpoints(tmp_path).save(at(5))
    (place / "manifest.json").write_text(manifest)
    with pytest.raises(StructureError, match=r"step-00000005/manifest\.json must list"):
        load(place)
    warnings: list[str] = []
    assert Checkpoints(tmp_path).latest(warnings.append) is None
    assert warnings[-1] == f"No checkpoint in {tmp_path} is sound."


@pytest.mark.parametrize(("key", "value"), [("step", 7), ("final", True)])
def test_a_changed_step_is_corrupt(tmp_path, key, value):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at(5))
    tree = checkpoints.save(at(10)) / "state.json"
    tree.write_text(json.dumps({**json.loads(tree.read_text()), key: value}))
    warnings: list[str] = []
    assert checkpoints.latest(warnings.append).step == 5
    assert f"{tree} must have SHA-256" in warnings[0]
    assert json.loads((tree.parent / "manifest.json").read_text()).keys() == {"sha256"}


@pytest.mark.parametrize("name", ["step-00000099", "final"])
def test_a_renamed_checkpoint_is_not_that_of_another_step(tmp_path, name):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at(5)).rename(tmp_path / name)
    with pytest.raises(StructureError, match="must be named step-00000005 as its state says"):
        load(tmp_path / name)
    assert checkpoints.latest(lambda text: None) is None


def test_a_state_of_another_layout_is_named(tmp_path):
    place = Checkpoints(tmp_path).save(at(5))
    (place / "state.json").write_text('{"s": 1}')
    hashes = {path.name: sha256_of(path) for path in place.iterdir() if path.name != "manifest.json"}
    (place / "manifest.json").write_text(json.dumps({"sha256": hashes}))
    with pytest.raises(StructureError, match=r"state\.json must hold step, final and state"):
        load(place)


def test_a_crash_while_writing_leaves_nothing_that_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(at(5))
    (tmp_path / ".step-00000010.partial").mkdir()
    (tmp_path / ".step-00000010.partial" / "weights.safetensors").write_bytes(b"half")
    assert [place.name for place in checkpoints.files()] == ["step-00000005"]
    checkpoints.save(at(10))
    assert not list(tmp_path.glob(".*"))


def test_values_that_json_and_tensors_cannot_hold_are_refused():
    with pytest.raises(StructureError, match=r"s\.a\.0 must be a tensor.*; got object"):
        pack({"a": [object()]}, "s", {})
