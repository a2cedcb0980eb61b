"""The recipe `tsp` as its user meets it: train, resume, evaluate, on files too; and its baselines."""

import pytest
import torch

from structconv.cli import main
from structconv.errors import ConfigError
from structconv_systems.data.tours import distances, exact, uniform
from structconv_systems.data.tsplib import read_problem
from structconv_systems.models.tours import TourModel
from structconv_systems.recipes.options.tsp import TSP
from structconv_systems.recipes.tsp import (
    RUNNER,
    Exponential,
    Instances,
    Rollout,
    Shared,
    best_of,
    better,
    greedy_tours,
    measure,
    turned_tours,
)
from structconv_systems.train.config import resolve
from structconv_systems.train.parts import final_evaluation
from systems.tests.recipes.runs import check_laws, evaluated, others, trained
from tests.support.drawn import drawn

TINY = ["steps=6", "validate_every=3", "checkpoint_every=2", "challenge_every=2", "nodes=6", "channels=8", "layers=1",
        "heads=2", "hidden=16", "batch_size=16", "challengers=64", "instances=8", "samples=4", "seeds=1", "copies=4"]
SQUARE = "NAME : square\nTYPE : TSP\nDIMENSION : 5\nEDGE_WEIGHT_TYPE : EUC_2D\nNODE_COORD_SECTION\n" \
         "1 100 0\n2 300 200\n3 100 200\n4 300 0\n5 200 250\nEOF\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "tsp", ["train", "tsp", *TINY, "baseline=rollout"])


@pytest.fixture
def small():
    return TourModel(channels=8, layers=1, heads=2, hidden=16).eval()


def test_a_run_keeps_the_laws_and_has_its_figures_and_its_pictures(run, tmp_path, capsys):
    """It is resumed with a baseline that has been replaced since, and its instances."""
    summary = check_laws(run, tmp_path, capsys)
    figures = {name: value["mean"] for name, value in summary["groups"]["attention"].items()}
    assert 0 <= figures["test_gap_samples"] <= figures["test_gap"] >= figures["test_gap_turned"] >= 0
    beside = {name: row["test_gap"]["mean"] for name, row in summary["groups"].items() if name != "attention"}
    assert beside["farthest-insertion"] >= beside["insertion-2-opt"] >= 0
    assert beside["2-opt-of-eight"] == pytest.approx(0, abs=1e-5)  # five nodes
    assert summary["headline"]["value"] == pytest.approx(beside["farthest-insertion"] - figures["test_gap"])
    assert figures["test_shortest"] <= figures["test_length_samples"] <= figures["test_length"]
    assert (summary["headline"]["seeds"], summary["headline"]["state"]) == (1, "not shown")
    assert {path.name for path in (run / "pictures").glob("*.png")} == {f"tours-{place}.png" for place in (1, 2, 3)}
    assert "Tours through the points of test instance 1" in (run / "report.html").read_text()


@final_evaluation()
def test_network_and_rules_have_the_same_test_instances_and_each_seed_its_own():
    shortest = {}
    for job in RUNNER.jobs(resolve(TSP, others(TINY, "seeds=2")), None):
        group, seed = job.name.split("/")
        shortest.setdefault(seed, {})[group] = job.make().test()["test_shortest"]
    assert [len(set(groups.values())) for groups in shortest.values()] == [1, 1]
    assert shortest["seed-0"]["attention"] != shortest["seed-1"]["attention"] and len(shortest["seed-0"]) == 4


def test_a_file_is_measured_in_its_own_unit(run, written, capsys):
    """The optimum is that of the tour beside it, else of the recipe's own search: 200 + 200 + 2 x 112 + 200."""
    path = written("square.tsp", SQUARE)
    summary = evaluated(run, capsys, "--test", str(path))
    figures = {name: value["mean"] for name, value in summary["groups"]["attention"].items()}
    assert figures["test_shortest"] == 824 and summary["test"]["name"] == str(path)
    assert figures["test_gap"] == pytest.approx(100 * (figures["test_length"] / 824 - 1))
    shortest = " ".join(str(int(node) + 1) for node in exact(read_problem(str(path)).distances))
    tour = "TYPE : TOUR\nTOUR_SECTION\n{}\n-1\n"
    path.with_suffix(".opt.tour").write_text(tour.format(shortest))
    again = evaluated(run, capsys, "--test", str(path))["groups"]["attention"]
    assert {name: value["mean"] for name, value in again.items()} == figures
    path.with_suffix(".opt.tour").write_text(tour.format("1 2 3 4 5"))
    assert main(["evaluate", str(run), "--test", str(path)]) == 3
    assert "expected its shortest tour in the .opt.tour beside it; got a longer one" in capsys.readouterr().err


@pytest.mark.parametrize("text, message", [
    (SQUARE.replace("EUC_2D", "SPECIAL"), r"square.tsp, line 4: expected EDGE_WEIGHT_TYPE to be one of"),
    (SQUARE.replace("3 100 200", "3 100"), "square.tsp, line 8: expected a node of 1 ... 5"),
    ("TYPE : TSP\nDIMENSION : 3\nEDGE_WEIGHT_TYPE : EXPLICIT\nEDGE_WEIGHT_FORMAT : UPPER_ROW\nEDGE_WEIGHT_SECTION\n"
     "1 2 3\n", "square.tsp: expected coordinates, which the model reads; got distances alone")])
