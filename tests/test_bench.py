"""The benchmark's machinery, on sizes that take no time: counts, fields and refusals, never how fast anything is."""

from __future__ import annotations

import json
import math

import pytest
import torch

from benchmarks import memory
from benchmarks.__main__ import main
from benchmarks.case import BOTH, FORWARD, Case, Comparison, Entrant, Size
from benchmarks.plot import check, draw
from benchmarks.records import HEADERS, Line, from_json, row
from benchmarks.runner import Probe, Settings, run
from benchmarks.session import Session
from benchmarks.suites import SUITES, cases
from structconv_systems.timing import alternate
from tests.support.layers import EVERY

FIELDS = {"suite", "case", "phase", "peer", "ratio", "memory_ratio", "roofline", "max_error", "ours_ms", "peer_ms",
          "ours_peak_mb", "peer_peak_mb", "huge_pages", "edges", "rounds", "other_load"}
BRIEF = Settings(quick=True, repeats=1, seconds=0.01)
#: Runs of whole suites take half a minute each.
slow = pytest.mark.skipif(not EVERY, reason="runs with STRUCTCONV_EVERY_TEST=1 (make test-every)")


def comparison(factor: float = 1.0, **options) -> Comparison:
    """x times a number, against a peer that takes the number times `factor`."""
    a, b = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    return Comparison(ours=Entrant(name="ours", run=lambda: 3 * a, inputs=(a,)), size="16 numbers",
                      peers=(Entrant(name="peer", run=lambda: 3 * factor * b, inputs=(b,), **options),))


def lines_of(made: Comparison, suite: str = "graph") -> list[Line]:
    return list(run(Case(suite=suite, name="case", build=lambda size: made), BRIEF))


class Clock:
    """A timer that says what it is told, and counts calls."""

    def __init__(self, seconds: dict[str, list[float]]) -> None:
        self.seconds, self.order = {name: iter(values) for name, values in seconds.items()}, []

    def __call__(self, work, calls: int) -> float:
        name = work()
        self.order.append(name)
        return next(self.seconds[name])


def works(*names: str):
    return {name: (lambda name=name: name) for name in names}


def test_a_round_that_was_disturbed_is_taken_again_for_all():
    clock = Clock({"a": [1.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0], "b": [2.0] * 9})
    times = alternate(works("a", "b"), repeats=5, seconds=9.0, known={"a": 1.0, "b": 1.0}, timer=clock)
    assert sorted(times["a"].samples) == [1.0, 1.0, 1.0, 1.0, 5.0]
    assert times["a"].repeated == times["b"].repeated == 1
    assert clock.order.count("a") == clock.order.count("b") == 6


def test_peak_memory_sees_what_is_held_only_for_a_while():
    def work() -> torch.Tensor:
        return torch.ones(16, 1 << 20).sum(0)

    work()
    held = memory.peak(work) / (1 << 22)
    assert 16.5 < held < 24, f"{held} MiB-sized rows"


def test_peak_memory_sees_what_torch_did_not_allocate():
    if memory.method() != "pages":
        pytest.skip("the system does not keep a high-water mark of pages")
    assert memory.peak(lambda: bytes(bytearray(b"x") * (1 << 26))) > 1 << 26


def test_both_phases_are_compared_with_every_field():
    found = lines_of(comparison())
    assert [(line.phase, line.peer) for line in found] == [(FORWARD, "peer"), (BOTH, "peer")]
    for line in found:
        fields = json.loads(json.dumps(line.as_json()))
        assert fields.keys() >= FIELDS
        assert fields["max_error"] == 0.0
        assert fields["ratio"] > 0
        assert len(fields["ours_ms"]) == 3
        assert from_json(fields).as_json() == fields
        assert len(row(line)) == len(HEADERS)


def fails() -> torch.Tensor:
    raise RuntimeError("no kernel\nfor this")


def of_another_gradient() -> Entrant:
    x = torch.ones(4, 4, requires_grad=True)
    return Entrant(name="peer", run=lambda: 3 * x * (x.detach() / x), inputs=(x,))


@pytest.mark.parametrize(("peer", "failed", "note"), [
    (comparison(1.01).peers[0], [True, True], "disagrees"), (comparison(math.nan).peers[0], [True, True], "disagrees"),
    (of_another_gradient(), [False, True], "disagrees"),
    (Entrant(name="peer", run=fails), [True, True], "RuntimeError: no kernel"),
    (comparison(needs=1e18).peers[0], [False, False], "left out")])
def test_a_peer_that_disagrees_stops_or_needs_too_much_is_not_timed(peer, failed, note):
    """Ours is still measured, in a line without a peer."""
    found = [line for line in lines_of(Comparison(ours=comparison().ours, peers=(peer,), size="")) if line.peer]
    assert [line.failed for line in found] == failed
    assert all(note in line.note and line.ratio is None for line in found if line.failed or note == "left out")


