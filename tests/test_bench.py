"""The benchmark's machinery, on sizes that take no time: counts, fields and refusals, never how fast anything is."""

import dataclasses
import json
import math
from importlib.metadata import version

import pytest
import torch

from benchmarks import memory
from benchmarks.__main__ import main
from benchmarks.case import BOTH, FORWARD, Case, Comparison, Entrant, Size
from benchmarks.records import HEADERS, Line, from_json, means, row
from benchmarks.runner import Settings, run
from benchmarks.suites import cases, compat_pyg, compat_torch
from structconv.cli import main as structconv
from structconv_systems.timing import Times, alternate
from tests.support.drawn import EVERY

FIELDS = {"suite", "case", "phase", "peer", "ratio", "memory_ratio", "roofline", "max_error", "ours_ms", "peer_ms",
          "ours_peak_mb", "peer_peak_mb", "huge_pages", "edges", "rounds", "other_load"}
BRIEF = Settings(quick=True, repeats=1, seconds=0.01)


def comparison(factor: float = 1.0, **options) -> Comparison:
    """x times a number, against a peer that takes the number times `factor`."""
    a, b = torch.ones(4, 4, requires_grad=True), torch.ones(4, 4, requires_grad=True)
    return Comparison(ours=Entrant(name="ours", run=lambda: 3 * a, inputs=(a,)), size="16 numbers",
                      peers=(Entrant(name="peer", run=lambda: 3 * factor * b, inputs=(b,), **options),))


def lines_of(made: Comparison, suite: str = "graph") -> list[Line]:
    return list(run(Case(suite=suite, name="case", build=lambda size: made), BRIEF))


class Clock:
    """A timer that returns given seconds, and notes each call."""

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
    times = alternate(works("a", "b"), repeats=5, seconds=9.0, known={"a": 3.0, "b": 3.0}, timer=clock)
    assert sorted(times["a"].samples) == [1.0, 1.0, 1.0, 1.0, 5.0]
    assert times["a"].repeated == times["b"].repeated == 1
    assert clock.order.count("a") == clock.order.count("b") == 6


def test_a_slow_first_call_does_not_shorten_the_samples():
    counts = []

    def clock(work, calls: int) -> float:
        counts.append(calls)
        return 1e-5

    alternate(works("a"), repeats=3, known={"a": 0.5}, timer=clock)
    assert min(counts[-3:]) >= 100


def test_peak_memory_sees_what_is_held_only_for_a_while():
    def work() -> torch.Tensor:
        return torch.ones(16, 1 << 20).sum(0)

    work()
    held = memory.peak(work) / (1 << 22)
    assert 16.5 < held < 24, f"{held} MiB-sized rows"


def test_both_phases_are_compared_with_every_field():
    actual = lines_of(comparison())
    assert [(line.phase, line.peer) for line in actual] == [(FORWARD, "peer"), (BOTH, "peer")]
    for line in actual:
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


def test_a_peer_that_disagrees_stops_or_needs_too_much_is_not_timed():
    """Ours is still measured, in a line without a peer."""
    peers = {"wrong": comparison(1.01).peers[0], "nan": comparison(math.nan).peers[0], "bent": of_another_gradient(),
             "fails": Entrant(name="peer", run=fails), "large": comparison(needs=1e18).peers[0]}
    expected = {"wrong": ([True, True], "disagrees"), "nan": ([True, True], "disagrees"),
                "bent": ([False, True], "disagrees"), "fails": ([True, True], "RuntimeError: no kernel"),
                "large": ([False, False], "left out")}
    named = tuple(dataclasses.replace(peer, name=name) for name, peer in peers.items())
    lines = lines_of(Comparison(ours=comparison().ours, peers=named, size=""))
    for name, (failed, note) in expected.items():
        actual = [line for line in lines if line.peer == name]
        assert [line.failed for line in actual] == failed
        assert all(note in line.note and line.ratio is None for line in actual if line.failed or note == "left out")


def small_cases() -> list[Case]:
    """The cases whose size follows a number of edges, and those that are small as they are."""
    return [case for suite in ("graph", "relational", "dispatch") for case in cases(suite)
            if isinstance(case, Case) and not case.name.startswith("cora")] + [
        case for suite in ("models", "messages") for case in cases(suite)
        if case.name.endswith(("-step", "passing-network"))] + [
        case for case in cases("new-graphs") if case.headline] + [
        case for case in cases("compat") if case.name.endswith(("-1k", "-small")) and "generate" not in case.name]


def drawn_cases() -> list[Case]:
    """Without the dear ones."""
    return [case for case in small_cases() if EVERY or case.suite != "messages"]


