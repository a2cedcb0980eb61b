"""Autotuning: survivors are timed once per class of shapes, remembered on disk, and never while anything is traced."""

import json
import re
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from structconv import Conv, Dense, Full, Identity, conv
from structconv import plan as plan_of
from structconv.bases.scores import Bilinear
from structconv.planning import autotune, registered, tuning
from structconv.planning import plan as plans
from tests.kernels.applied import LargestTensor
from tests.support.drawn import drawn
from tests.support.layers import planned

USES = planned()


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("STRUCTCONV_CACHE", str(tmp_path))
    monkeypatch.setattr(plans, "_PLANS", {})
    monkeypatch.setattr(tuning, "_MEASURED", {})
    monkeypatch.setattr(tuning.Autotuning, "enabled", False)
    return tmp_path


@pytest.fixture
def timings(monkeypatch):
    """The problems that were timed."""
    seen = []
    original = tuning._timed

    def timed(runs, call):
        seen.append(runs)
        return original(runs, call)

    monkeypatch.setattr(tuning, "_timed", timed)
    return seen


def problem(entries=40, p=6, q=6, grad=False):
    a, w = torch.randn(2, entries, entries), torch.randn(2, p, q, requires_grad=grad)
    return torch.randn(entries, p, requires_grad=grad), Dense(a), Full.of(w)


def test_off_until_asked(timings, folder):
    made = plan_of(*problem())
    assert made.measured is None and "measured" not in str(made)
    assert not timings and not list(folder.iterdir())


def test_a_setting_and_a_context():
    assert not tuning.Autotuning.enabled
    with autotune():
        assert tuning.Autotuning.enabled
        with autotune(False):
            assert not tuning.Autotuning.enabled
        assert tuning.Autotuning.enabled
    assert not tuning.Autotuning.enabled
    autotune(True)
    assert tuning.Autotuning.enabled


def test_the_fastest_is_taken_and_shown(monkeypatch):
    seconds = {"channels_first": 2e-3, "structure_first": 1e-3}
    monkeypatch.setattr(tuning, "_timed", lambda runs, call: {
        label: seconds.get(label.split(":")[0], 5e-3) for label in runs})
    with autotune():
        made = plan_of(*problem())
    assert (made.path, made.reason, made.measured) == ("structure_first", "measured", 1e-3)
    text = str(made)
    assert "measured ms" in text and "2x measured" in text
    other = next(c for c in made.candidates if c.path == "channels_first")
    assert other.measured == 2e-3 and other.seconds > 0
    assert plan_of(*problem()).measured is None


def test_timed_once_per_class(timings):
    """Sizes of one quarter octave are a class, channels and K are told apart."""
    with autotune():
        first = plan_of(*problem(100))
        assert plan_of(*problem(100)) is first
        assert plan_of(*problem(110)) is first
        assert len(timings) == 1
        plan_of(*problem(130))
        plan_of(*problem(100, q=5))
        plan_of(*problem(100, grad=True))
        assert len(timings) == 4


def test_only_what_is_near_the_cheapest_is_timed(monkeypatch):
    seen = []
    monkeypatch.setattr(tuning, "_timed", lambda runs, call: seen.extend(runs) or dict.fromkeys(runs, 1.0))
    with autotune():
        made = plan_of(*problem(300, 8, 8))
    near = [c for c in made.candidates if c.seconds <= tuning.LIMIT * min(d.seconds for d in made.candidates)]
    assert len(seen) == len([c for c in near if "request" not in c.rejected]) < len(made.candidates)


def test_remembered_on_disk(timings, folder, monkeypatch):
    with autotune():
        first = plan_of(*problem())
        stored = json.loads((folder / "plans.json").read_text())
        (environment, entries), = stored.items()
        assert torch.__version__ in environment and len(entries) == 1
        monkeypatch.setattr(plans, "_PLANS", {})
        monkeypatch.setattr(tuning, "_MEASURED", {})
        again = plan_of(*problem())
    assert len(timings) == 1
    assert (again.path, again.measured) == (first.path, first.measured)
    assert [path.name for path in folder.iterdir()] == ["plans.json"]


