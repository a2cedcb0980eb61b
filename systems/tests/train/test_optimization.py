"""Steps: batches by length, schedules, accumulated gradients, averages, what is not finite, and resumption of all."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from structconv.errors import ConfigError
from structconv_systems.train.batches import Batches
from structconv_systems.train.effect import Effect
from structconv_systems.train.interrupt import Diverged, Interrupt, Interrupted
from structconv_systems.train.loop import fit
from structconv_systems.train.options import Trained
from structconv_systems.train.parts import Parts, TestReadEarly, final_evaluation
from structconv_systems.train.progress import Quiet
from structconv_systems.train.run import Run
from structconv_systems.train.schedules import Plateau, rate
from structconv_systems.train.stopping import Best
from structconv_systems.train.study import Study, jobs_of, measured, train_all, tried, tried_all
from structconv_systems.train.task import BatchTask, mean_loss

LENGTHS = [3, 9, 1, 4, 4, 7, 2, 12, 5, 5]


@dataclass(frozen=True, kw_only=True)
class Sums(Trained):
    """Learn the sums of rows."""

    name = "sums"
    published = "0"
    higher = False


class SumsTask(BatchTask):
    """Rows of random numbers, one of them of a length of its own; dropout makes every generator matter."""

    def __init__(self, recipe: Sums, seed: int = 0) -> None:
        self.data = torch.randn(10, 4, generator=torch.Generator().manual_seed(7))
        self.spoilt: set[int] = set()
        super().__init__(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 1)), recipe,
                         Batches(LENGTHS, cost=12, seed=seed))
        self.step = 0

    def train_step(self, step):
        self.step = step
        return super().train_step(step)

    def loss(self, samples):
        x = self.data[samples]
        loss = (self.model(x).squeeze(-1) - x.sum(-1)).square().sum()
        return loss * (math.nan if self.step in self.spoilt else 1), len(samples)

    def figures(self, part):
        loss = (self.model(self.data).squeeze(-1) - self.data.sum(-1)).square().mean().item()
        return {f"{part}_loss": loss}


@dataclass(frozen=True, kw_only=True)
class LongSums(Sums):
    effect: ClassVar = Effect(claim="loss, short over long", figure="test_loss", higher=False, ratio=True,
                              pairs=(("sums", "short"),), published=1.5)
    steps: int = 60
    learning_rate: float = 0.02


def plain(**options):
    return Sums(**{"steps": 12, "validate_every": 4, "checkpoint_every": 5, **options})


def sums(recipe, run=None):
    return jobs_of(recipe, "sums", SumsTask, SumsTask)


def test_batches_of_a_pass_hold_each_sample_once_and_cost_no_more_than_asked():
    batches = Batches(LENGTHS, cost=12, seed=0)
    passes = [[batches.at(number * len(batches) + place + 1) for place in range(len(batches))] for number in range(3)]
    for one in passes:
        assert Counter(sample for batch in one for sample in batch) == Counter(range(10))
        assert all(len(batch) * max(LENGTHS[sample] for sample in batch) <= 12 for batch in one)
    assert passes[0] != passes[1]


def test_batches_depend_on_seed_and_step_alone():
    first, second = (Batches(LENGTHS, cost=12, seed=3) for _ in range(2))
    later = [second.at(step) for step in (9, 2, 14)]
    assert [first.at(step) for step in range(1, 15)][8] == later[0]
    assert [first.at(step) for step in (9, 2, 14)] == later
    assert any(Batches(LENGTHS, cost=12, seed=4).at(step) != first.at(step) for step in range(1, 6))


def test_a_sample_that_is_too_long_is_a_batch_of_its_own():
    assert sorted(map(sorted, (Batches([50, 1, 1], cost=4, seed=0).at(step) for step in (1, 2)))) == [[0], [1, 2]]
    with pytest.raises(ConfigError, match="there must be samples"):
        Batches([], cost=4, seed=0)


def test_schedules():
    assert [rate("constant", step, 100, 4) for step in (1, 2, 4, 90)] == [0.25, 0.5, 1, 1]
    assert rate("inverse_root", 16, 100, 4) == 0.5
    assert rate("inverse_root", 4, 100, 0) == 0.5
    assert [round(rate("cosine", step, 110, 10), 6) for step in (10, 60, 110, 120)] == [1, 0.5, 0, 0]
    with pytest.raises(ConfigError, match="inverse_root, cosine"):
        rate("zigzag", 1, 2, 0)


def test_a_plateau_halves_the_rate_and_remembers():
    plateau = Plateau(patience=2)
    for figure in (3.0, 2.0, 2.5):
        plateau.update(figure)
    other = Plateau(patience=2)
    other.load(plateau.state())
    for one in (plateau, other):
        assert one.share == 1
        one.update(2.0)
        assert one.share == 0.5


def weights(task):
    return {name: value.clone() for name, value in task.model.state_dict().items()}


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a | b)


def test_accumulated_gradients_are_those_of_one_batch():
    grads = []
    for accumulate in (3, 1):
        torch.manual_seed(0)
        task = SumsTask(plain(accumulate=accumulate, clip=0))
        task.model[2].p = 0.0
        task.batches = Batches([1] * 9, cost=3 if accumulate == 3 else 9, seed=0)
        task.train_step(1)
        grads.append([parameter.grad.clone() for parameter in task.model.parameters()])
    for several, one in zip(*grads, strict=True):
        torch.testing.assert_close(several, one)


def test_gradients_are_clipped_by_norm():
    task = SumsTask(plain(clip=0.01))
    task.train_step(1)
    norm = torch.stack([parameter.grad.norm() for parameter in task.model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_averaged_weights_are_measured_and_kept_and_the_own_ones_go_on():
    task = SumsTask(plain(ema=0.9))
    for step in range(1, 6):
        task.train_step(step)
    own = weights(task)
    assert not equal(task.weights(), own)
    task.validate()
    assert equal(weights(task), own)


def test_a_step_that_is_not_finite_changes_nothing_and_ten_end_the_training(tmp_path):
    notes: list[str] = []

    class Noting(Quiet):
        def note(self, text):
            notes.append(text)

    def spoilt(steps):
        def make():
            task = SumsTask(plain())
            task.spoilt = set(steps)
            return task
        return make

    recipe = plain(steps=30)
    run = Run.create(tmp_path / "a", recipe)
    [job] = jobs_of(recipe, "sums", lambda options, seed: spoilt([3])(), SumsTask)
    fit(job.make, job.schedule(), run=run, job=job.name, interrupt=Interrupt(), progress=Noting())
    assert sum("step 3 was skipped" in note for note in notes) == 1
    assert [line for line in run.metrics if line["step"] == 3] == [{"job": "sums/seed-0", "step": 3, "skipped": 1.0}]

    run = Run.create(tmp_path / "b", recipe)
    with pytest.raises(Diverged, match="step 21"):
        fit(spoilt(range(12, 22)), job.schedule(), run=run, job="sums/seed-0", interrupt=Interrupt(), progress=Noting())
    assert [place.name for place in (run.checkpoint_folder("sums/seed-0")).glob("step-*")]

    run, interrupt = Run.create(tmp_path / "c", recipe), Interrupt()

    def cut():
        task = spoilt(range(12, 22))()
        step = task.train_step

        def stepping(number):
            interrupt.requested = number == 16
            return step(number)

        task.train_step = stepping
        return task

    with pytest.raises(Interrupted):
        fit(cut, job.schedule(), run=run, job="sums/seed-0", interrupt=interrupt, progress=Noting())
    with pytest.raises(Diverged, match="step 21"):
        fit(cut, job.schedule(), run=run, job="sums/seed-0", interrupt=Interrupt(), progress=Noting())


@pytest.mark.parametrize(("options", "when"), [
    ({}, 2), ({}, 6), ({}, 12), ({"ema": 0.9}, 6), ({"schedule": "plateau", "accumulate": 2}, 6),
    ({"optimizer": "adamw", "precision": "bfloat16"}, 2), ({"schedule": "cosine", "warmup": 3}, 12)], ids=str)
def test_resumed_weights_are_bit_equal(tmp_path, options, when):
    def train(run, stop=None):
        made = []

        def make(recipe, seed):
            made.append(SumsTask(recipe, seed))
            step = made[-1].train_step

            def stepping(number):
                interrupt.requested = interrupt.requested or number == stop
                return step(number)

            made[-1].train_step = stepping
            return made[-1]

        interrupt = Interrupt()
        [job] = jobs_of(plain(**options), "sums", make, SumsTask)
        result = fit(job.make, job.schedule(), run=run, job=job.name, interrupt=interrupt, progress=Quiet())
        return {name: value for name, value in result.items() if name != "seconds"}, weights(made[-1])

    straight, cut = (Run.create(tmp_path / name, plain(**options)) for name in "ab")
    expected = train(straight)
    with pytest.raises(Interrupted):
        train(cut, stop=when)
    torch.randn(50)
    result = train(cut)
    assert result[0] == expected[0]
    assert equal(result[1], expected[1])
    assert list(straight.metrics) == list(cut.metrics)


def test_trainings_are_done_once_and_measured_again(tmp_path):
    recipe = plain(seeds=2, steps=24)
    run = Run.create(tmp_path / "run", recipe)
    jobs = sums(recipe)
    results = train_all(jobs, run, Interrupt(), Quiet())
    assert train_all(jobs, run, Interrupt(), Quiet()) == results
    again = measured(jobs, run, Quiet())
    assert {name: r["test_loss"] for name, r in again.items()} == {name: r["test_loss"] for name, r in results.items()}


def test_a_study_says_its_effect_beside_the_published_one(tmp_path, capsys):
    recipe = LongSums(seeds=2)
    run = Run.create(tmp_path / "run", recipe)
    study = Study(jobs=lambda recipe, run: [*sums(recipe), *jobs_of(plain(seeds=2), "short", SumsTask, SumsTask)],
                  columns={"test_loss": "loss"}, finish=lambda *_: {"more": 1})
    summary = study.execute(recipe, run, Interrupt(), Quiet())
    losses = {name: result["test_loss"] for name, result in summary["results"].items()}
    ratios = [losses[f"short/seed-{seed}"] / losses[f"sums/seed-{seed}"] for seed in (0, 1)]
    head = summary["headline"]
    assert head["value"] == pytest.approx(math.prod(ratios) ** 0.5)
    assert head["low"] < head["value"] < head["high"] and (head["ratio"], head["seeds"]) == (True, 2)
    assert (head["label"], head["published_effect"], head["published"]) == ("loss, short over long", 1.5, "0")
    assert summary["more"] == 1
    assert json.loads((run.folder / "summary.json").read_text()) == summary
    assert study.evaluate(recipe, run, Quiet())["headline"] == head
    study.show(recipe, summary)
    assert f"loss, short over long: x{head['value']:.3g} [" in capsys.readouterr().out
    page = (run.folder / "report.html").read_text()
    for text in ("loss, short over long", "makes its data from a seed", "<td>preset</td><td>default</td>",
                 "<td>seeds</td><td>0, 1</td>", "<td>overrides</td><td>seeds=2</td>", "<td>command</td><td>structconv",
                 "val loss while training", "sums/seed-1", f"torch {torch.__version__}"):
        assert text in page, text


def test_a_group_trains_at_a_rate_of_its_own_where_it_has_one():
    recipe = plain(rates="fast=0.5,slow=1e-3")
    study = Study(jobs=lambda recipe, run: [job for name in ("fast", "slow", "plain")
                                            for job in jobs_of(recipe, name, SumsTask, SumsTask)], columns={})
    jobs = {job.name: job.make() for job in study.runner.jobs(recipe, None)}
    assert {name: task.options.learning_rate for name, task in jobs.items()} == {
        "fast/seed-0": 0.5, "slow/seed-0": 1e-3, "plain/seed-0": 1e-3}
    for rates, message in (("fast", "GROUP=RATE"), ("=1", "GROUP=RATE"), ("fast=-1", "GROUP=RATE"),
                           ("fast=inf", "GROUP=RATE"), ("fast=1,fast=2", "each group once")):
        with pytest.raises(ConfigError, match=message):
            plain(rates=rates)
    with pytest.raises(ConfigError, match="rates must be of groups that learn; got 'quick'"):
        study.runner.jobs(plain(rates="quick=1"), None)


def test_the_test_part_is_read_in_the_final_evaluation_alone():
    parts = Parts({"train": 1, "val": 2, "test": 3})
    assert (parts["train"], parts["val"], len(parts), list(parts)) == (1, 2, 3, ["train", "val", "test"])
    for read in (lambda: parts["test"], lambda: list(parts.values()), lambda: dict(parts.items()),
                 lambda: parts.get("test")):
        with pytest.raises(TestReadEarly, match="'test' is read before the final evaluation"):
            read()
    with final_evaluation():
        assert list(parts.values()) == [1, 2, 3]
    with pytest.raises(TestReadEarly):
        _ = parts["test"]


def test_figures_that_nobody_measures_are_named_after_the_first_training(tmp_path):
    recipe = plain(seeds=2)
    study = Study(jobs=sums, columns={"test_loss": "loss", "test_bleu": "BLEU"})
    with pytest.raises(ConfigError, match="columns must be of what test measures, test_loss, seconds; got test_bleu"):
        study.execute(recipe, Run.create(tmp_path / "run", recipe), Interrupt(), Quiet())
    with pytest.raises(ConfigError, match="metric must be of what validate measures, val_loss; got val_bleu"):
        Best("val_bleu").update({"val_loss": 1.0})


def test_trainings_of_a_version_that_measured_less_are_measured_again(tmp_path, monkeypatch):
    recipe, run = plain(seeds=2), tmp_path / "run"
    before = Study(jobs=sums, columns={"test_loss": "loss"}).execute(
        recipe, Run.create(run, recipe), Interrupt(), Quiet())
    figures = SumsTask.figures
    monkeypatch.setattr(SumsTask, "figures", lambda self, part: {**figures(self, part), f"{part}_twice": 2.0})
    monkeypatch.setattr(SumsTask, "train_step", lambda self, step: pytest.fail("trained"))
    after = Study(jobs=sums, columns={"test_loss": "loss", "test_twice": "twice"}).execute(
        recipe, Run.open(run), Interrupt(), Quiet())
    assert after["groups"]["sums"]["test_twice"] == {"mean": 2.0, "std": 0.0}
    assert after["groups"]["sums"]["test_loss"] == before["groups"]["sums"]["test_loss"]
    assert all(after["results"][name]["seconds"] == row["seconds"] for name, row in before["results"].items())


def test_an_effect_whose_groups_were_left_out_is_none(tmp_path, capsys):
    recipe = LongSums()
    study = Study(jobs=sums, columns={"test_loss": "loss"})
    summary = study.execute(recipe, Run.create(tmp_path / "run", recipe), Interrupt(), Quiet())
    assert (summary["headline"]["value"], summary["headline"]["state"]) == (None, "not shown")
    study.show(recipe, summary)
    assert "loss, short over long: -;" in capsys.readouterr().out


def test_a_batch_with_nothing_to_count_changes_nothing():
    task = SumsTask(plain(), 0)
    before = [p.clone() for p in task.model.parameters()]
    nothing = sum(p.sum() for p in task.model.parameters()) * 0
    assert task.optimizer.step(1, iter([(nothing, 0.0)])) == {}
    assert all(torch.equal(p, q) for p, q in zip(task.model.parameters(), before, strict=True))
    with pytest.raises(ConfigError, match="there must be something to measure"):
        mean_loss([(nothing, 0.0)])


def test_trying_says_what_a_training_would_take():
    recipe = plain()
    actual = tried(sums(recipe)[0])
    assert actual["parameters"] == 4 * 6 + 6 + 6 + 1
    assert actual["flops_per_step"] > 0
    assert actual["seconds"] == pytest.approx(actual["seconds_per_step"] * 12)
    assert actual["bytes"] > 4 * 4 * actual["parameters"]


def test_trying_all_counts_each_kind_of_training():
    """The second kind has four times the steps: its seconds are its own."""
    short, long = plain(seeds=2), plain(steps=48, seeds=3)
    jobs = [job for recipe, name in ((short, "short"), (long, "long"))
            for job in jobs_of(recipe, name, SumsTask, SumsTask)]
    actual = tried_all(jobs)
    assert {name: (row["steps"], row["trainings"]) for name, row in actual["groups"].items()} == {
        "short": (12, 2), "long": (48, 3)}
    each = {name: row["seconds_per_step"] * row["steps"] for name, row in actual["groups"].items()}
    assert actual["seconds"] == pytest.approx(2 * each["short"] + 3 * each["long"])
    assert actual["trainings"] == 5


def test_event_files_are_written_where_tensorboard_is(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    run = Run.create(tmp_path / "run", plain())
    [job] = jobs_of(plain(), "sums", lambda seed: SumsTask(plain(), seed), SumsTask)
    fit(job.make, job.schedule(), run=run, job=job.name, interrupt=Interrupt(), progress=Quiet())
    [file] = (run.folder / "events" / job.name).iterdir()
    assert b"val_loss" in file.read_bytes()


def test_bad_options_are_refused():
    with pytest.raises(ConfigError, match="schedule must be one of"):
        plain(schedule="zigzag")
    with pytest.raises(ConfigError, match="below 1"):
        plain(ema=1.0)


def test_the_environment_names_commit_packages_and_machine(tmp_path):
    run = Run.create(tmp_path / "run", plain())
    actual = json.loads((run.folder / "environment.json").read_text())
    assert {"commit", "packages", "processor", "torch", "threads", "started"} <= actual.keys()