@pytest.mark.parametrize("case", drawn_cases(), ids=lambda case: f"{case.suite}-{case.name}")
def test_ours_gives_the_peers_numbers(case):
    made = case.build(Size(quick=True, edges=400))
    upstream = torch.randn_like(made.ours.run())
    reference = made.ours.work(BOTH, upstream)()[:1 + len(made.ours.inputs)]
    assert all(torch.isfinite(tensor).all() for tensor in reference)
    for peer in made.peers if EVERY else [peer for peer in made.peers if not peer.full_only]:
        results = peer.work(BOTH, upstream)()[:len(reference)]
        torch.testing.assert_close(reference, results, rtol=1e-3, atol=1e-4,
                                   msg=lambda text, peer=peer: f"{peer.name}: {text}")


@pytest.mark.parametrize(("suite", "ours"), [(compat_pyg, "pyg"), (compat_torch, "compat")])
def test_every_layer_of_compat_has_a_case(monkeypatch, suite, ours):
    module, used = getattr(suite, ours), set()

    class Recorder:
        def __getattr__(self, name: str):
            used.add(name)
            return getattr(module, name)

    monkeypatch.setattr(suite, ours, Recorder())
    for case in suite.CASES:
        if case.name.endswith(("-1k", "-small")):
            case.build(Size(quick=True)).ours.run()
    assert set(module.__all__) - {"Patch", "patch", "unpatch"} <= used


def test_means_are_geometric_and_name_the_lines_below_one():
    """Lines without a comparison of numbers do not count."""
    def line(ratio: float | None, peer: str = "pyg", **fields) -> Line:
        return Line(**{"suite": "compat", "case": "gcn", "phase": FORWARD, "peer": peer, "ratio": ratio,
                       "max_error": 0.0, **fields})

    lines = [line(4.0, group="small"), line(1.0, phase=BOTH),
             line(0.25, "torch", case="mha", extra={"anew": [0.2, 0.3, 0.3, 0.9]}),
             line(9.0, "its parts", max_error=None), line(None, phase=BOTH, note="left out")]
    actual = {(mean["peer"], mean["group"], mean["phase"]): mean for mean in means(lines)}
    assert {key: (mean["lines"], mean["geometric_mean"]) for key, mean in actual.items()} == {
        ("all", "", ""): (3, 1.0), ("all", "", FORWARD): (2, 1.0), ("all", "", BOTH): (1, 1.0),
        ("pyg", "small", FORWARD): (1, 4.0), ("pyg", "", BOTH): (1, 1.0), ("torch", "", FORWARD): (1, 0.25)}
    assert actual["all", "", ""]["below_one"] == ["mha, forward, torch 0.25x"]
    assert actual["all", "", ""]["slower"] == ["mha, forward, torch 0.30x"]
    lines[2] = dataclasses.replace(lines[2], extra={"anew": [0.2, 1.1, 0.3, 0.9]})
    assert means(lines)[0]["below_one"] and not means(lines)[0]["slower"]
    lines[2] = dataclasses.replace(lines[2], extra={"anew": [0.95, 0.98, 0.99, 0.96], "itself": [0.97, 1.03]})
    assert means(lines)[0]["slower"] == ["mha, forward, torch 0.96x"]
    lines[2].extra["itself"][0] = 0.96  # the peer and its copy differ as much
    assert not means(lines)[0]["slower"]


def test_a_line_below_one_is_measured_with_tensors_made_anew(monkeypatch):
    times = {"ours": Times((2.0,)), "peer": Times((1.0,)), "itself": Times((4.0,))}
    monkeypatch.setattr("benchmarks.runner.alternate", lambda works, **_: {name: times[name] for name in works})
    made = []
    actual = list(run(Case(suite="graph", name="case", build=lambda size: made.append(size) or comparison()), BRIEF))
    assert [line.extra["anew"] for line in actual] == [[0.5] * 4] * 2 and len(made) == 17
    assert [line.extra["itself"] for line in actual] == [[0.25] * 4] * 2
    assert "anew 0.5, 0.5, 0.5, 0.5" in row(actual[0])[-1]
    times["peer"] = Times((2.0,))
    assert "anew" not in lines_of(comparison())[0].extra


@pytest.mark.parametrize("verb", [main, lambda words: structconv(["bench", *words])])
def test_the_verb_prints_an_object_a_line(capsys, verb):
    words = ["--quick", "--suite", "dispatch", "--case", "linear", "--repeats", "1", "--seconds", "0.01"]
    assert verb([*words, "--json"]) == 0
    *actual, last = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [mean["lines"] for mean in last["means"]] == [2, 1, 1, 1, 1]
    assert [(line["phase"], line["peer"]) for line in actual] == [(FORWARD, "torch linear"), (BOTH, "torch linear")]
    for line in actual:
        assert line.keys() >= FIELDS | {"machine", "versions"}
        assert line["overhead_us"] is not None
        assert line["versions"]["torch"] == version("torch")


@pytest.mark.parametrize(("words", "message"), [
    (["--case", "nothing-*"], "--case must match a case"),
    (["--suite", "grids"], "invalid choice"),
    (["--repeats", "0"], "--repeats"),
    (["--plot", "ratios.txt"], "--plot must end in"),
])
def test_bad_usage(capsys, words, message):
    assert main([*words]) == 2
    assert message in capsys.readouterr().err