def test_a_wrong_file_is_named(run, written, capsys, text, message):
    path = written("square.tsp", text)
    assert main(["evaluate", str(run), "--test", str(path)]) == 3
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_not_there(run, tmp_path, capsys):
    assert main(["evaluate", str(run), "--test", str(tmp_path / "none.tsp")]) == 3


@pytest.mark.parametrize("baseline", drawn(["shared", "exponential"], 2))
def test_other_baselines_train(baseline, tmp_path):
    trained(tmp_path / "run", ["train", "tsp", *TINY, f"baseline={baseline}"])


def test_options_that_do_not_fit():
    for options in ({"heads": 3}, {"baseline": "critic"}, {"baseline": "shared", "copies": 7}):
        with pytest.raises(ConfigError):
            resolve(TSP, options)


def test_nodes_at_one_place_leave_no_gap(run, written, capsys):
    path = written("same.tsp", "TYPE: TSP\nDIMENSION: 3\nEDGE_WEIGHT_TYPE: EUC_2D\nNODE_COORD_SECTION\n"
                               "1 5 5\n2 5 5\n3 5 5\nEOF\n")
    groups = evaluated(run, capsys, "--test", str(path))["groups"]
    assert all(group["test_gap"]["mean"] == 0 for group in groups.values())


def test_points_of_a_file_lie_in_the_unit_square(written):
    path = written("square.tsp", SQUARE)
    actual = Instances.read(str(path))
    torch.testing.assert_close(actual.points, torch.tensor([[[0, 0], [0.8, 0.8], [0, 0.8], [0.8, 0], [0.4, 1]]]))
    torch.testing.assert_close(actual.table, (250 * distances(actual.points)).round())


def test_turned_points_have_the_same_distances_and_the_shortest_tour_is_chosen(small, monkeypatch):
    """Eight different turns, the points themselves among them; a tour is measured on the points themselves."""
    instances, seen = Instances.drawn(5, 7, 3), []

    def tours(model, points):
        seen.append(points)
        return greedy_tours(model, points)

    monkeypatch.setattr("structconv_systems.recipes.tsp.greedy_tours", tours)
    shortest = turned_tours(small, instances)
    assert len({tuple(points.flatten().tolist()) for points in seen}) == 8 and torch.equal(seen[0], instances.points)
    for points in seen:
        assert torch.allclose(distances(points), instances.table, atol=1e-6)
    lengths = torch.stack([instances.lengths(greedy_tours(small, points)) for points in seen], 1)
    assert torch.equal(instances.lengths(shortest), lengths.amin(1))


def test_the_best_of_samples_is_no_longer_than_most(small):
    instances = Instances.drawn(5, 7, 0)
    one, many = (instances.lengths(best_of(small, instances, samples)) for samples in (1, 40))
    assert (many <= one + 1e-9).all() and many.mean() < one.mean()
    assert torch.equal(best_of(small, instances, 4), best_of(small, instances, 4))
    greedy_lengths = instances.lengths(greedy_tours(small, instances.points))
    torch.testing.assert_close(measure(small, instances.points).double(), greedy_lengths, rtol=1e-6, atol=1e-6)


def test_the_exponential_mean_begins_with_the_first():
    mean = Exponential(0.75)
    assert float(mean.value(torch.zeros(2), torch.tensor([1.0, 3.0]))) == 2
    assert float(mean.value(torch.zeros(2), torch.tensor([6.0, 6.0]))) == 3
    again = Exponential(0.75)
    again.load_state_dict(mean.state_dict())
    assert again.mean == 3


def test_a_shared_baseline_is_the_mean_of_the_others():
    costs = torch.tensor([1.0, 2, 6, 0, 0, 3])
    assert Shared(3).value(torch.zeros(2), costs).tolist() == [4, 3.5, 1.5, 1.5, 1.5, 0]


def test_the_rollout_changes_only_for_a_better_model(small):
    torch.manual_seed(1)
    trained, drawn = TourModel(channels=8, layers=1, heads=2, hidden=16), []

    def instances(number):
        drawn.append(number)
        return uniform(200, 6, number)

    def told(model, points):
        """The trained model is better by a fifth."""
        return measure(model, points) * (0.8 if model is trained else 1.0)

    rollout = Rollout(small, measure, instances, every=2, alpha=0.05, decay=0.8)
    costs = torch.tensor([4.0, 2.0])
    assert float(rollout.value(uniform(2, 6, 0), costs)) == 3 and rollout.stepped(1, trained) == {}
    assert rollout.stepped(2, small) == {"replaced": 0} and rollout.value(uniform(2, 6, 0), costs).shape == (2,)
    rollout.measure = told
    assert rollout.stepped(4, trained.train()) == {"replaced": 1} and trained.training
    for name, value in trained.state_dict().items():
        assert torch.equal(value, rollout.model.state_dict()[name])
    rollout.stepped(6, trained)
    assert drawn == [0, 0, 1]
    fresh = Rollout(small, measure, instances, every=2, alpha=0.05, decay=0.8)
    fresh.load_state_dict(rollout.state_dict())
    assert (fresh.challenges, fresh.replaced) == (3, 2)
    torch.testing.assert_close(fresh.value(uniform(4, 6, 0), costs), measure(trained.eval(), uniform(4, 6, 0)))


def test_a_model_is_better_only_by_enough():
    noise = torch.randn(100, generator=torch.Generator().manual_seed(0))
    assert better(noise - 1, noise, 0.05) and not better(noise, noise - 1, 0.05)
    assert not better(noise, noise, 0.05) and not better(noise.flip(0), noise, 0.05)
