"""Series of sensors: the real week of traffic, what is missing, and every cell that is wrong."""

import gzip

import pytest
import torch

from structconv.errors import ConfigError, DataError
from structconv_systems.data.series import ends_of_parts, read_series


def test_los_loop_has_its_published_counts(real):
    folder = real("traffic")
    series = read_series(folder / "los_speed.csv", folder / "los_adj.csv", missing="zero")
    assert series.values.shape == (2016, 207) and series.values.dtype == torch.float32
    assert series.observed.all() and len(series.names) == 207 and series.names[0] == "773869"
    assert (series.values.min(), series.values.max()) == (1, 70)
    assert (series.graph.num_nodes, series.graph.num_edges) == (207, 2833)
    weights = series.graph.to_torch_sparse().to_dense()
    assert torch.equal(weights, weights.T) and weights[0, 0] == 1 and weights[0, 13] == pytest.approx(0.260935932)


@pytest.mark.parametrize("missing, observed", [("nan", [[1, 1, 0], [1, 0, 0]]), ("zero", [[1, 0, 0], [1, 0, 0]])])
def test_what_is_missing_is_zero_and_not_observed(written, missing, observed):
    path = written("a.csv", '"a, b",c ,d\r\n 1.5,0,\r\n-2e1,NaN,na\r\n\r\n')
    series = read_series(path, missing=missing)
    assert series.names == ("a, b", "c", "d") and series.graph is None
    assert series.values.tolist() == [[1.5, 0, 0], [-20, 0, 0]]
    assert series.observed.tolist() == [[bool(seen) for seen in row] for row in observed]
    assert repr(series) == f"Series(2 times, 3 sensors, {sum(map(sum, observed))} readings observed)"


def test_a_sensor_alone_may_miss_readings(written):
    series = read_series(written("a.csv", "a\n1\nnan\n3\n"))
    assert series.values.tolist() == [[1], [0], [3]] and series.observed.tolist() == [[True], [False], [True]]


def test_an_adjacency_is_a_graph_from_lines_to_columns(written):
    adjacency = written("adjacency.csv.gz", gzip.compress(b"1,0,0.5\n0,0,2\n0,0,0\n"))
    graph = read_series(written("a.csv", "a,b,c\n1,2,3\n"), adjacency).graph
    assert graph.edge_index.tolist() == [[0, 0, 1], [0, 2, 2]]
    assert graph.edge_weight.tolist() == [1, 0.5, 2] and graph.edge_weight.dtype == torch.float32
    assert graph.num_nodes == 3


@pytest.mark.parametrize("text, message", [
    ("a,b\n1,2\n3,x\n", r"a\.csv, line 3: expected a finite number in column 2, of the sensor 'b'; got 'x'\."),
    ("a,b\n1;2,3\n", r"line 2: expected a finite number in column 1, of the sensor 'a'; got '1;2'\."),
    *[(f"a,b\n1,{bad}\n", r"line 2: expected a finite number in column 2, of the sensor 'b'; got '\S+'\.")
      for bad in ("inf", "-Infinity", "1e39", "1e999", "1_000", "１", "0x10", "--1", "-nan", "None")],
    ("a,b\n1,2\n3\n", r"a\.csv, line 3: expected 2 cells, one a sensor; got 1\."),
    ("a,b\n1,2,3\n", r"a\.csv, line 2: expected 2 cells, one a sensor; got 3\."),
    ("a,b\n1,2\n\n3,4\n", r"a\.csv, line 3: expected 2 cells, one a sensor; got 0\."),
    (",a\n0,2\n", r"a\.csv, line 1: expected the name of a sensor in each column; got none in column 1\. A column of"),
    ("\na\n0\n", r"a\.csv, line 1: expected the name of a sensor in each column; got none in column 1\."),
    ("1,2,1\n3,4,5\n", r"a\.csv, line 1: expected names of sensors, each once; got '1' twice\. Is it a line of read"),
    ("1.5,2\n3,4\n", r"a\.csv, line 1: expected the names of the sensors; got '1\.5'\. Is it a line of readings"),
    ("a;b\n1;2\n", r"a\.csv, line 1: expected commas between the cells; got 'a;b'\."),
    ("date,a\n2012-03-01,1\n", r"line 2: .* got '2012-03-01'\. A column of times has to be left out\."),
    ('a,b\n"1,2\n', r"a\.csv, line 2: expected cells with commas between them; got unexpected end of data\."),
    ("a,b\n1\r2,3\n", r"a\.csv, line 2: expected cells with commas between them; got new-line character seen"),
    (f"a\n{'1' * 200_000}\n", r"a\.csv, line 2: expected cells with commas .*; got field larger than field limit"),
    ("a,b\n", r"a\.csv: expected readings after the line of names; got no other line\."),
    ("a,b\n,\n,NA\n", r"a\.csv: expected a reading; got missing ones alone\."),
    ("", r"a\.csv: expected text; got an empty file\.")])
def test_a_wrong_cell_is_named(written, text, message):
    with pytest.raises(DataError, match=message):
        read_series(written("a.csv", text))


def test_parts_are_whole_shares():
    assert ends_of_parts(10, 0.7, 0.1) == {"train": 7, "val": 8, "test": 10}


def test_zeros_alone_are_readings_or_none(written):
    path = written("a.csv", "a,b\n0,0\n")
    assert read_series(path).observed.all()
    with pytest.raises(DataError, match="expected a reading; got missing ones alone"):
        read_series(path, missing="zero")


@pytest.mark.parametrize("text, message", [
    ("1,0\n", r"adjacency\.csv: expected 2 lines, one a sensor; got 1\."),
    ("1,0\n0,1\n0,0\n", r"adjacency\.csv: expected 2 lines, one a sensor; got 3\."),
    ("1,0,0\n0,1,0\n0,0,1\n", r"adjacency\.csv, line 1: expected 2 cells, one a sensor; got 3\."),
    ("1,0\n0\n", r"adjacency\.csv, line 2: expected 2 cells, one a sensor; got 1\."),
    ("a,b\n1,0\n0,1\n", r"adjacency\.csv, line 1: expected a finite number in column 1, of the sensor 'a'; got 'a'\."),
    ("1,0\n0,-2\n", r"adjacency\.csv, line 2: expected a weight, at least 0, in column 2; got -2\.0\."),
    ("1,0\n0,\n", r"adjacency\.csv, line 2: expected a finite number in column 2; got none\."),
    ("", r"adjacency\.csv: expected text; got an empty file\.")])
def test_a_wrong_adjacency_is_named(written, text, message):
    path, adjacency = written("a.csv", "a,b\n1,2\n"), written("adjacency.csv", text)
    with pytest.raises(DataError, match=message):
        read_series(path, adjacency)


def test_where_nothing_may_be_missing_the_cell_is_named(written):
    with pytest.raises(DataError, match=r"line 3: expected a finite number in column 2, of the sensor 'b'; got none\."):
        read_series(written("a.csv", "a,b\n1,2\n3,nan\n,4\n"), missing="none")
    assert read_series(written("a.csv", "a,b\n1,0\n"), missing="none").observed.all()


def test_missing_is_one_of_three(tmp_path):
    with pytest.raises(ConfigError, match="missing must be one of 'nan', 'zero', 'none'; got 'zeros'"):
        read_series(tmp_path / "none", missing="zeros")
