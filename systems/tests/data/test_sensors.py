"""What relates sensors: DCRNN's published files, other orders, and everything in them that is wrong."""

import pickle

import numpy as np
import pytest
import torch

from structconv.errors import DataError
from structconv_systems.data.sensors import read_adjacency, read_locations
from structconv_systems.data.series import read_series

NAMES, WEIGHTS = ("a", "b", "c"), [[1.0, 0.0, 0.5], [0.0, 0.0, 2.0], [0.0, 0.25, 0.0]]


@pytest.fixture
def traffic(real):
    return real("traffic")


def test_dcrnns_files_are_of_the_sensors_of_los_loop(traffic):
    names = read_series(traffic / "los_speed.csv").names
    directed = read_adjacency(traffic / "metr_la_adj_mx.pkl", names)
    both = read_adjacency(traffic / "los_adj.csv", names).to_torch_sparse().to_dense()
    own = directed.to_torch_sparse().to_dense()
    assert directed.num_edges == 1722 and torch.equal(torch.maximum(own, own.T), both)
    places = read_locations(traffic / "metr_la_graph_sensor_locations.csv", names)
    torch.testing.assert_close(places[0], torch.tensor([-118.31829, 34.15497]))
    assert places.shape == (207, 2)


def pickled(folder, content, name="a.pkl"):
    path = folder / name
    path.write_bytes(pickle.dumps(content, protocol=4))
    return path


def dcrnn(names=NAMES, weights=WEIGHTS):
    return [list(names), {name: place for place, name in enumerate(names)}, np.array(weights, dtype=np.float32)]


def test_the_sensors_of_a_pickle_may_be_more_and_in_another_order(tmp_path):
    graph = read_adjacency(pickled(tmp_path, dcrnn()), ("c", "b"))
    assert graph.to_torch_sparse().to_dense().tolist() == [[0, 0.25], [2, 0]]


def test_places_in_a_pickle_may_be_numpys(tmp_path):
    names, places, weights = dcrnn()
    own = pickled(tmp_path, [names, {name: np.int64(place) for name, place in places.items()}, weights])
    assert read_adjacency(own, ("c", "b")).to_torch_sparse().to_dense().tolist() == [[0, 0.25], [2, 0]]


@pytest.mark.parametrize("content, message", [
    (dcrnn(("a", "b", "d")), r"a\.pkl: expected the sensor 'c', which the series names; got 3 other ones\."),
    (dcrnn(weights=[[1.0, 0.0, np.nan], *WEIGHTS[1:]]), "a matrix of weights, finite in float32 and at least 0;"),
    (dcrnn(weights=[[1.0, 0.0, -1.0], *WEIGHTS[1:]]), "a matrix of weights, finite in float32 and at least 0;"),
    (dcrnn(weights=WEIGHTS[:2]), r"expected \[names of S sensors, the place of each, a matrix \(S, S\)\]; got list"),
    (dcrnn(weights=[[1.0, 0], [0, 1]]), r"expected a place below 2 of each sensor; got 2\."),
    ([[], {"a": 0.5, "b": "0", "c": 1}, np.eye(3)], r"expected a place below 3 of each sensor; got 0\.5\."),
    ([[], dict.fromkeys(NAMES, 0), np.eye(3)], "expected a place of its own for each sensor; got two at one place"),
    ([[], {"a": 0, "b": 1, "c": 2}, np.eye(3) * 1e300], "a matrix of weights, finite in float32 and at least 0; got"),
    ({"a": 1}, r"a matrix \(S, S\)\]; got dict\.")])
def test_a_wrong_pickle_is_named(tmp_path, content, message):
    with pytest.raises(DataError, match=message):
        read_adjacency(pickled(tmp_path, content), NAMES)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_any_protocol(tmp_path, protocol):
    (tmp_path / "a.pkl").write_bytes(pickle.dumps(dcrnn(), protocol=protocol))
    assert read_adjacency(tmp_path / "a.pkl", ("c", "b")).num_nodes == 2


def test_a_pickle_that_is_not_there_or_would_run_something(tmp_path):
    with pytest.raises(DataError, match=r"a\.pkl: expected a file; got no such file"):
        read_adjacency(tmp_path / "a.pkl", NAMES)
    with pytest.raises(DataError, match="forbidden global"):
        read_adjacency(pickled(tmp_path, [print]), NAMES)


def test_locations_go_by_the_names(written):
    path = written("a.csv", "index,sensor_id,latitude,longitude\n0,b,1.5,2\n1,x,0,0\n2,a,-3,4\n")
    assert read_locations(path, ("a", "b")).tolist() == [[4, -3], [2, 1.5]]


HEAD = "sensor_id,latitude,longitude\n"


@pytest.mark.parametrize("text, message", [
    (f"{HEAD}a,1,2\n", r"a\.csv: expected the sensor 'b', which the series names; got 1 other ones\."),
    ("sensor_id,latitude\na,1\n", r"a\.csv, line 1: expected the columns sensor_id, longitude, latitude; got no longi"),
    (f"{HEAD}a,1\n", r"a\.csv, line 2: expected 3 cells, one a column; got 2\."),
    (f"{HEAD}a,1,2\nb,x,2\n", r"a\.csv, line 3: expected a finite number in column 2, of the sensor 'latitude'; got"),
    (f"{HEAD}a,1,2\nb,,2\n", r"a\.csv, line 3: expected longitude and latitude of the sensor 'b'; got an open cell\."),
    (f"{HEAD}a,1,2\na,1,2\n", r"a\.csv, line 3: expected each sensor once; got 'a' again\."),
    ("", r"a\.csv: expected text; got an empty file\.")])
def test_wrong_locations_are_named(written, text, message):
    path = written("a.csv", text)
    with pytest.raises(DataError, match=message):
        read_locations(path, ("a", "b"))
