"""The recipe `interactions` as its user meets it: train, evaluate, also on more bodies, resume, pictures, bad options;
and what it measures."""

import pytest
import torch

from structconv.cli import main
from structconv_systems.recipes.interactions import RUNNER, InteractionTask, Motion
from structconv_systems.recipes.options.physics import Interactions
from structconv_systems.train.parts import final_evaluation
from systems.tests.recipes.runs import check_laws, evaluated, others, summary_of, trained

TINY = ["steps=4", "validate_every=2", "checkpoint_every=2", "warmup=1", "samples=8", "held_out=4", "times=6",
        "batch_size=8", "hidden=8", "effects=4", "layers=1", "rollouts=2", "horizon=9", "seeds=1"]
SMALL = {"samples": 8, "held_out": 4, "times": 6, "hidden": 8, "effects": 4, "layers": 1, "rollouts": 2, "horizon": 5}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("interactions") / "run", ["train", "interactions", *TINY])


def test_a_run_keeps_the_laws_says_its_figures_and_draws(run, tmp_path, capsys):
    summary = check_laws(run, tmp_path, capsys)
    systems = ["gravity", "balls", "string"]
    assert list(summary["groups"]) == [group for name in systems for group in (name, f"{name}-independent")]
    actual = summary["results"]
    ratio = min(min(actual[f"{name}/seed-0"]["test_constant"], actual[f"{name}-independent/seed-0"]["test_loss"])
                / actual[f"{name}/seed-0"]["test_loss"] for name in systems[:2])
    assert summary["headline"]["value"] == pytest.approx(ratio)
    for name in systems:
        for picture in (f"paths-{name}.png", f"paths-{name}.svg", f"motion-{name}.gif"):
            assert (run / "pictures" / picture).stat().st_size > 1000
    assert "constant velocity" in capsys.readouterr().out


def test_a_run_is_measured_on_another_number_of_bodies(run, capsys):
    groups = summary_of(run)["groups"]
    actual = evaluated(run, capsys, "--test", "4")
    for name, group in actual["groups"].items():
        assert group["test_ratio"] != groups[name]["test_ratio"]
        assert group["test_more"] == groups[name]["test_more"]
    assert actual["test"]["name"] == "4"
    assert main(["evaluate", str(run), "--test", "many"]) == 2
    assert "test must be an integer" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["systems=gravity,springs", "systems=", "times=1", "penalty=-1", "horizon=0"])
def test_bad_options_are_refused(wrong, refused):
    refused(["train", "interactions", *others(TINY, wrong)], wrong.partition("=")[0])


def test_without_gravity_and_balls_there_is_no_headline(tmp_path):
    run = trained(tmp_path / "run", ["train", "interactions", *TINY, "systems=string"])
    assert summary_of(run)["headline"]["value"] is None


@pytest.fixture(scope="module", params=["gravity", "balls", "string"])
def motion(request):
    return Motion.simulated(Interactions(**SMALL), request.param)


def test_a_step_is_a_state_and_the_change_that_follows(motion):
    steps, states = motion.steps["val"], motion.steps["val"].simulations.states
    assert len(steps) == 4 * 5
    actual = steps.at(torch.tensor([7, 19]))
    for place, (simulation, time) in enumerate(((1, 2), (3, 4))):
        assert torch.equal(actual.states[place], states[simulation, time])
        assert torch.equal(actual.changes[place], (states[simulation, time + 1] - states[simulation, time])[:, 2:])
        assert torch.equal(actual.properties[place], steps.simulations.properties[simulation])


@final_evaluation()
def test_the_error_of_no_change_is_that_of_constant_velocity(motion):
    """And the ratio is one of errors in the unit of velocities."""
    steps = motion.steps["test"]
    error, constant = steps.figures(lambda states, properties, graph: torch.zeros_like(states[..., 2:]))
    assert error == constant
    velocities = steps.simulations.states[..., 2:].double()
    assert constant == pytest.approx(float(velocities.diff(dim=1).square().mean()), rel=1e-4)


@final_evaluation()
def test_parts_are_different_simulations_with_their_numbers_of_bodies(motion):
    seen = {part: steps.simulations.states.shape[2] for part, steps in motion.steps.items()}
    assert seen["fewer"] < seen["train"] == seen["val"] == seen["test"] < seen["more"]
    assert not torch.equal(motion.steps["val"].simulations.states, motion.steps["test"].simulations.states)


def test_steps_with_changes_and_those_beside_them_are_drawn_more_often():
    motion = Motion.simulated(Interactions(**{**SMALL, "times": 20}), "balls")
    changes = motion.steps["train"].simulations.states[..., 2:].diff(dim=1).square().sum(-1)
    much = (changes.amax(-1) > changes.mean()).flatten()
    counts = motion.drawn().bincount(minlength=len(much))
    assert set(counts.tolist()) == {1, 8}
    assert (counts[much] == 8).all()
    assert much.sum() < (counts == 8).sum() < len(much)


def test_energy_is_kept_by_the_simulators_and_not_by_straight_lines(motion):
    assert motion.drift(motion.long) < 1
    begin = motion.long.states[:, :1]
    shifted = begin.clone()
    shifted[..., 2:] *= 2
    wrong = motion.long.states.clone()
    wrong[:, -1:] = shifted if motion.features.fixed(motion.long.properties) is None else shifted + 1
    faster = type(motion.long)(states=wrong, couplings=motion.long.couplings, properties=motion.long.properties,
                               interval=motion.long.interval)
    assert motion.drift(faster) > 10


def test_a_rollout_begins_where_the_simulation_does(motion):
    task = InteractionTask(motion.recipe, motion, True, 0)
    rolled = motion.rollout(task.model.eval())
    assert rolled.states.shape == motion.long.states.shape
    assert torch.equal(rolled.states[:, 0], motion.long.states[:, 0])


def test_effects_are_penalized():
    motion = Motion.simulated(Interactions(**SMALL), "gravity")
    task = InteractionTask(motion.recipe, motion, True, 0)
    torch.nn.init.normal_(task.model.network.edge.rest[-1].bias, std=3.0)
    loss, count = task.loss([0, 1, 2])
    states, properties, changes = motion.steps["train"].at(task.drawn[:3])
    predicted, effects = task.model.respond(states, properties, motion.steps["train"].graph)
    error = (predicted * task.model.change_scale - changes).square().mean() / task.model.change_scale**2
    expected = error + motion.recipe.penalty * effects.square().mean()
    torch.testing.assert_close(loss / count, expected.squeeze())


def test_it_can_be_tried():
    assert RUNNER.jobs is not None
    jobs = RUNNER.jobs(Interactions(**SMALL, systems=("gravity",), seeds=2), None)
    assert [job.name for job in jobs] == ["gravity/seed-0", "gravity/seed-1", "gravity-independent/seed-0",
                                         "gravity-independent/seed-1"]
    assert [job.make().model.relations for job in jobs] == [True, True, False, False]
