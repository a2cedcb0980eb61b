"""What tests of recipes share."""

import html
import io
import json
import re
import shutil
from contextlib import contextmanager, redirect_stdout
from functools import partial
from hashlib import sha256
from types import MethodType, ModuleType
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from structconv.cli import main
from structconv_systems import pictures, plots
from structconv_systems.recipes.register import recipe_of
from structconv_systems.train.loop import seed_everything
from structconv_systems.train.parts import Parts, TestReadEarly
from structconv_systems.train.run import Run
from structconv_systems.train.study import Untrained
from tests.support.second_device import faults_of

#: Recipes that are checked on a second device; torch has a GRU of its own there, which the simulated device lacks.
ON_SECOND_DEVICE = {"convlstm", "dcrnn", "nri", "pooling", "tsp"}
#: Recipes whose effect is that of one task over another.
ACROSS_TASKS = {"pooling"}
#: Recipes whose baseline has other units of the inputs; the labels are the same.
OTHER_UNITS = {"nri"}

#: Parts of a data set that trainings may read.
_BEFORE_TEST = ("train", "val", "valid")


class Runs(dict):
    """A finished run of each recipe in a folder, trained in silence when a test takes it."""

    def __init__(self, root, words_of):
        self.root, self.words_of = root, words_of

    def __missing__(self, name):
        with redirect_stdout(io.StringIO()):
            return self.setdefault(name, trained(self.root / name, self.words_of(name)))


def trained(run, words):
    """A finished run in the folder."""
    assert main([*words, "--out", str(run)]) == 0
    return run


def others(words, *more):
    """Words, of whose options some are others."""
    given = {word.partition("=")[0] for word in more}
    return [*(word for word in words if word.partition("=")[0] not in given), *more]


def summary_of(run):
    return json.loads((run / "summary.json").read_text())


def evaluated(run, capsys, *words):
    """What `evaluate` says of a run, as an object."""
    assert main(["evaluate", str(run), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def check_laws(run, tmp_path, capsys):
    """A finished run evaluates to what it said, is resumed to the same weights, and its baselines are fair; its
    summary."""
    summary = summary_of(run)
    assert summary["headline"]["published"] and (run / "report.html").is_file()
    again = evaluated(run, capsys)
    assert (again["headline"], again["groups"]) == (summary["headline"], summary["groups"])
    check_page(run)
    check_resumed_to_the_same_weights(run, tmp_path / "cut")
    check_fair_and_blind(run)
    if summary["recipe"] in ON_SECOND_DEVICE:
        check_trains_on_a_second_device(run)
    return summary


def check_page(run):
    """The page names the split of the data, and each picture has a caption that says more than its name."""
    page = html.unescape((run / "report.html").read_text())
    assert re.search(r"<td>split</td><td>.*test [\d,]+ \w+", page)
    captions = json.loads((run / "captions.json").read_text()) if (run / "captions.json").is_file() else {}
    assert captions.keys() == {picture.stem for picture in run.glob("pictures/*")}
    assert all(len(caption.split()) > 8 and f"<figcaption>{caption}</figcaption>" in page
               for caption in captions.values())


def check_trains_on_a_second_device(run):
    """A step, validation and test of each kind of training have there the figures that they have on the CPU."""
    faults, count = faults_of("systems.tests.recipes.on_second_device", str(run))
    assert not faults and count > 0, faults


def check_fair_and_blind(run):
    """System and baseline of each pair get the same data of training and validation, also a fitted one, and the same
    steps, batches and choice of weights; and no group reads the test part before the final evaluation."""
    entry, recipe = recipe_of(Run.open(run))
    actual, data = {}, {}
    for job in entry.runner().jobs(recipe, Run.open(run)):
        group = job.name.partition("/")[0]
        if group not in actual:
            seed_everything(0)
            with parts_read() as read:
                actual[group] = task, _ = job.make(), job.schedule()
                task.validate()
            parts = [own[part] for own in [*read, *parts_of(task)] for part in own if part in _BEFORE_TEST]
            data[group] = set(map(digest, parts))
            with pytest.raises(TestReadEarly):
                task.test()
    if recipe.expected is None:
        return
    pairs = [[name.partition(":")[0] for name in pair] for pair in recipe.expected.pairs]
    pairs = [pair for pair in pairs if set(pair) <= actual.keys()]
    assert pairs, "the groups of the effect are not those that are trained"
    for system, baseline in pairs:
        (own, schedule), (other, beside) = actual[system], actual[baseline]
        if recipe.name in OTHER_UNITS:
            assert data[system] & data[baseline], (system, baseline)
        elif recipe.name not in ACROSS_TASKS:
            assert data[system] and data[system] == data[baseline], (system, baseline)
        if isinstance(other, Untrained):
            continue
        assert (schedule.steps, schedule.validate_every) == (beside.steps, beside.validate_every)
        assert type(schedule.stopping) is type(beside.stopping)
        assert schedule.stopping.state() == beside.stopping.state()
        if hasattr(own, "batches"):
            assert [own.batches.at(step) for step in (1, 2, 3)] == [other.batches.at(step) for step in (1, 2, 3)]


@contextmanager
def parts_read():
    """Within it each read of `Parts` adds them to the list."""
    read, original = [], Parts.__getitem__

    def noted(self, part):
        read.append(self)
        return original(self, part)

    with mock.patch.object(Parts, "__getitem__", noted):
        yield read


def parts_of(task):
    """All `Parts` that a task holds, in attributes, partial functions and methods."""
    actual, waiting, known = [], [task], {}
    while waiting:
        value = waiting.pop()
        if id(value) in known:
            continue
        known[id(value)] = value
        if isinstance(value, Parts):
            actual.append(value)
        elif isinstance(value, partial):
            waiting += [*value.args, *value.keywords.values()]
        elif isinstance(value, MethodType):
            waiting.append(value.__self__)
        elif isinstance(value, list | tuple):
            waiting += value
        elif isinstance(value, dict):
            waiting += value.values()
        elif not isinstance(value, torch.Tensor | nn.Module | type | ModuleType):
            waiting += getattr(value, "__dict__", {}).values()
    return actual


def digest(value):
    """A hash of the numbers, texts and tensors in a value."""
    if isinstance(value, torch.Tensor):
        value = [str(value.dtype), list(value.shape), sha256(value.contiguous().numpy()).hexdigest()]
    elif isinstance(value, list | tuple | range):
        value = [digest(item) for item in value]
    elif isinstance(value, dict):
        value = [digest(item) for pair in value.items() for item in pair]
    elif not isinstance(value, str | int | float | None):
        value = [type(value).__name__, digest(vars(value))]
    return sha256(repr(value).encode()).hexdigest()


def check_resumed_to_the_same_weights(run, cut):
    """As after a kill: in a copy of the run the checkpoints behind one are gone. Pictures are not drawn again."""
    shutil.copytree(run, cut)
    for final in sorted((cut / "checkpoints").rglob("final")):
        shutil.rmtree(final)
    with (mock.patch.object(plots, "to_png", return_value=b""),
          mock.patch.object(pictures, "_drawn", return_value=pictures.Drawing(b"", b"")),
          mock.patch.object(pictures, "_gif", return_value=b"")):
        assert main(["resume", str(cut)]) == 0
    for final in (run / "checkpoints").rglob("final"):
        own, again = (load_file(place / "weights.safetensors")
                      for place in (final, cut / "checkpoints" / final.relative_to(run / "checkpoints")))
        assert all((own[key] == again[key]).all() for key in own | again)
