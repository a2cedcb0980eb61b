"""The verbs as a user meets them: help, errors, exit codes, runs, interruption and resumption."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from structconv.cli import main
from structconv_systems.commands import reproduce
from structconv_systems.recipes.options.tsp import TSP
from structconv_systems.recipes.register import entry_named
from structconv_systems.train.run import Metrics, locked

SMALL = ["compare", "digits", "bases=identity,shifts", "--seeds", "1", "--channels", "8"]
QUICK = [*SMALL, "--epochs", "2"]


def started(*words: str, **options) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", "structconv.cli", *words], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **options)


def terminated(runs: list[Path], *words: str) -> str:
    """Stop a command by SIGTERM once its runs have metrics. Check that it ends as interrupted; return its stderr."""
    process = started(*words)
    while not all((run / "metrics.jsonl").exists() for run in runs):
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, err
    assert json.loads(out.splitlines()[-1])["interrupted"] is True
    assert "Traceback" not in err
    return err


@pytest.mark.parametrize("words", [["train", "--help"], ["train", "cora-gat", "--help"]])
def test_help_imports_no_heavy_library(words):
    code = ("import sys\nfrom structconv.cli import main\ncode = main(sys.argv[1:])\n"
            "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'rich', 'sklearn'} & set(sys.modules)\n"
            "print('HEAVY', sorted(heavy), code)")
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
    assert "usage: structconv" in done.stdout
    assert done.stdout.endswith("HEAVY [] 0\n")


@pytest.mark.parametrize(("words", "message"), [
    (["train", "cora-gnc"], "invalid choice: 'cora-gnc'"),
    (["train", "cora-gcn", "--data", "x", "--hiden", "3"], "'hiden'. Did you mean 'hidden'?"),
    (["train", "cora-gcn", "--data", "x", "hiden=3"], "'hiden'. Did you mean 'hidden'?"),
    (["train", "cora-gcn", "--data", "x", "--hidden", "many"], "hidden must be an integer; got 'many'"),
    (["train", "cora-gcn", "--data", "x", "stray"], "must read key=value or --key value; got 'stray'"),
    (["train", "cora-gcn", "--data", "nowhere"], "nowhere'. Give it with --data DIR"),
    (["compare", "digits", "--bases", "shifts,shfits"], "bases must be some of identity, shifts"),
    (["resume", "nowhere"], "no such folder"),
])
def test_bad_usage_is_one_line_code_two_and_no_run_folder(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


def test_list_is_readable_by_programs(capsys):
    assert main(["list", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"recipe", "basis"} == {line["kind"] for line in lines}
    assert "structconv train cora-gat" in {line["command"] for line in lines}


def test_compare_writes_everything_and_evaluate_agrees(tmp_path, capsys):
    run = tmp_path / "run"
    assert main([*QUICK, "--out", str(run), "--json"]) == 0
    captured = capsys.readouterr()
    summary = json.loads(captured.out.splitlines()[-1])
    assert list(summary["bases"]) == ["identity", "shifts"]
    assert summary["bases"]["identity"]["receptive_field"] == 1
    assert summary["bases"]["shifts"]["receptive_field"] == 25
    assert summary["bases"]["shifts"]["test_accuracy_mean"] > 20
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert {line["job"] for line in steps} == {"identity/seed-0", "shifts/seed-0"}
    for name in ("config.json", "environment.json", "summary.json", "pictures/basis-shifts.png",
                 "checkpoints/shifts/seed-0/final/weights.safetensors"):
        assert (run / name).is_file(), name
    html = (run / "report.html").read_text()
    assert "grid shifts 3x3" in html
    assert not re.search(r"https?://|<script", html)
    assert not list(run.rglob("*.pkl"))
    assert main(["evaluate", str(run), "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    for basis, entry in summary["bases"].items():
        assert again["bases"][basis]["test_accuracies"] == entry["test_accuracies"]


@pytest.mark.parametrize(("name", "place", "said"), [
    ("mine", ".", "must be a new or an empty folder"), ("config.json", ".", "got a run. Continue it"),
    ("config.json", "config.json", "got a file. Name another")])
def test_a_place_that_is_taken_is_named_for_what_it_is(tmp_path, name, place, said, capsys):
    (tmp_path / name).write_text("{}")
    assert main([*QUICK, "--out", str(tmp_path / place)]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """A finished run."""
    run = tmp_path_factory.mktemp("quick") / "run"
    assert main([*QUICK, "--out", str(run)]) == 0
    return run


def test_a_run_that_is_held_is_not_resumed(quick, capsys):
    with locked(quick):
        assert main(["resume", str(quick)]) == 2
    assert f"{quick} must be free; got held by process" in capsys.readouterr().err
    assert main(["resume", str(quick)]) == 0


def test_a_finished_run_trains_on(quick, tmp_path, capsys):
    run, straight = tmp_path / "run", tmp_path / "straight"
    shutil.copytree(quick, run)
    for words, told in ((["--steps", "1"], "--steps must be at least the run's epochs=2; got 1"),
                        (["--steps", "many"], "epochs")):
        assert main(["resume", str(run), *words]) == 2
        assert told in capsys.readouterr().err
    assert main(["resume", str(run), "--steps", "4"]) == 0
    assert main([*SMALL, "--epochs", "4", "--out", str(straight)]) == 0
    assert (run / "config.json").read_bytes() == (straight / "config.json").read_bytes()
    own, expected = (sorted((line["job"], line["step"]) for line in Metrics(folder / "metrics.jsonl"))
                   for folder in (run, straight))
    assert own == expected


def test_interruption_saves_exits_75_and_resume_gives_the_same_weights(tmp_path):
    cut, straight = tmp_path / "cut", tmp_path / "straight"
    err = terminated([cut], *SMALL, "--epochs", "4", "--out", str(cut), "--json")
    assert f"structconv resume {cut}" in err.splitlines()[-1]
    assert main(["resume", str(cut), "--json"]) == 0
    assert main([*SMALL, "--epochs", "4", "--out", str(straight), "--json"]) == 0
    for job in ("identity", "shifts"):
        name = f"checkpoints/{job}/seed-0/final/weights.safetensors"
        assert (cut / name).read_bytes() == (straight / name).read_bytes()
    assert (cut / "metrics.jsonl").read_text() == (straight / "metrics.jsonl").read_text()


@pytest.mark.parametrize("recipe", ["cora-gcn", "cora-cheb", "cora-gat"])
def test_cora_recipes_learn_and_print_one_object(tmp_path, capsys, real, recipe):
    words = ["train", recipe, "--data", str(real("planetoid")), "--seeds", "1", "--epochs", "30"]
    assert main([*words, "--out", str(tmp_path / "run"), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["recipe"], summary["headline"]["published"][:2]) == (recipe, "83" if recipe == "cora-gat" else "81")
    baseline = "gcn" if recipe == "cora-gat" else "mlp"
    means = {name: group["test_accuracy"]["mean"] for name, group in summary["groups"].items()}
    assert list(means) == [recipe, *(["gcn", "uniform"] if recipe == "cora-gat" else []), "mlp"]
    assert min(mean for name, mean in means.items() if name != "mlp") > 55
    assert summary["headline"]["value"] == pytest.approx(means[recipe] - means[baseline])
    assert main(["evaluate", str(tmp_path / "run"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"] == summary["groups"]


def test_a_training_in_whole_passes_that_is_not_finite_diverged(tmp_path, capsys, real):
    """Its task has an optimizer of its own."""
    words = ["train", "cora-gcn", "--data", str(real("planetoid")), "--seeds", "1", "learning_rate=1e30"]
    assert main([*words, "--out", str(tmp_path / "run"), "--json"]) == 4
    assert "was not finite in 10 steps in a row" in json.loads(capsys.readouterr().out.splitlines()[-1])["error"]


def test_recipes_side_by_side_have_the_outcomes_of_those_in_turn(tmp_path, capsys, real):
    words = ["reproduce", "cora-gat", "cora-gcn", "--preset", "quick", "epochs=2", "seeds=1", "--data",
             str(real("planetoid").parent)]
    results = []
    for jobs in (["--jobs", "1"], ["--jobs", "2"], ["threads=1"]):
        out = tmp_path / jobs[-1]
        assert main([*words, *jobs, "--out", str(out), "--json"]) in (0, 1)  # 1 where two epochs are too few
        printed, said = capsys.readouterr()
        answer = json.loads(printed)
        results.append([(row["recipe"], row["groups"], row["command"]) for row in answer["outcomes"]])
        assert len(json.loads((out / "results.json").read_text())) == 2
        assert ("cora-gat: run folder" in said) == (jobs[-1] != "1")
    assert results[0] == results[1]
    assert [row[:2] for row in results[2]] == [row[:2] for row in results[1]]
    assert [name for name, _, _ in results[1]] == ["cora-gat", "cora-gcn"]
    gat, gcn = (groups for _, groups, _ in results[0])
    assert gat["gcn"] == gcn["cora-gcn"]  # with its own options


def test_a_recipe_that_fails_beside_others_is_named_and_gives_the_exit_code(tmp_path, capsys, real):
    words = ["reproduce", "cora-gat", "cora-gcn", "--preset", "quick", "epochs=3", "--data",
             str(real("planetoid").parent), "--out", str(tmp_path), "--jobs", "2", "--json"]
    (tmp_path / "cora-gcn-quick-epochs=3").mkdir()
    (tmp_path / "cora-gcn-quick-epochs=3" / "config.json").write_text("{")
    assert main(words) == 2
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert answer["exit_code"] == 2 and answer["error"].startswith("cora-gcn: ")
    assert main([*words, "--jobs", "0"]) == 2


def test_all_recipes_are_those_with_further_data_sets_too(tmp_path, capsys, monkeypatch, real):
    monkeypatch.setattr(reproduce, "RECIPES", {"walks": entry_named("walks")})
    words = ["reproduce", "--all", "--resume", "--data", str(real("kg").parent), "--out", str(tmp_path), "--budget",
             "0", "--jobs", "1", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == [
        "walks", "walks triples=nations.tar.gz", "walks triples=umls.tar.gz"]
    assert main([*words, "steps=2"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["walks"]


def test_a_signal_saves_and_stops_all_recipes_side_by_side(tmp_path):
    runs = [tmp_path / f"{name}-default" for name in ("pooling", "tsp")]
    err = terminated(runs, "reproduce", "pooling", "tsp", "architectures", "--jobs", "2", "--out", str(tmp_path),
                     "--json")
    assert not (tmp_path / "architectures-default").exists()
    for run in runs:
        assert f"structconv resume {run}" in err
        assert list((run / "checkpoints").rglob("*.safetensors"))


TOURS = ["nodes=5", "instances=4", "samples=2", "steps=4", "batch_size=8", "copies=4", "channels=8", "heads=2",
         "layers=1", "hidden=8", "validate_every=2", "checkpoint_every=2", "warmup=2", "seeds=2"]


@pytest.fixture(scope="module")
def tours(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs") / "tours"
    assert main(["train", "tsp", *TOURS, "--out", str(place)]) == 0
    return place


def test_a_command_that_was_killed_while_it_made_the_folder_works_again(tmp_path):
    place = tmp_path / "run"
    place.mkdir()
    (place / "environment.json").write_text("{}")
    (place / ".files.json.partial").write_text("{")
    assert main(["train", "tsp", *TOURS, "--out", str(place)]) == 0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("mine")
    assert main(["train", "tsp", *TOURS, "--out", str(tmp_path / "other")]) == 2


def test_more_steps_that_are_refused_leave_the_run_as_it_was(tours, tmp_path, capsys):
    run = shutil.copytree(tours, tmp_path / "run")
    files, before = run / "files.json", (run / "config.json").read_text()
    files.write_text('{"/nowhere/a.tsp": "0"}')
    assert main(["resume", str(run), "--steps", "9"]) == 3
    assert (run / "config.json").read_text() == before
    files.write_text("{}")
    assert main(["resume", str(run), "--steps", "6"]) == 0
    assert json.loads((run / "config.json").read_text())["steps"] == 6


def test_a_run_whose_trainings_have_different_steps_is_not_evaluated(tours, tmp_path, capsys):
    """As after a kill while the first of two trainings was done with the further steps."""
    run = shutil.copytree(tours, tmp_path / "run")
    assert main(["resume", str(run), "--steps", "6"]) == 0
    shutil.rmtree(run / "checkpoints" / "attention" / "seed-1")
    shutil.copytree(tours / "checkpoints" / "attention" / "seed-1", run / "checkpoints" / "attention" / "seed-1")
    assert main(["evaluate", str(run)]) == 2
    assert "attention/seed-1" in (said := capsys.readouterr().err) and "must be trained to step 6; got step 4" in said
    assert main(["resume", str(run)]) == 0
    assert main(["evaluate", str(run)]) == 0


def test_metrics_that_are_gone_are_said_and_decide_nothing(tours, tmp_path, capsys):
    run = shutil.copytree(tours, tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[2:]))
    assert main(["resume", str(run), "--steps", "6"]) == 0
    assert "attention/seed-0: 2 of 4 steps are not in" in capsys.readouterr().err


def test_a_quick_preset_whose_metrics_are_gone_has_no_outcome(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(TSP, "presets", {"quick": dict(word.split("=") for word in TOURS)})
    words = ["reproduce", "tsp", "--preset", "quick", "--out", str(tmp_path), "--json"]
    code = main(words)
    assert main(words) == code != 3
    [metrics] = tmp_path.rglob("metrics.jsonl")
    metrics.write_text("".join(metrics.read_text().splitlines(keepends=True)[1:]))
    before = (tmp_path / "results.json").read_bytes()
    assert main(words) == 3
    assert "expected a line for each of the 4 steps of attention/seed-0; got 3" in capsys.readouterr().err
    assert (tmp_path / "results.json").read_bytes() == before


@pytest.mark.parametrize("text", ["{}", "[]", '{"command": []}', "{"])
def test_a_torn_environment_is_named_before_a_step(tours, tmp_path, text, capsys):
    run = shutil.copytree(tours, tmp_path / "run")
    (run / "environment.json").write_text(text)
    assert main(["resume", str(run), "--steps", "6"]) == 3
    assert "environment.json" in capsys.readouterr().err
    assert json.loads((run / "config.json").read_text())["steps"] == 4


@pytest.mark.parametrize(("name", "content", "code"), [
    ("plain", None, 2), ("page.md", None, 2), ("rows.json", '[{"recipe": "tsp"}]', 3), ("rows.json", "[5]", 3),
    ("folder.json", "", 2)])
def test_a_record_that_cannot_be_written_is_named_before_a_training(tmp_path, name, content, code, capsys):
    file = tmp_path / name
    if content:
        file.write_text(content)
    elif content == "":
        file.mkdir()
    words = ["reproduce", "tsp", *TOURS, "--out", str(tmp_path / "runs")]
    assert main([*words, "--record", str(file)]) == code
    assert name in capsys.readouterr().err
    assert not (tmp_path / "runs" / "tsp-default").exists() and not list(tmp_path.rglob("checkpoints"))


def test_a_record_is_written_into_a_new_folder(tmp_path):
    file = tmp_path / "new" / "folder" / "rows.json"
    assert main(["reproduce", "tsp", *TOURS, "--out", str(tmp_path / "runs"), "--record", str(file)]) in (0, 1)
    assert (file.parent / "rows" / "tsp.md").is_file()


def test_words_that_would_do_nothing_are_refused(tours, tmp_path, capsys):
    for words, message in ((["evaluate", str(tours), "--test", ""], "--test must name test data"),
                           (["train", "tsp", *TOURS, "rates=farthest-insertion=0.1", "--out", str(tmp_path / "a")],
                            "rates must be of groups that learn; got 'farthest-insertion'"),
                           (["reproduce", "tsp", "nri", "rates=attention=1"], "rates must be of the groups of one")):
        assert main(words) == 2
        assert message in capsys.readouterr().err


def test_a_full_disk_is_named(tmp_path, capsys, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert main(["train", "tsp", *TOURS, "--out", str(tmp_path / "run")]) == 1
    said = capsys.readouterr().err
    assert "No space left on device" in said and f"{tmp_path / 'run'}" in said and ".partial'" in said
