"""What the recipe `series` measures: parts in time order, observed readings, the known error of the last value."""

import dataclasses

import pytest
import torch

from structconv.errors import DataError
from structconv_systems.data.series import mean_and_deviation
from structconv_systems.models.series import LastValue
from structconv_systems.recipes.options.series import Series
from structconv_systems.recipes.series import Histories
from structconv_systems.train.parts import final_evaluation

LINES = 100


@pytest.fixture
def histories(tmp_path):
    """Two sensors: the time, and 1000 and the time, which is missing at times that 7 divides."""
    rows = "\n".join(f"{time},{'' if time % 7 == 0 else 1000 + time}" for time in range(LINES))
    (tmp_path / "series.csv").write_text("a,b\n" + rows)
    return Histories.read(Series(data=str(tmp_path), file="series.csv", missing="nan", history=12, horizon=3, patch=3))


@final_evaluation()
def test_what_is_forecast_lies_in_its_part(histories):
    assert [part.end for part in histories.parts.values()] == [70, 80, 100]
    for part, first in (("train", 0), ("val", 70), ("test", 80)):
        origins = torch.tensor(histories.parts[part].origins)
        assert origins[0] == max(first, 11)
        batch = histories.batch(part, origins, torch.zeros_like(origins))
        assert torch.equal(batch.values[:, -1].long(), origins)
        counted = batch.target[batch.counted]
        assert (counted.min(), counted.max()) == (max(first, 11) + 1, histories.parts[part].end - 1)
    assert histories.parts["train"].known.max() == 1069


@final_evaluation()
def test_another_file_tests_as_a_whole_with_sensors_of_its_own(histories, tmp_path):
    (tmp_path / "other.csv").write_text("z\n" + "\n".join(str(time) for time in range(40)))
    other = Histories.read(dataclasses.replace(histories.recipe, test="other.csv"))
    assert other.parts["train"].end == 70 and other.parts["train"].known.max() == 1069
    assert other.parts["test"].origins == range(11, 39)
    assert other.errors(LastValue(3), "test", 1).tolist() == [1, 2, 3]
    (tmp_path / "other.csv").write_text("z\n" + "1\n" * 12)
    with pytest.raises(DataError, match=r"other\.csv: expected history=12 times at least, and horizon=3 behind"):
        Histories.read(other.recipe)
    (tmp_path / "other.csv").write_text("z\n1" + "\nnan" * 20)
    with pytest.raises(DataError, match=r"other\.csv: expected a reading to forecast in test; got missing ones alone"):
        Histories.read(other.recipe)


def test_readings_that_are_all_the_same_have_a_scale():
    assert mean_and_deviation(torch.full((5,), 3.0)) == (3.0, 1.0)
    assert mean_and_deviation(torch.tensor([2.0])) == (2.0, 1.0)


@final_evaluation()
def test_only_what_was_observed_counts(histories):
    sensor = torch.ones(1, dtype=torch.int64)
    batch = histories.batch("test", torch.tensor([82]), sensor)
    assert batch.target[0, :1].tolist() == [1083] and batch.counted.tolist() == [[True, False, True]]
    assert batch.observed[0].tolist() == [time % 7 != 0 for time in range(71, 83)]
    missing = torch.zeros(1, 12, dtype=torch.bool)
    missing[0, -3:] = True
    batch = histories.batch("test", torch.tensor([82]), sensor, missing)
    assert not batch.observed[0, -3:].any() and not batch.values[0, -3:].any()


@final_evaluation()
def test_errors_are_means_over_what_was_observed(histories):
    """The last value of a line that rises by 1 is h too low at step h, or more where the last reading is missing."""
    errors = histories.errors(LastValue(3), "test", 1)
    expected = []
    for step in (1, 2, 3):
        pairs = [(origin, origin + step) for origin in range(80, 100 - step)]
        own = [step for _ in pairs]
        other = [step + (origin % 7 == 0) for origin, time in pairs if time % 7]
        expected.append(sum(own + other) / len(own + other))
    assert errors.tolist() == pytest.approx(expected)
    assert histories.errors(LastValue(3), "test", 1, 0.5).mean() > errors.mean() + 0.2


@final_evaluation()
def test_the_last_value_has_its_known_error_on_los_loop(real):
    figures = Histories.read(Series(data=str(real("traffic")))).figures(LastValue(12), "test")
    known = {"test_mae_1_of_12": 2.70, "test_mae_3_of_12": 3.54, "test_mae_6_of_12": 4.34, "test_mae_12_of_12": 5.77}
    assert {name: figures[name] for name in known} == pytest.approx(known, abs=0.005)
