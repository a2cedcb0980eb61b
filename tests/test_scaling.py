"""The benchmark of growth: rows in processes of their own, a limit of memory that holds, and the prediction's law."""

import json

import pytest
import torch

from benchmarks import scaling


def rows(capsys, *options):
    code = scaling.main(["--json", "--repeats", "1", "--threads", "1", *options])
    return code, [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_rows_of_both_phases(capsys, monkeypatch):
    monkeypatch.setattr(scaling, "_gathers", lambda: {1: 1e9, 2: 2e9})
    code, (*measured, summary) = rows(capsys, "--edges", "2000", "8000", "--layer", "gcn")
    assert code == 0
    assert [(row["phase"], row["edges"]) for row in measured] == [
        (phase, edges) for phase in ("inference", "training") for edges in (2000, 8000)]
    assert all(row["least"] <= row["seconds"] <= row["most"] for row in measured)
    assert [row["exponent"] is None for row in measured] == [True, False, True, False]
    assert summary["predicted_speed"]["64"] == 64


def test_a_row_beyond_the_limit_is_an_error(capsys, monkeypatch):
    monkeypatch.setattr(scaling, "_gathers", lambda: {1: 1e9, 2: 1e9})
    code, (row, *_) = rows(capsys, "--edges", "20000000", "--layer", "gcn", "--limit", "0.25")
    assert code == 1 and "memory" in row["error"].lower()


@pytest.mark.parametrize(("gathers", "speeds"), [((1, 2), [4, 64]), ((1, 1), [1, 1]), ((2, 3), [2, 64 / 22])])
def test_the_prediction_passes_through_both_measurements(gathers, speeds):
    """It is 1 at one thread and the ratio of the rates at two; each further thread loses the same share."""
    found = dict(zip((1, 2), gathers, strict=True))
    assert scaling.predicted(1, found) == 1
    assert scaling.predicted(2, found) == pytest.approx(gathers[1] / gathers[0])
    assert [scaling.predicted(threads, found) for threads in (4, 64)] == pytest.approx(speeds)


def test_random_graphs_are_those_of_the_seed_and_uneven():
    graph = scaling.random_graph(100_000)
    degrees = torch.bincount(graph.edge_index[1].long(), minlength=graph.num_nodes)
    assert torch.equal(graph.edge_index, scaling.random_graph(100_000).edge_index)
    assert graph.edge_index.dtype is torch.int32 and degrees.max() > 10 * degrees.float().mean()