@slow
def test_parts_are_timed_one_after_the_other():
    once, twice = comparison().ours, comparison().ours
    made = Comparison(ours=comparison().ours, peers=comparison().peers, parts=(once, twice), size="")
    found = lines_of(made, suite="dispatch")
    assert [(line.phase, line.peer) for line in found] == [(phase, peer) for phase in (FORWARD, BOTH)
                                                           for peer in ("peer", "its parts")]
    for line in found[1::2]:
        assert line.max_error is None
        assert line.ratio == pytest.approx(line.peer_ms[1] / line.ours_ms[1])
        assert line.overhead_us == pytest.approx(1e3 * (line.ours_ms[1] - line.peer_ms[1]))


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_has_headline_cases_of_different_names(suite):
    found = cases(suite)
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    assert any(case.headline for case in found)
    assert all(case.suite == suite for case in found)


def small_cases() -> list[Case]:
    """The cases whose size follows a number of edges, and those that are small as they are."""
    return [case for suite in ("graph", "relational", "dispatch") for case in cases(suite)
            if isinstance(case, Case) and not case.name.startswith("cora")] + [
        case for suite in ("models", "messages") for case in cases(suite)
        if case.name.endswith(("-step", "passing-network"))] + [case for case in cases("new-graphs") if case.headline]


@pytest.mark.parametrize("case", small_cases(), ids=lambda case: f"{case.suite}-{case.name}")
def test_ours_gives_the_peers_numbers(case):
    made = case.build(Size(quick=True, edges=400))
    upstream = torch.randn_like(made.ours.run())
    reference = made.ours.work(BOTH, upstream)()[:1 + len(made.ours.inputs)]
    assert all(torch.isfinite(tensor).all() for tensor in reference)
    for peer in made.peers:
        results = peer.work(BOTH, upstream)()[:len(reference)]
        for ours, theirs in zip(reference, results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4, msg=lambda text, peer=peer:
                                       f"{peer.name}: {text}")


def test_planner_lines_carry_the_regret():
    probe = next(case for case in cases("planner") if case.name == "sparse")
    assert isinstance(probe, Probe)
    *each, total = list(run(probe, BRIEF))
    assert len(each) == 6
    assert all(line.extra["regret"] >= 1 and line.ratio <= 1 for line in each)
    assert not any(line.failed for line in each)
    mean = sum(line.extra["regret"] for line in each) / len(each)
    assert total.extra["regret"] == pytest.approx(mean)
    assert all(line.extra["predicted_regret"] >= 1 for line in each)
    assert 0 <= total.extra["within_10_percent"] <= 1
    assert "predicted" in total.size


def test_quick_runs_headlines_and_whatever_is_named_in_full():
    quick = Session(settings=BRIEF)
    assert all(case.headline for case in quick.chosen())
    assert {case.suite for case in quick.chosen()} == set(SUITES)
    assert [case.name for case in Session(settings=BRIEF, patterns=("gat-8x64",)).chosen()] == ["gat-8x64"]
    assert len(Session().chosen()) > len(quick.chosen())


@slow
def test_cases_may_be_named_one_after_the_other(capsys):
    two = Session(settings=BRIEF, patterns=("gat-8x64", "conv2d-3*"))
    assert {case.name for case in two.chosen()} == {"gat-8x64", "conv2d-3x3"}
    assert [two.arguments()[at + 1] for at, word in enumerate(two.arguments()) if word == "--case"] == [*two.patterns]
    words = ["--suite", "dispatch", "--case", "linear", "--case", "plan-lookup-shift", "--repeats", "1",
             "--seconds", "0.01", "--huge-pages", "off", "--json"]
    assert main(words) == 0
    found = {json.loads(line)["case"] for line in capsys.readouterr().out.splitlines()}
    assert found == {"linear", "plan-lookup-shift"}
    assert main(["--case", "linear", "--case", "nothing"]) == 2
    assert "'nothing'" in capsys.readouterr().err


@slow
def test_sweeps_say_the_time_of_an_edge_and_are_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    case = next(case for case in cases("graph") if case.name == "spmm-64")
    found = [line for edges in (320, 640) for line in run(case, BRIEF, edges)]
    assert {line.edges for line in found} == {320, 640}
    assert all(line.extra["ns_per_edge"] > 0 for line in found)
    draw(check(str(tmp_path / "ratios.png")), found)
    assert (tmp_path / "ratios.png").read_bytes().startswith(b"\x89PNG")


def test_the_verb_prints_an_object_a_line(capsys):
    words = ["--quick", "--suite", "dispatch", "--case", "linear", "--repeats", "1", "--seconds", "0.01"]
    assert main([*words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["phase"], line["peer"]) for line in found] == [(FORWARD, "torch linear"), (BOTH, "torch linear")]
    for line in found:
        assert line.keys() >= FIELDS | {"machine", "versions"}
        assert line["overhead_us"] is not None
        assert line["versions"]["torch"] == torch.__version__
    assert main(words) == 0
    assert "torch linear" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "message"), [
    (["--case", "nothing-*"], "--case must match a case"),
    (["--suite", "grids"], "invalid choice"),
    (["--repeats", "0"], "--repeats"),
    (["--plot", "ratios.txt"], "--plot must end in"),
])
def test_bad_usage(capsys, words, message):
    assert main([*words]) == 2
    assert message in capsys.readouterr().err
