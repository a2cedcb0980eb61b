"""The fit of the cost model's constants: that it covers them all, gives back what is put in, and says what it saw."""

import json
import math
from pathlib import Path

from benchmarks import experiments, fit
from structconv.kernels import relational
from structconv.planning import fitted

CONSTANTS = {name: value for name, value in vars(fitted).items() if name.isupper()}


def test_every_constant_is_fitted_once_and_nothing_else():
    assert sorted(name for each in experiments.EXPERIMENTS for name in each.units) == sorted(CONSTANTS)


def test_a_quick_fit_of_everything(tmp_path, capsys):
    source, out = Path(fitted.__file__).read_bytes(), tmp_path / "fit.json"
    assert fit.main(["--quick", "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert json.loads(out.read_text()) == report
    assert report.keys() == {"date", "quick", "machine", "threads", "versions", "other_load", "constants",
                             "experiments"}
    assert {line["constant"]: line["present"] for line in report["constants"]} == CONSTANTS
    for line in report["constants"]:
        low, high = line["quartiles"]
        assert low <= line["fitted"] <= high and all(map(math.isfinite, line["seen"]))
        assert line["samples"] == len(line["seen"]) >= 3
    for each in report["experiments"]:
        assert each["threads"] == 1
        assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in each["seconds"].values())
    assert all(each.name in printed.err for each in experiments.EXPERIMENTS)
    assert Path(fitted.__file__).read_bytes() == source
    assert relational.IN_FAVOR == fitted.IN_FAVOR
