"""The loop: exact resumption after signals and corruption, stopping rules, metrics without doubled steps."""

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from structconv.errors import ConfigError
from structconv_systems.train.config import Recipe
from structconv_systems.train.interrupt import Interrupt, Interrupted
from structconv_systems.train.loop import Schedule, Task, fit
from structconv_systems.train.progress import Quiet
from structconv_systems.train.run import Run
from structconv_systems.train.stopping import BestAccuracy, LossWindow, Patience


@dataclass(frozen=True, kw_only=True)
class Toy(Recipe):
    name = "toy"


class Regression(Task):
    """A net with dropout and batch statistics on random data: every generator and buffer matters."""

    def __init__(self, act=lambda step: None) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.act = act

    def train_step(self, step: int) -> dict[str, float]:
        self.act(step)
        self.model.train()
        self.optimizer.zero_grad()
        loss = (self.model(torch.randn(16, 4)) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def validate(self) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            loss = (self.model(torch.linspace(-1, 1, 32).view(8, 4)) - 1).square().mean().item()
        return {"val_loss": loss, "val_accuracy": -loss}

    def test(self) -> dict[str, float]:
        return {"test_accuracy": -self.validate()["val_loss"]}


def train(run: Run, *, steps: int = 10, act=lambda step: None, progress=None, stopping=None, every: int = 3,
          compile: bool = False):
    made: list[Regression] = []

    def make() -> Regression:
        made.append(Regression(act))
        return made[0]

    with Interrupt() as interrupt:
        result = fit(make, Schedule(steps=steps, seed=3, stopping=stopping or BestAccuracy(), validate_every=2,
                                    checkpoint_every=every, compile=compile),
                     run=run, job="toy/seed-3", interrupt=interrupt, progress=progress or Quiet())
    return result, made[0].model.state_dict() if made else None


def signal_at(number: int, when: int):
    return lambda step: os.kill(os.getpid(), number) if step == when else None


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first | second)


def test_a_compiled_training_has_the_numbers_of_one_that_is_not(tmp_path):
    """Those of dropout too, and the names of its weights."""
    result, weights = train(Run.create(tmp_path / "a", Toy()))
    with mock.patch.object(nn.Module, "compile", autospec=True, side_effect=nn.Module.compile) as compiled:
        again, others = train(Run.create(tmp_path / "b", Toy()), compile=True)
    assert compiled.call_count == 1 and weights.keys() == others.keys()
    assert again["test_accuracy"] == pytest.approx(result["test_accuracy"], rel=1e-4)
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("number", "when"), [(signal.SIGINT, 1), (signal.SIGTERM, 5), (signal.SIGINT, 10)])
def test_resumed_weights_are_bit_equal_and_metrics_are_the_same(tmp_path, number, when):
    straight, cut = Run.create(tmp_path / "a", Toy()), Run.create(tmp_path / "b", Toy())
    expected, weights = train(straight)
    with pytest.raises(Interrupted, match=f"after step {when}"):
        train(cut, act=signal_at(number, when))
    torch.randn(100)
    result, resumed = train(Run.open(tmp_path / "b"))
    assert equal(weights, resumed)
    assert result["test_accuracy"] == expected["test_accuracy"]
    assert result["steps"] == 10
    assert list(straight.metrics) == list(cut.metrics)
    assert [line["step"] for line in cut.metrics] == list(range(1, 11))


def test_a_killed_run_repeats_the_steps_after_its_checkpoint_once(tmp_path):
    class KilledError(Exception):
        pass

    def kill(step: int) -> None:
        if step == 9:
            raise KilledError

    straight, cut = Run.create(tmp_path / "a", Toy()), Run.create(tmp_path / "b", Toy())
    _, weights = train(straight)
    with pytest.raises(KilledError):
        train(cut, act=kill)
    cut.metrics.flush()
    with open(cut.folder / "metrics.jsonl", "a") as file:
        file.write('{"job": "toy/seed-3", "st')
    _, resumed = train(Run.open(tmp_path / "b"))
    assert equal(weights, resumed)
    assert list(straight.metrics) == list(cut.metrics)


class Noting(Quiet):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_corrupt_checkpoint_is_passed_over_and_the_weights_are_still_equal(tmp_path):
    straight, cut = Run.create(tmp_path / "a", Toy()), Run.create(tmp_path / "b", Toy())
    _, weights = train(straight)
    with pytest.raises(Interrupted):
        train(cut, act=signal_at(signal.SIGINT, 8))
    bad = cut.checkpoint_folder("toy/seed-3") / "step-00000008" / "state.safetensors"
    bad.write_bytes(bad.read_bytes()[:-5])
    progress = Noting()
    _, resumed = train(Run.open(tmp_path / "b"), progress=progress)
    assert str(bad) in progress.notes[0]
    assert equal(weights, resumed)


