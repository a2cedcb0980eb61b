"""What tests of recipes share."""

from __future__ import annotations

import html
import json
import re
import shutil
from unittest import mock

import pytest
from safetensors.torch import load_file

from structconv.cli import main
from structconv_systems import pictures, plots
from structconv_systems.recipes.register import recipe_of
from structconv_systems.train.parts import TestReadEarly
from structconv_systems.train.run import Run
from structconv_systems.train.state import seed_everything
from structconv_systems.train.untrained import Untrained
from tests.support.second_device import faults_of

#: Recipes that are checked on a second device; torch has a GRU of its own there, which the simulated device lacks.
ON_SECOND_DEVICE = {"convlstm", "dcrnn", "nri", "pooling", "tsp"}


def evaluated(run, capsys, *words):
    """What `evaluate` says of a run, as an object."""
    assert main(["evaluate", str(run), *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def check_laws(run, tmp_path, capsys):
    """A finished run evaluates to what it said, is resumed to the same weights, and its baselines are fair; its
    summary."""
    summary = json.loads((run / "summary.json").read_text())
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
    """System and baseline of each pair get the same steps, batches and choice of weights; and no group reads the test
    part before the final evaluation."""
    entry, recipe = recipe_of(Run.open(run))
    actual = {}
    for job in entry.runner().jobs(recipe, Run.open(run)):
        if job.name.partition("/")[0] not in actual:
            seed_everything(0)
            actual[job.name.partition("/")[0]] = job.make(), job.schedule()
    for task, _ in actual.values():
        task.validate()
        with pytest.raises(TestReadEarly):
            task.test()
    if recipe.expected is None:
        return
    pairs = [[name.partition(":")[0] for name in pair] for pair in recipe.expected.pairs]
    pairs = [pair for pair in pairs if set(pair) <= actual.keys()]
    assert pairs, "the groups of the effect are not those that are trained"
    for system, baseline in pairs:
        (own, schedule), (other, beside) = actual[system], actual[baseline]
        if isinstance(other, Untrained):
            continue
        assert (schedule.steps, schedule.validate_every) == (beside.steps, beside.validate_every)
        assert type(schedule.stopping) is type(beside.stopping)
        assert schedule.stopping.state() == beside.stopping.state()
        if hasattr(own, "batches"):
            assert [own.batches.at(step) for step in (1, 2, 3)] == [other.batches.at(step) for step in (1, 2, 3)]


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
