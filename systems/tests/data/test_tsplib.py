"""TSPLIB: the real problems with their known optima, every rule of distance by hand, and every line that is wrong."""

import pytest
import torch

from structconv.errors import DataError
from structconv_systems.data.tours import lengths
from structconv_systems.data.tsplib import read_problem, read_tour

OPTIMA = {"a280": 2579, "berlin52": 7542, "eil101": 629, "eil51": 426, "kroA100": 21282, "st70": 675}
HEAD = "NAME : a\nTYPE : TSP\nDIMENSION : {n}\nEDGE_WEIGHT_TYPE : {kind}\n"
NODES = "NODE_COORD_SECTION\n1 0 0\n2 3.4 4\n 3 -10 2.5e0 \nEOF\n"


def problem(written, kind="EUC_2D", nodes=NODES, n=3):
    return read_problem(written("a.tsp", HEAD.format(kind=kind, n=n) + nodes))


@pytest.mark.parametrize("name", OPTIMA)
def test_optimal_tours_have_their_published_lengths(real, name):
    actual = read_problem(real("tsplib") / f"{name}.tsp")
    tour = read_tour(real("tsplib") / f"{name}.opt.tour", nodes=len(actual.points))
    assert actual.name.startswith(name) and torch.equal(actual.distances, actual.distances.mT)
    assert lengths(actual.distances, tour) == OPTIMA[name]


@pytest.mark.parametrize("kind, expected", [
    ("EUC_2D", [5, 10, 13]), ("CEIL_2D", [6, 11, 14]), ("MAN_2D", [7, 13, 15]), ("MAX_2D", [4, 10, 13]),
    ("ATT", [2, 4, 5])])
def test_each_rule_rounds_as_it_says(written, kind, expected):
    """Distances sqrt(27.56), sqrt(106.25) and sqrt(181.81) of the three pairs, and their likes."""
    table = problem(written, kind).distances
    assert [table[0, 1], table[0, 2], table[1, 2]] == expected
    assert torch.equal(table, table.mT) and not table.diagonal().any()


def test_geographical_distances(written):
    """The first three nodes of ulysses16, whose distances are 509 and 501 in its literature."""
    nodes = "NODE_COORD_SECTION\n1 38.24 20.42\n2 39.57 26.15\n3 40.56 25.32\nEOF\n"
    table = problem(written, "GEO", nodes).distances
    assert [table[0, 1], table[0, 2], table[1, 2]] == [509, 501, 126]


@pytest.mark.parametrize("layout, numbers", [
    ("FULL_MATRIX", "0 1 2  1 0 3\n2 3 0"), ("UPPER_ROW", "1 2 3"), ("LOWER_ROW", "1 2 3"),
    ("UPPER_DIAG_ROW", "0 1 2 0 3 0"), ("LOWER_DIAG_ROW", "0\n1 0\n2 3 0"), ("UPPER_COL", "1 2 3"),
    ("LOWER_COL", "1 2 3"), ("UPPER_DIAG_COL", "0 1 0 2 3 0"), ("LOWER_DIAG_COL", "0 1 2 0 3 0")])
def test_explicit_distances(written, layout, numbers):
    text = f"EDGE_WEIGHT_FORMAT : {layout}\nEDGE_WEIGHT_SECTION\n{numbers}\nEOF\n"
    actual = problem(written, "EXPLICIT", text)
    assert actual.distances.tolist() == [[0, 1, 2], [1, 0, 3], [2, 3, 0]] and actual.points is None


def test_explicit_distances_may_have_points_to_show(written):
    shown = NODES.replace("NODE_COORD", "DISPLAY_DATA").replace("EOF\n", "")
    text = f"EDGE_WEIGHT_FORMAT: UPPER_ROW\n{shown}EDGE_WEIGHT_SECTION\n1 2 3\nEOF\n"
    assert problem(written, "EXPLICIT", text).points.tolist() == [[0, 0], [3.4, 4], [-10, 2.5]]


def test_a_tour_may_end_with_its_file(written):
    text = "TYPE : TOUR\nTOUR_SECTION\n2 3\n1"
    for end in ("\n", "\n-1\nEOF\n", "\n-1\n7 8\n"):
        assert read_tour(written("a.opt.tour", text + end), nodes=3).tolist() == [1, 2, 0]


