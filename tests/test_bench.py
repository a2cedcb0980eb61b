"""The benchmark's machinery, on sizes that take no time: counts, fields and refusals, never how fast anything is."""

from __future__ import annotations

import json
import math
import os
from types import SimpleNamespace

import pytest
import torch

from benchmarks import memory, peers, runner, session
from benchmarks.__main__ import main
from benchmarks.case import BOTH, FORWARD, Case, Comparison, Entrant, Size
from benchmarks.graphs import csr, knowledge, molecules, normalized_csr, power_law
from benchmarks.plot import SIZES, check, draw
from benchmarks.rates import Work
from benchmarks.records import HEADERS, Line, from_json, row
from benchmarks.runner import Probe, Settings, run
from benchmarks.session import Session
from benchmarks.suites import SUITES, cases, planner
from structconv.errors import ConfigError
from structconv_systems.timing import Times, alternate

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


def peers_lines(made: Comparison) -> list[Line]:
    """Those of the peer; where it does not run, ours is still measured, in a line without one."""
    return [line for line in lines_of(made) if line.peer is not None]


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


def test_turns_rotate():
    clock = Clock({name: [1.0] * 9 for name in "ab"})
    times = alternate(works("a", "b"), repeats=4, seconds=9.0, known={"a": 1.0, "b": 1.0}, timer=clock)
    assert clock.order == list("abbaabba")
    assert len(times["a"].samples) == len(times["b"].samples) == 4


def test_a_round_that_was_disturbed_is_taken_again_for_all():
    clock = Clock({"a": [1.0, 5.0, 5.0, 1.0, 1.0, 1.0, 1.0], "b": [2.0] * 9})
    times = alternate(works("a", "b"), repeats=5, seconds=9.0, known={"a": 1.0, "b": 1.0}, timer=clock)
    assert sorted(times["a"].samples) == [1.0, 1.0, 1.0, 1.0, 5.0]
    assert times["a"].repeated == times["b"].repeated == 1
    assert clock.order.count("a") == clock.order.count("b") == 6


def test_a_restless_machine_does_not_keep_it_going():
    clock = Clock({"a": [1.0, 9.0] * 20})
    assert alternate(works("a"), repeats=4, seconds=9.0, known={"a": 1.0}, timer=clock)["a"].repeated == 4


def test_how_many_calls_make_a_sample_is_found_warm():
    asked = []

    def timer(work, calls: int) -> float:
        asked.append(calls)
        return {1: 1e-4}.get(calls, 1e-5)

    alternate(works("a"), repeats=3, seconds=9.0, known={"a": 5e-2}, timer=timer)
    assert asked == [1, 10, 400, 400, 400]


def test_what_surrounds_the_first_call_is_not_taken_for_its_time(monkeypatch):
    """Else a sample of a quick work would be one single call."""
    now = [0.0]

    def pass_by(seconds: float, value=None):
        now[0] += seconds
        return value

    def peak(work) -> int:
        pass_by(100.0)
        work()
        return pass_by(100.0, 0)

    def alternated(works, *, known: dict[str, float], **rest):
        seen.update(known)
        return alternate(works, known=known, **rest)

    seen: dict[str, float] = {}
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(runner.memory, "peak", peak)
    monkeypatch.setattr(runner, "alternate", alternated)
    ours = Entrant(name="ours", run=lambda: pass_by(1.0, torch.ones(2)), phases=(FORWARD,))
    next(run(Case(suite="graph", name="case", build=lambda size: Comparison(ours=ours, peers=(), size="")), BRIEF))
    assert seen == {"ours": 1.0}


def test_median_and_quartiles():
    times = Times((5.0, 1.0, 3.0, 2.0, 4.0))
    assert times.median == 3.0
    assert times.quartiles == (2.0, 4.0)
    assert times.spread == pytest.approx(2 / 3)


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


def test_the_profiler_stands_in_where_pages_cannot_be_counted():
    held = memory._profiled(lambda: torch.ones(16, 1 << 20).sum(0)) / (1 << 22)
    assert 16 <= held <= 18


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


def test_a_peer_that_disagrees_is_not_timed():
    found = peers_lines(comparison(factor=1.01))
    assert len(found) == 2
    for line in found:
        assert line.failed
        assert "disagrees" in line.note
        assert line.ratio is None


def test_a_wrong_gradient_is_a_disagreement():
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    made = Comparison(ours=Entrant(name="ours", run=lambda: x * x, inputs=(x,)), size="",
                      peers=(Entrant(name="peer", run=lambda: y * y.detach(), inputs=(y,)),))
    assert [line.failed for line in peers_lines(made)] == [False, True]


def test_nan_is_a_disagreement():
    assert [line.failed for line in peers_lines(comparison(factor=math.nan))] == [True, True]


def test_a_peer_that_stops_is_reported():
    def fails() -> torch.Tensor:
        raise RuntimeError("no kernel\nfor this")

    ours = comparison().ours
    stopped = peers_lines(Comparison(ours=ours, peers=(Entrant(name="peer", run=fails),), size=""))
    assert [line.note for line in stopped] == ["RuntimeError: no kernel for this"] * 2
    assert all(line.failed for line in stopped)


