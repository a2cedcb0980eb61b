"""The fit of the cost model's constants: that it covers them all, gives back what is put in, and says what it saw."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks import experiments, fit
from structconv.kernels import relational
from structconv.kernels.window_attention import Offsets
from structconv.planning import fitted
from structconv.planning.cost import lost_flops
from structconv.structures import Window

CONSTANTS = {name: value for name, value in vars(fitted).items() if name.isupper()}


def call_seconds() -> dict[str, float]:
    """What calls alone would take, a microsecond each."""
    linear = {"expand": CONSTANTS["CHANNEL_CALLS"], "contract": CONSTANTS["CHANNEL_CALLS"]}
    factors = {f"{name}, two factors": calls + CONSTANTS["FACTOR_CALLS"] for name, calls in linear.items()}
    modes = {f"{mode}, {name}": 20 + CONSTANTS["REPEAT_CALLS"] * (mode != "apply")
             for mode in ("apply", "analysis", "synthesis") for name in ("all pairs", "edges")}
    divided = dict.fromkeys(("sum", "count"), 6 + CONSTANTS["DIVIDED_CALLS"])
    edges = dict.fromkeys(("edges", "edges, two matrices"), CONSTANTS["SPARSE_CALLS"])
    calls = {"call": 1, "dense": CONSTANTS["DENSE_CALLS"], "join": CONSTANTS["FACTOR_CALLS"],
             "operator": CONSTANTS["OPERATOR_CALLS"] + CONSTANTS["CHANNEL_CALLS"],
             "alike": 9, "unlike": 9 + CONSTANTS["PADDED"],
             "samples": 2 * (9 + CONSTANTS["SAMPLE_CALLS"]),
             "nodes": 20 + 2 * CONSTANTS["NODE_CALLS"], "undivided": 6, "causal": 6 + CONSTANTS["CAUSAL_CALLS"]}
    return {name: 1e-6 * count for name, count in (calls | linear | factors | modes | divided | edges).items()}


def window_seconds() -> dict[str, float]:
    offsets = {radius: Offsets.of(Window(radius), False, 4096) for radius in experiments.RADII}
    return {f"window {radius}": 1e-9 * each.work() for radius, each in offsets.items()}


#: Seconds of each experiment on a machine that is as the cost model says.
SECONDS = {
    "calls of operators": call_seconds(),
    "products of few columns": {str(columns): 1e-6 * (columns + lost_flops(columns, columns))
                                for columns in (*experiments.SKINNY, *experiments.WIDE)},
    "fused attention": {"one: fused": 1e-2 * fitted.FUSED_SHARE, "one: separate": 1e-2,
                        "two: fused": 2e-2 * fitted.FUSED_SHARE, "two: separate": 2e-2},
    "windows": window_seconds(),
    "relations by outputs and by inputs": {"by outputs": 1e-3, "by inputs": 1e-3 * fitted.IN_FAVOR},
    "diagonal blocks of Theta": {str(width): 1e-3 * fitted.NARROW / width for width in experiments.BLOCKS} | {
        str(experiments.CHANNELS): 1e-3},
}


def test_every_constant_is_fitted_once_and_nothing_else():
    assert sorted(name for each in experiments.EXPERIMENTS for name in each.units) == sorted(CONSTANTS)


@pytest.mark.parametrize("experiment", experiments.EXPERIMENTS, ids=lambda each: each.name)
def test_a_machine_as_the_model_says_has_the_present_constants(experiment):
    found = experiment.values(SECONDS[experiment.name])
    assert found.keys() == experiment.units.keys()
    for name, values in found.items():
        assert values == pytest.approx([CONSTANTS[name]] * len(values)), name


def test_a_quick_fit_of_everything(tmp_path, capsys):
    source, out = Path(fitted.__file__).read_bytes(), tmp_path / "fit.json"
    assert fit.main(["--quick", "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert json.loads(out.read_text()) == found
    assert {"date", "quick", "machine", "threads", "versions", "other_load", "constants", "experiments"} == found.keys()
    assert {line["constant"]: line["present"] for line in found["constants"]} == CONSTANTS
    for line in found["constants"]:
        low, high = line["quartiles"]
        assert low <= line["fitted"] <= high and all(map(math.isfinite, line["seen"]))
        assert line["samples"] == len(line["seen"]) >= 3
    for each in found["experiments"]:
        assert each["threads"] == 1
        assert all(len(seconds) == 3 and min(seconds) > 0 for seconds in each["seconds"].values())
    assert all(each.name in printed.err for each in experiments.EXPERIMENTS)
    assert Path(fitted.__file__).read_bytes() == source
    assert relational.IN_FAVOR == fitted.IN_FAVOR