@pytest.mark.parametrize("kind, nodes, message", [
    ("EUC_3D", NODES, r"a\.tsp, line 4: expected EDGE_WEIGHT_TYPE to be one of EUC_2D, .*, EXPLICIT; got 'EUC_3D'\."),
    ("", NODES, r"a\.tsp, line 4: expected EDGE_WEIGHT_TYPE to be one of .*; got ''\."),
    ("EUC_2D", "", r"a\.tsp: expected NODE_COORD_SECTION; got none\."),
    ("EUC_2D", "1 0 0\n", r"a\.tsp, line 5: expected KEY : VALUE, or a section: NODE_COORD_SECTION.*; got '1 0 0'\."),
    ("EUC_2D", "NODE_COORD_SECTION\n1 0 0\n2 1 1\n", r"expected DIMENSION=3 nodes in NODE_COORD_SECTION; got 2\."),
    ("EUC_2D", "NODE_COORD_SECTION\n1 0 0\n1 1 1\n", r"line 7: expected a node of 1 \.\.\. 3 that .*; got '1 1 1'\."),
    ("EUC_2D", "NODE_COORD_SECTION\n1 0 0\n4 1 1\n", r"line 7: expected a node of 1 \.\.\. 3 that .*; got '4 1 1'\."),
    ("EUC_2D", "NODE_COORD_SECTION\n1 0\n", r"line 6: expected a node of .*, and its two coordinates; got '1 0'\."),
    ("EUC_2D", "NODE_COORD_SECTION\n1 0 x\n", r"line 6: expected a finite number, at most 2\^53; got 'x'\."),
    ("EUC_2D", "NODE_COORD_SECTION\n1 0 nan\n", r"line 6: expected a finite number, at most 2\^53; got 'nan'\."),
    ("EUC_2D", "NODE_COORD_SECTION\n1 0 -1e300\n", r"line 6: expected a finite number, at most 2\^53; got '-1e300'\."),
    ("EXPLICIT", "EDGE_WEIGHT_SECTION\n1 2 3\n", r"a\.tsp: expected EDGE_WEIGHT_FORMAT; got none\."),
    ("EXPLICIT", "EDGE_WEIGHT_FORMAT : FUNCTION\n", r"line 5: expected EDGE_WEIGHT_FORMAT to be one of FULL_MATRIX, "),
    ("EXPLICIT", "EDGE_WEIGHT_FORMAT : UPPER_ROW\n", r"a\.tsp: expected EDGE_WEIGHT_SECTION; got none\."),
    ("EXPLICIT", "EDGE_WEIGHT_FORMAT : UPPER_ROW\nEDGE_WEIGHT_SECTION\n1 2\n",
     r"expected 3 numbers in EDGE_WEIGHT_SECTION, as UPPER_ROW has for DIMENSION=3; got 2\."),
    ("EXPLICIT", "EDGE_WEIGHT_FORMAT : FULL_MATRIX\nEDGE_WEIGHT_SECTION\n0 1 2 3 0 4 5 6 0\n",
     r"a\.tsp: expected symmetric distances, as TYPE : TSP has; got others\.")])
def test_a_wrong_line_is_named(written, kind, nodes, message):
    with pytest.raises(DataError, match=message):
        problem(written, kind, nodes)


@pytest.mark.parametrize("head, message", [
    ("TYPE : ATSP\n", r"line 1: expected TYPE to be one of TSP; got 'ATSP'\."),
    ("TYPE : TSP\nEDGE_WEIGHT_TYPE : EUC_2D\nDIMENSION : x\n", r"line 3: expected DIMENSION to be .*; got 'x'\."),
    ("TYPE : TSP\nEDGE_WEIGHT_TYPE : EUC_2D\n", r"a\.tsp: expected DIMENSION; got none\."),
    ("DIMENSION : 3\n", r"a\.tsp: expected TYPE; got none\."), ("", r"a\.tsp: expected text; got an empty file\.")])
def test_a_wrong_head_is_named(written, head, message):
    with pytest.raises(DataError, match=message):
        read_problem(written("a.tsp", head))


@pytest.mark.parametrize("text, message", [
    ("1\n2\n2\n", r"a\.opt\.tour, line 5: expected a node of 1 \.\.\. 3 that has not come yet; got '2'\."),
    ("1\n4\n", r"line 4: expected a node of 1 \.\.\. 3 that has not come yet; got '4'\."),
    ("1\nx\n", r"line 4: expected a node of .*; got 'x'\."),
    ("1\n2\n-1\n", r"a\.opt\.tour: expected a tour through 3 nodes; got 2\.")])
def test_a_wrong_tour_is_named(written, text, message):
    with pytest.raises(DataError, match=message):
        read_tour(written("a.opt.tour", f"TYPE : TOUR\nTOUR_SECTION\n{text}"), nodes=3)