def test_a_finished_training_is_not_repeated(tmp_path):
    run = Run.create(tmp_path / "a", Toy())
    first, _ = train(run)
    again, model = train(run)
    assert again == first
    assert model is None


@pytest.mark.parametrize("cut", [None, 13, 20])
def test_a_finished_training_goes_on_as_if_it_had_had_more_steps_from_the_start(tmp_path, cut):
    straight, longer = Run.create(tmp_path / "a", Toy()), Run.create(tmp_path / "b", Toy())
    expected, weights = train(straight, steps=20)
    train(longer)
    torch.randn(100)
    if cut is not None:
        with pytest.raises(Interrupted):
            train(Run.open(tmp_path / "b"), steps=20, act=signal_at(signal.SIGINT, cut))
    result, resumed = train(Run.open(tmp_path / "b"), steps=20)
    assert equal(weights, resumed)
    assert {**result, "seconds": 0} == {**expected, "seconds": 0}
    assert list(straight.metrics) == list(longer.metrics)


def test_a_training_that_its_rule_stopped_does_not_go_on(tmp_path):
    run = Run.create(tmp_path, Toy())
    first, _ = train(run, steps=200, stopping=Patience(2))
    assert first["steps"] < 200
    assert train(Run.open(tmp_path), steps=400, stopping=Patience(2)) == (first, None)


def test_handlers_are_restored_and_a_second_interrupt_leaves_at_once():
    before = signal.getsignal(signal.SIGINT)
    said: list[str] = []
    with Interrupt(said.append) as interrupt:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt.requested
        assert said[0].startswith("SIGINT")
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_the_best_weights_are_the_ones_tested(tmp_path):
    run = Run.create(tmp_path / "a", Toy())
    result, _ = train(run, steps=40)
    best = max(line["val_accuracy"] for line in run.metrics if "val_accuracy" in line)
    assert result["test_accuracy"] == best


def losses(rule, values, accuracies=None):
    accuracies = accuracies or [0.0] * len(values)
    return [rule.update({"val_loss": loss, "val_accuracy": accuracy})
            for loss, accuracy in zip(values, accuracies, strict=True)]


def test_loss_window_is_the_published_rule():
    falling = [1 - 0.01 * step for step in range(12)]
    assert not any(verdict.stop for verdict in losses(LossWindow(10), [*falling, 0.89]))
    assert [verdict.stop for verdict in losses(LossWindow(10), [*falling, 0.96])][-1]
    assert not any(verdict.stop for verdict in losses(LossWindow(10), [float(step) for step in range(11)]))
    assert losses(LossWindow(10), [float(step) for step in range(12)])[-1].stop


def test_patience_needs_both_bests_to_keep_and_neither_to_stop():
    verdicts = losses(Patience(2), [1.0, 0.9, 1.0, 0.8, 0.9, 0.9], [0.5, 0.4, 0.6, 0.6, 0.5, 0.5])
    assert [verdict.keep for verdict in verdicts] == [True, False, False, True, False, False]
    assert [verdict.stop for verdict in verdicts] == [False] * 5 + [True]


@pytest.mark.parametrize("make", [LossWindow, Patience, BestAccuracy])
def test_rules_continue_from_their_state(make):
    values = [1.0, 0.7, 0.8, 0.9, 0.6, 0.9, 0.95, 0.97, 0.99, 1.0, 1.1, 1.2, 1.3, 0.5]
    straight = losses(make(), values)
    first, second = make(), make()
    head = losses(first, values[:6])
    second.load(first.state())
    assert head + losses(second, values[6:]) == straight


def test_a_run_folder_is_not_overwritten(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "mine.txt").write_text("x")
    with pytest.raises(ConfigError, match="must be a new or an empty folder"):
        Run.create(tmp_path / "a", Toy())
    with pytest.raises(ConfigError, match=r"a folder without config\.json"):
        Run.open(tmp_path / "a")
    with pytest.raises(ConfigError, match="no such folder"):
        Run.open(tmp_path / "none")


def test_metrics_of_other_jobs_stay(tmp_path):
    run = Run.create(Path(tmp_path / "a"), Toy())
    for step in (1, 2, 3):
        run.metrics.append("one", step, {"loss": 1.0})
        run.metrics.append("two", step, {"loss": 2.0})
    run.metrics.truncate("two", 1)
    run.metrics.append("two", 2, {"loss": 5.0})
    assert [(line["job"], line["step"], line["loss"]) for line in run.metrics] == [
        ("one", 1, 1.0), ("two", 1, 2.0), ("one", 2, 1.0), ("one", 3, 1.0), ("two", 2, 5.0)]


def test_a_run_that_was_killed_as_it_was_made_is_no_run(tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(Run, "write", lambda run, name, content: written.append(name))
    Run.create(tmp_path / "a", Toy())
    assert written[-1] == "config.json"
