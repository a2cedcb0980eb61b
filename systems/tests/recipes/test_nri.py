"""The recipe `nri` as its user meets it: train, evaluate, resume, pictures, bad options; and what it measures."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from structconv_systems.recipes.nri import Motion, UnsupervisedTask
from structconv_systems.recipes.options.physics import RelationalInference
from structconv_systems.train.config import resolve
from structconv_systems.train.parts import final_evaluation
from systems.tests.recipes.runs import check_laws, others, summary_of, trained
from tests.support.drawn import drawn

TINY = ["steps=4", "supervised_steps=2", "validate_every=2", "checkpoint_every=2", "warmup=1", "samples=30",
        "held_out=10", "batch_size=8", "hidden=8", "times=12", "rollout=3", "windows=3", "seeds=1"]
SMALL = {"samples": 30, "held_out": 10, "times": 12, "rollout": 3, "hidden": 8}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("nri") / "run", ["train", "nri", *TINY])


def test_a_run_keeps_the_laws_says_its_figures_and_draws(run, tmp_path, capsys):
    summary = check_laws(run, tmp_path, capsys)
    assert list(summary["groups"]) == ["unsupervised", "supervised", "mlp", "correlation"]
    actual = summary["results"]["unsupervised/seed-0"]
    assert {"test_mse_1", "test_mse_3", "test_mse_static", "test_mse_dynamic"} <= actual.keys()
    for name in ("graph-0.png", "graph-0.svg", "motion-2.png", "motion.gif", "law.svg"):
        assert (run / "pictures" / name).stat().st_size > 1000
    said = capsys.readouterr().out
    assert "edges found anew" in said and "refined, %" in said
    assert "test_accuracy_refined" not in summary["groups"]["supervised"]


@torch.no_grad()
@pytest.mark.parametrize("symmetric", [True, False])
def test_refined_types_are_those_that_no_change_of_one_pair_makes_more_likely(symmetric):
    recipe = resolve(RelationalInference, {"bodies": 3, "samples": 4, "held_out": 4, "times": 8, "hidden": 6,
                                           "horizon": 1, "rollout": 2, "symmetric": symmetric})
    task = UnsupervisedTask(recipe, Motion.simulated(recipe), 0)
    task.model.decoder.log_scale.fill_(-2.0)
    states, edges = task.motion.states["val"], task.motion.graph.edge_index.T.tolist()

    def likelihood(types):
        starts, known = torch.arange(7), F.one_hot(types, 2).float()
        return -task._surprise(task.model.decoder(states[:, :8], task.motion.graph, known, 1, starts)
                               - states[:, 1:8].unsqueeze(2)).sum((1, 2, 3, 4))

    first = torch.ones(4, 6, dtype=torch.long)
    types = task.refined("val", first)
    best = likelihood(types)
    assert (best >= likelihood(first)).all() and (types != first).any()
    for number, (m, n) in enumerate(edges):
        other = types.clone()
        other[:, number] ^= 1
        if symmetric:
            back = edges.index([n, m])
            assert (types[:, number] == types[:, back]).all()
            other[:, back] ^= 1
        assert (likelihood(other) <= best + 2e-3).all()


@pytest.mark.parametrize("system", drawn(["kuramoto", "charged"], 2))
def test_other_systems_train(system, tmp_path):
    run = trained(tmp_path / "run", ["train", "nri", *TINY, f"system={system}"])
    published = {"charged": 82.1 - 55.8, "kuramoto": 96.0 - 62.8}[system]
    assert summary_of(run)["headline"]["published_effect"] == pytest.approx(published)
    assert (system == "charged") is (run / "pictures").exists()


def test_the_papers_networks_train_on_oscillators(tmp_path):
    words = others(TINY, "times=14", "system=kuramoto", "model=paper", "encoder=cnn", "decoder=rnn")
    run = trained(tmp_path / "run", ["train", "nri", *words])
    assert list(summary_of(run)["groups"]) == ["unsupervised", "supervised", "correlation"]


@pytest.mark.parametrize(("wrong", "said"), [
    (["encoder=cnn"], "options of model=paper"), (["decoder=rnn"], "options of model=paper"),
    (["model=paper", "encoder=cnn"], "times must be at least 14"), (["system=strings"], "system"),
    (["horizon=12"], "horizon"), (["rollout=12"], "rollout"), (["bodies=1"], "bodies")])
def test_bad_options_are_refused(wrong, said, refused):
    refused(["train", "nri", *others(TINY, *wrong)], said)


@final_evaluation()
def test_parts_are_different_simulations_within_one():
    recipe = RelationalInference(**SMALL)
    motion = Motion.simulated(recipe)
    assert Motion.simulated(recipe.as_paper()).states["train"].abs().amax() == 1
    assert [dataclasses.replace(recipe, times=times).as_paper().horizon for times in (5, 9, 12)] == [4, 8, 10]
    assert motion.states["train"][..., :2].square().mean() == pytest.approx(1, rel=0.1)
    assert motion.states["test"].shape == (10, 24, 5, 4)
    assert not torch.equal(motion.states["val"], motion.states["test"][:, :12])
    assert motion.accuracy(motion.types["val"], "val") == 100


def test_a_mirrored_simulation_is_one():
    """Its bodies have the distances and speeds that they had, and states move on by their velocities."""
    motion = Motion.simulated(RelationalInference(**SMALL))
    states = motion.states["train"]
    mirrored = motion.mirrored(states)
    assert not torch.equal(mirrored, states)
    for part in (slice(0, 2), slice(2, 4)):
        torch.testing.assert_close(mirrored[..., part].norm(dim=-1), states[..., part].norm(dim=-1))
    along = [(x[:, 1:, :, :2] - x[:, :-1, :, :2]).mul(x[:, 1:, :, 2:]).sum(-1) for x in (states, mirrored)]
    torch.testing.assert_close(along[1], along[0])


def test_types_without_a_name_are_called_as_fits_validation_best():
    recipe = RelationalInference(**SMALL, system="charged")
    task = UnsupervisedTask(recipe, Motion.simulated(recipe), 0)
    task.model.eval()
    actual = task.motion.logits(task.model.encoder, "val").argmax(-1)
    assert task.motion.accuracy(task._names()[actual], "val") >= 50