def test_a_peer_that_needs_more_than_there_is_is_left_out():
    found = peers_lines(comparison(needs=1e18))
    assert all("left out" in line.note and not line.failed and line.ratio is None for line in found)
    assert len(found) == 2


def test_a_kernel_without_peers_has_one_line_a_phase():
    found = lines_of(Comparison(ours=comparison().ours, peers=(), size="", least={FORWARD: Work(copied=128.0)}))
    assert [line.peer for line in found] == [None, None]
    assert found[0].roofline > 0
    assert found[1].roofline is None


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


def test_molecules_are_small_connected_graphs():
    graph = molecules(8, seed=3)
    reach = torch.eye(graph.num_nodes, dtype=torch.bool)
    reach[graph.source, graph.target] = True
    for _ in range(6):
        reach = (reach.float() @ reach.float()) > 0
    sizes = reach.sum(1)
    assert len(set(map(tuple, reach.tolist()))) == 8
    assert int(sizes.min()) >= 16 and int(sizes.max()) <= 30
    assert graph.num_edges == 2 * (graph.num_nodes - 8 + 3 * 8)
    assert not (graph.source == graph.target).any()
    assert not torch.equal(graph.edge_index, molecules(8, seed=4).edge_index)


def test_random_graphs_have_the_sizes_asked_for():
    graph = power_law(2000)
    assert (graph.num_nodes, graph.num_edges) == (100, 2000)
    assert not (graph.source == graph.target).any()
    assert graph.in_degree().max() > 3 * graph.in_degree().float().mean()
    triples = knowledge(500, 5)
    assert triples.num_triples == 500
    assert triples.counts[0] == max(triples.counts)


def test_csr_matrices_are_the_graphs():
    graph = power_law(300)
    values = torch.rand(300, dtype=torch.float64)
    dense = torch.zeros(graph.num_nodes, graph.num_nodes, dtype=torch.float64)
    dense.index_put_((graph.target, graph.source), values, accumulate=True)
    torch.testing.assert_close(csr(graph, values).to_dense(), dense)
    rows = normalized_csr(graph).to_dense()
    degree = graph.in_degree() + 1.0
    torch.testing.assert_close(rows.diagonal(), 1.0 / degree.float())


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


def test_planner_measurements_leave_the_users_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("STRUCTCONV_CACHE", str(tmp_path))
    first, again = (planner.configuration_line("dense", 3, BRIEF) for _ in range(2))
    assert first.size == again.size
    assert not list(tmp_path.glob("plans.json*"))
    assert os.environ["STRUCTCONV_CACHE"] == str(tmp_path)


def test_quick_runs_headlines_and_whatever_is_named_in_full():
    quick = Session(settings=BRIEF)
    assert all(case.headline for case in quick.chosen())
    assert {case.suite for case in quick.chosen()} == set(SUITES)
    assert [case.name for case in Session(settings=BRIEF, patterns=("gat-8x64",)).chosen()] == ["gat-8x64"]
    assert len(Session().chosen()) > len(quick.chosen())


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


def test_a_sweep_runs_swept_cases_at_every_size(tmp_path):
    session = Session(plot=tmp_path / "a.png")
    swept = [case for case in session.chosen() if case.swept]
    assert swept
    assert all(session.sizes(case) == SIZES for case in swept)
    assert all(session.sizes(case) == (None,) for case in session.chosen() if not case.swept)


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


def test_an_interrupted_run_shows_what_it_has_measured(capsys, monkeypatch, tmp_path):
    def stopped(found: Session):
        yield from lines_of(comparison())
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "_lines", stopped)
    picture = tmp_path / "ratios.svg"
    with pytest.raises(KeyboardInterrupt):
        session.execute(Session(plot=picture))
    assert "graph/case" in capsys.readouterr().out
    assert picture.exists()


def test_huge_pages_run_in_a_process_of_their_own(capsys):
    words = ["--quick", "--suite", "dispatch", "--case", "linear", "--repeats", "1", "--seconds", "0.01"]
    assert main([*words, "--json", "--huge-pages", "both"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["huge_pages"] for line in found] == [False, False, True, True]


@pytest.mark.parametrize(("words", "message"), [
    (["--case", "nothing-*"], "--case must match a case"),
    (["--suite", "grids"], "invalid choice"),
    (["--repeats", "0"], "--repeats"),
    (["--plot", "ratios.txt"], "--plot must end in"),
])
def test_bad_usage(capsys, words, message):
    assert main([*words]) == 2
    assert message in capsys.readouterr().err


def test_list_names_the_cases(capsys):
    assert main(["--list"]) == 0
    assert "graph/gat-4x32 (headline)" in capsys.readouterr().out.splitlines()


def test_the_peers_that_are_installed_are_found():
    found = peers.versions()
    assert found["torch"] == torch.__version__
    assert (peers.geometric() is None) == ("torch-geometric" not in found)
    if "dgl" not in found:
        assert peers.dgl() is None


def test_pictures_have_known_formats():
    with pytest.raises(ConfigError, match="--plot"):
        check("ratios.jpeg2000")
