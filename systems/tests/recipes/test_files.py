"""What a run is continued on only as it was: every file that a recipe reads, and none that it does not name."""

from structconv_systems.recipes.options.knowledge import TypedWalks
from structconv_systems.recipes.options.series import Series
from structconv_systems.recipes.options.tsp import TSP


def test_a_folder_that_tests_is_watched(tmp_path):
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test.txt").write_text("a r b\n")
    watched = TypedWalks(data=str(tmp_path), triples="here", test="there").files()
    assert [file.parent.name for file in watched] == ["here", "there"]
    assert [file.parent.name for file in TypedWalks(data=str(tmp_path), triples="here").files()] == ["here"]


def test_the_tour_beside_a_problem_is_watched(tmp_path):
    problem, tour = tmp_path / "a.tsp", tmp_path / "a.opt.tour"
    for file in (problem, tour):
        file.write_text("x")
    assert TSP(test=str(problem)).files() == [problem, tour]
    assert TSP().files() == []


def test_an_option_that_names_no_file_watches_none(tmp_path):
    (tmp_path / "a.csv").write_text("a\n1\n")
    assert Series(data=str(tmp_path), file="a.csv").files() == [tmp_path / "a.csv"]