def test_other_entries_stay(folder, timings):
    (folder / "plans.json").write_text(json.dumps({"another machine": {"key": {"a: b": 1.0}}}))
    with autotune():
        plan_of(*problem())
        plan_of(*problem(p=5))
    stored = json.loads((folder / "plans.json").read_text())
    assert stored.pop("another machine") == {"key": {"a: b": 1.0}}
    assert len(next(iter(stored.values()))) == 2


@pytest.mark.parametrize("text", ["", "{", "[]", "3"])
def test_a_corrupt_file_is_ignored_with_a_warning(folder, text, timings):
    (folder / "plans.json").write_text(text)
    with autotune(), pytest.warns(RuntimeWarning, match="cannot be read"):
        assert plan_of(*problem()).measured is not None
    assert len(timings) == 1
    assert len(json.loads((folder / "plans.json").read_text())) == 1


def test_malformed_entries_are_timed_again(folder, timings):
    with autotune():
        plan_of(*problem())
        stored = json.loads((folder / "plans.json").read_text())
        (environment, entries), = stored.items()
        (folder / "plans.json").write_text(json.dumps({environment: {key: {"a": "b"} for key in entries}}))
        plans._PLANS.clear()
        tuning._MEASURED.clear()
        assert plan_of(*problem()).measured > 0
    assert len(timings) == 2


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch, timings):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRUCTCONV_CACHE", str(tmp_path / "file" / "below"))
    with autotune(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert plan_of(*problem()).measured is not None


def test_gradients_and_random_numbers_stay(timings):
    x, _basis, theta = problem(grad=True)
    query, key = (torch.randn(2, 40, 4, requires_grad=True) for _ in range(2))
    scores = Bilinear(query * 1.0, key * 1.0).softmax()
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    with autotune():
        y = conv(x * 1.0, scores, theta)
    assert len(timings) == 1
    assert torch.equal(torch.rand(3), expected)
    assert all(t.grad is None for t in (x, query, key, theta.theta))
    y.sum().backward()
    assert all(t.grad is not None for t in (x, query, key, theta.theta))


def test_a_path_that_fails_is_not_taken(monkeypatch):
    def compiled(self, match, problem, path):
        def run(call):
            raise torch.OutOfMemoryError("no memory")

        return run

    x, basis, theta = problem()
    cheapest = plan_of(x, basis, theta)
    kernel = [kernel for kernel in registered() if kernel.label(cheapest.path) == cheapest.kernel][-1]  # Primitives
    given = type(kernel).compile
    monkeypatch.setattr(type(kernel), "compile", lambda self, match, problem, path: (
        compiled if path == cheapest.path else given)(self, match, problem, path))
    with autotune():
        made = plan_of(x, basis, theta)
    assert made.path != cheapest.path and made.measured < float("inf")
    failed = next(candidate for candidate in made.candidates if candidate.path == cheapest.path)
    assert failed.measured == float("inf")


def test_never_timed_while_traced(monkeypatch):
    monkeypatch.setattr(tuning, "_timed", lambda *_: pytest.fail("timed while traced"))
    torch.compiler.reset()  # of one function torch makes few programs in a process
    layer, x = Conv(Identity(), 4, 4), torch.randn(3, 4)
    expected, (_, basis, theta) = layer(x), problem()
    with autotune():
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), expected)
        with FakeTensorMode(allow_non_fake_inputs=True):
            conv(torch.randn(40, 6), basis, theta)
        torch.func.vmap(lambda v: conv(v, basis, theta))(torch.randn(3, 40, 6))
        with LargestTensor():  # a mode that watches
            conv(*problem(90))


@pytest.mark.parametrize("name", drawn(USES, 2))
def test_a_class_is_the_same_in_every_process(name):
    """What it is remembered by on disk has no address in it."""
    USES[name]()()
    assert plans._PLANS
    assert not any(re.search("0x[0-9a-f]{6}| object at", repr(tuning._written(key))) for key in plans._PLANS)


def test_classes_tell_functions_apart_by_their_names():
    keys = [(dict, ("activation", fn)) for fn in (torch.tanh, torch.relu, torch.nn.functional.silu)]
    assert len({repr(tuning._written((key, 3))) for key in keys}) == 3
