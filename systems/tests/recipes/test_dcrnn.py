"""The recipe `dcrnn` as its user meets it: trained, resumed, evaluated on another week, and refused bad files."""

import math

import pytest
import torch

from structconv.cli import main
from structconv_systems.models.dcrnn import Persistence
from structconv_systems.recipes.dcrnn import Sensors
from structconv_systems.recipes.options.series import Traffic
from structconv_systems.recipes.register import recipe_of
from structconv_systems.train.parts import final_evaluation
from structconv_systems.train.run import Run
from systems.tests.recipes.runs import check_laws, evaluated, others, summary_of, trained

TINY = ["steps=4", "validate_every=2", "checkpoint_every=2", "history=3", "horizon=3", "hidden=4", "layers=1",
        "batch_size=4", "period=12", "adjacency=adjacency.csv", "sampling=2", "warmup=0"]


def reading(time, shift=0.0):
    return ",".join(f"{30 + shift + 10 * math.sin(math.pi * (time + lag) / 6):.2f}" for lag in range(3))


def written(root, *, lines=60, head="a,b,c", shift=0.0, name="los_speed.csv"):
    (root / name).write_text(f"{head}\n" + "\n".join(reading(time, shift) for time in range(lines)))
    return root / name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("traffic")
    written(root)
    (root / "adjacency.csv").write_text("1,0.5,0\n0,1,0.5\n0,0,1\n")
    return root


def words_of(folder, *more):
    return ["train", "dcrnn", "--data", str(folder), *others(TINY, *more)]


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run", words_of(folder))


def test_a_run_keeps_the_laws_says_its_figure_and_draws_a_map(run, tmp_path, capsys):
    summary = check_laws(run, tmp_path, capsys)
    assert list(summary["groups"]) == ["dcrnn", "without-graph", "linear", "time-of-day", "last-value", "mean", "zero"]
    assert summary["below"].keys() == {"without-graph", "last-value"}
    for ending, begin in (("png", b"\x89PNG"), ("svg", b"<?xml")):
        assert (run / "pictures" / f"errors.{ending}").read_bytes().startswith(begin)
    titles = (run / "pictures" / "errors.svg").read_text()
    assert {name for name in summary["groups"] if f"<!-- {name} -->" not in titles} == {"mean", "zero"}


@final_evaluation()
def test_the_mean_is_that_of_each_sensor(run, folder):
    """Of a history of three readings."""
    sensors = Sensors.read(recipe_of(Run.open(run))[1])
    summary = summary_of(run)
    batch = sensors.batch("test", torch.tensor(sensors.parts["test"].origins))
    error = (batch.readings.mean(1, keepdim=True) - batch.target).abs()[batch.counted].mean()
    assert summary["groups"]["mean"]["test_mae"]["mean"] == pytest.approx(float(error))
    assert summary["groups"]["zero"]["test_mae"]["mean"] == pytest.approx(float(batch.target[batch.counted].mean()))


def test_a_run_is_measured_on_another_file(run, folder, tmp_path, capsys):
    other = written(tmp_path, lines=20, shift=5.0, name="other.csv")
    actual = evaluated(run, capsys, "--test", str(other))
    assert actual["groups"] != summary_of(run)["groups"]
    assert actual["test"]["name"] == str(other)
    for bad, said in ((written(tmp_path, head="a,b,d", name="x.csv"), "3 without 'c'"),
                      (written(tmp_path, lines=2, name="y.csv"), "history=3 times at least, and horizon="),
                      ("absent.csv", "no such file")):
        code = main(["evaluate", str(run), "--test", str(bad)])
        assert (code, said in capsys.readouterr().err) == (3, True), said


@pytest.mark.parametrize(("file", "old", "new", "said"), [
    ("los_speed.csv", "\n30.00,", "\nNaN,", "los_speed.csv, line 2: expected a finite number in column 1, of the"),
    ("los_speed.csv", "\n30.00,", "\nfast,", "los_speed.csv, line 2: expected a finite number in column 1, of the"),
    ("adjacency.csv", "0.5", "nan", "adjacency.csv, line 1: expected a finite number in column 2"),
    ("adjacency.csv", "0.5", "-1", "adjacency.csv, line 1: expected a weight, at least 0, in column 2; got -1"),
    ("adjacency.csv", ",0.5", "", "adjacency.csv, line 1: expected 3 cells, one a sensor; got 2"),
    ("adjacency.csv", "0,0,1\n", "", "adjacency.csv: expected 3 lines, one a sensor; got 2"),
    ("where.csv", "c,", "d,", "where.csv: expected the sensor 'c', which the series names; got 3 other ones")])
def test_bad_files_are_named(folder, tmp_path, file, old, new, said, refused):
    for name in ("los_speed.csv", "adjacency.csv"):
        (tmp_path / name).write_text((folder / name).read_text())
    (tmp_path / "where.csv").write_text("sensor_id,latitude,longitude\na,0,0\nb,1,0\nc,0,1\n")
    (tmp_path / file).write_text((tmp_path / file).read_text().replace(old, new, 1))
    refused(words_of(tmp_path, "locations=where.csv"), said, 3)


@pytest.mark.parametrize(("option", "code", "said"), [
    ("history=20", 3, "more than horizon=3 times in each part, behind the first history=20; got 60, of which"),
    ("locations=absent.csv", 3, "absent.csv: expected a file"), ("missing=some", 2, "missing must be one of"),
    ("valid=0.4", 2, "leave something for the test")])
def test_options_that_do_not_fit(folder, option, code, said, refused):
    refused(words_of(folder, option, *(["train=0.3"] if code == 3 else [])), said, code)


@final_evaluation()
def test_what_is_missing_is_filled_and_does_not_count(tmp_path, folder):
    rows = [f"{time},{'' if time % 4 == 0 else 100 + time},1" for time in range(60)]
    (tmp_path / "los_speed.csv").write_text("a,b,c\n" + "\n".join(rows))
    (tmp_path / "adjacency.csv").write_text((folder / "adjacency.csv").read_text())
    sensors = Sensors.read(Traffic(data=str(tmp_path), adjacency="adjacency.csv", missing="nan", history=3, horizon=2,
                                   period=0))
    assert [sensors.parts[part].origins for part in ("train", "val", "test")] == [
        range(2, 41), range(42, 47), range(48, 59)]
    batch = sensors.batch("test", torch.tensor([49, 58]))
    assert batch.known is None and batch.readings[0, :, 1].tolist() == [147, 147, 149]
    assert batch.counted[0, :, 1].tolist() == [True, True] and batch.counted[1].tolist() == [[True] * 3, [False] * 3]
    errors, _, counts = sensors.errors(Persistence(2), "test")
    assert (errors[0, 0] / counts[0, 0], errors[1, 0] / counts[1, 0], errors[0, 2]) == (1, 2, 0)
    assert counts[:, 1].tolist() == [9, 8]


@final_evaluation()
def test_the_last_value_has_its_known_error_on_los_loop(real):
    figures = Sensors.read(Traffic(data=str(real("traffic")))).figures(Persistence(12), "test")
    known = {"test_mae_3_of_12": 3.54, "test_mae_6_of_12": 4.34, "test_mae_12_of_12": 5.77}
    assert {name: figures[name] for name in known} == pytest.approx(known, abs=0.005)
