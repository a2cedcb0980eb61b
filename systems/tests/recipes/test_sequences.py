"""Recipes of sequences as their user meets them: train, resume, evaluate, reproduce, translate, sample, bad files."""

import gzip
import io
import json
import math
import random
import shutil
from pathlib import Path

import pytest

from structconv.cli import main
from structconv_systems.data.text import sha256_of
from structconv_systems.recipes.register import entry_named
from structconv_systems.train.config import resolve
from structconv_systems.train.effect import NO_BASELINE
from structconv_systems.train.parts import final_evaluation
from systems.tests.recipes.runs import Runs, check_laws, evaluated, others, summary_of, trained
from tests.support.drawn import drawn, slow

WORDS = {"a": "ein", "dog": "Hund", "man": "Mann", "sees": "sieht", "runs": "rennt", "red": "roter", "old": "alter"}
TINY = ["steps=6", "validate_every=3", "checkpoint_every=2", "threads=1", "warmup=2"]
TEXT = [*TINY, "seeds=1", "vocabulary=300", "channels=16", "batch_tokens=64", "beam=2", "longest=12"]
SMALL = ["layers=1", "heads=2", "hidden=16"]
TRANSLATORS = {
    "transformer": [*TEXT, *SMALL], "rnnsearch": TEXT,
    "luong": [*TEXT, "layers=1", "rows=none,global-location,local-p-general"],
    "fixed-heads": [*TEXT, "layers=1", "hidden=16", "shifts=-1,0,1"],
    "pervasive": [*TEXT, "pairs=8", "layers=2", "growth=4", "hidden=8", "kernel=3", "pooling=both"]}
TRAINED = {
    **TRANSLATORS, "relative-positions": [*TEXT, *SMALL, "rows=clip-0,clip-2"],
    "parser": [*TINY, "seeds=1", "train=a.conllu", "valid=a.conllu", "test=a.conllu", "batch_words=40", "embed=8",
               "hidden=8", "layers=1", "arc=8", "label=8"],
    "series": [*TINY, "seeds=2", "file=series.csv", "missing=nan", "history=24", "patch=4", "gap=4", "hidden=8",
               "heads=2", "batch_size=8"],
    "characters": [*TINY, "seeds=1", "text=text.txt", "length=16", "batch_size=4", "channels=16", "layers=1",
                   "heads=2", "sample=20"]}


def sentences(count, seed):
    draw = random.Random(seed)
    return [" ".join(draw.choices(list(WORDS), k=draw.randint(2, 6))) for _ in range(count)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Parallel text word by word in three parts, one side gzipped, a text, series and a treebank."""
    root = tmp_path_factory.mktemp("data")
    for seed, (part, count) in enumerate((("train", 60), ("val", 12), ("test_2016_flickr", 12))):
        lines = sentences(count, seed)
        (root / f"{part}.en").write_text("\n".join(lines) + "\n")
        target = "\n".join(" ".join(WORDS[word] for word in line.split()) for line in lines) + "\n"
        (root / f"{part}.de.gz").write_bytes(gzip.compress(target.encode()))
    (root / "text.txt").write_text("\n".join(sentences(200, 9)))
    (root / "series.csv").write_text("a,b,c\n" + "\n".join(map(reading, range(150))))
    (root / "a.conllu").write_text("\n".join(map(tree, sentences(20, 7))))
    return root


def tree(sentence):
    """A sentence in CoNLL-U, each word below the one before it."""
    return "".join(f"{place + 1}\t{word}\t_\tX\t_\t_\t{place}\t{'dep' if place else 'root'}\t_\t_\n"
                   for place, word in enumerate(sentence.split()))


def reading(time):
    """A line of three sensors with the period 12, some of them missing."""
    values = [f"{30 + 10 * math.sin(math.pi * (time + lag) / 6) + time % 5:.2f}" for lag in range(3)]
    return ",".join("" if (7 * time + lag) % 11 == 0 else value for lag, value in enumerate(values))


def words_of(name, folder, *more):
    return ["train", name, "--data", str(folder), *others(TRAINED[name], *more)]


@pytest.fixture(scope="module")
def runs(folder, tmp_path_factory):
    return Runs(tmp_path_factory.mktemp("runs"), lambda name: words_of(name, folder))


@pytest.mark.parametrize("name", drawn(TRAINED, 2))
def test_a_run_keeps_the_laws_and_has_pictures(runs, name, tmp_path, capsys):
    check_laws(runs[name], tmp_path, capsys)
    pictures = list((runs[name] / "pictures").iterdir())
    assert pictures
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)


@pytest.mark.parametrize(("name", "other"), [("transformer", "val"), ("parser", "b.conllu"), ("characters", "b.txt"),
                                           ("series", "b.csv")])
def test_a_run_is_measured_on_other_files(runs, folder, tmp_path, name, other, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b.conllu").write_text("\n".join(map(tree, sentences(9, 1))))
    (tmp_path / "b.txt").write_text("\n".join(sentences(40, 2)))
    (tmp_path / "b.csv").write_text("z\n" + "\n".join(str(30 + time % 7) for time in range(60)))
    summary = summary_of(runs[name])
    actual = evaluated(runs[name], capsys, "--test", other)
    assert actual["groups"].keys() == summary["groups"].keys()
    assert actual["groups"] != summary["groups"]
    assert actual["test"]["name"] == other
    hashes = actual["test"]["files"]
    assert hashes.keys() == {str(path) for path in map(Path, hashes) if path.is_file() and path.name.startswith(other)}
    page = (runs[name] / "report.html").read_text()
    assert hashes and all(f"{Path(file).name}: {sha256_of(file)}" in page for file in hashes)
    assert summary_of(runs[name]) == summary
    assert main(["evaluate", str(runs[name]), "--test", "absent"]) == 3
    assert "absent" in capsys.readouterr().err


def test_a_test_sentence_longer_than_those_of_training_is_measured(runs, tmp_path, capsys, monkeypatch):
    """By location, whose table ends with the longest training sentence, too."""
    monkeypatch.chdir(tmp_path)
    for language, word in (("en", "dog"), ("de", "hund")):
        (tmp_path / f"long.{language}").write_text(f"a {word}\n" + " ".join([word] * 130) + "\n")
    groups = evaluated(runs["luong"], capsys, "--test", "long")["groups"]
    assert "global-location" in groups
    assert all(math.isfinite(row["test_perplexity"]["mean"]) for row in groups.values())


@pytest.mark.parametrize("name", drawn(TRAINED, 3))
def test_trying_writes_nothing(folder, name, tried):
    actual = tried(words_of(name, folder))
    rows = [row for row in actual["groups"].values() if row["steps"] > 1]
    assert rows and all(row["parameters"] > 0 and row["flops_per_step"] > 0 for row in rows)
    assert actual["recipe"]["steps"] == 6


@pytest.mark.parametrize("name", drawn(TRANSLATORS, 2))
def test_a_run_translates_lines_of_a_file_and_of_standard_input(runs, folder, name, tmp_path, capsys, monkeypatch):
    assert main(["translate", str(runs[name]), str(folder / "val.en"), "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["source"] for line in lines] == (folder / "val.en").read_text().splitlines()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + lines[0]["source"].encode())))
    assert main(["translate", str(runs[name])]) == 0
    assert capsys.readouterr().out == lines[0]["translation"] + "\n"


def test_options_may_stand_before_the_file_and_bad_lines_are_named(runs, folder, capsys, monkeypatch):
    assert main(["translate", str(runs["transformer"]), "--json", str(folder / "val.en")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 12
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a dog\n\xff\n")))
    assert main(["translate", str(runs["transformer"]), "--json"]) == 3
    out, err = capsys.readouterr()
    assert json.loads(out.splitlines()[-1])["exit_code"] == 3
    assert "line 2" in err


def test_an_evaluation_leaves_the_alphabet_of_the_run(runs, folder, tmp_path, capsys):
    run, other = runs["characters"], tmp_path / "other.txt"
    kept = (run / "alphabet.json").read_bytes()
    other.write_text((folder / "text.txt").read_text().replace("dog", "døg"))
    assert main(["evaluate", str(run), "--test", str(other)]) == 3
    assert "'ø'" in capsys.readouterr().err
    assert (run / "alphabet.json").read_bytes() == kept
    assert main(["sample", str(run), "--length", "5"]) == 0


def test_other_options_than_those_of_the_weights_are_refused(runs, tmp_path, capsys):
    shutil.copytree(runs["characters"], tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    config.write_text(config.read_text().replace('"channels": 16', '"channels": 8'))
    for words in (["evaluate"], ["sample"]):
        assert main([*words, str(tmp_path / "run")]) == 2
        assert "trained with" in capsys.readouterr().err


def test_a_text_of_one_line_is_learned_and_a_short_one_refused(folder, tmp_path, refused):
    (tmp_path / "text.txt").write_text((folder / "text.txt").read_text().replace("\n", " "))
    trained(tmp_path / "whole", words_of("characters", tmp_path))
    (tmp_path / "text.txt").write_text("a dog sees " * 10)
    refused(words_of("characters", tmp_path), "length=16", 3)


def test_a_folder_of_the_user_is_left_empty_where_a_run_cannot_begin(folder, tmp_path):
    (tmp_path / "text.txt").write_bytes(b"\xff\xfe")
    own, link = tmp_path / "own", tmp_path / "link"
    own.mkdir()
    link.symlink_to(own)
    for place in (own, link):
        assert main(words_of("characters", tmp_path, "--out", str(place))) == 3
        assert own.is_dir()
        assert not list(own.iterdir())


@pytest.mark.parametrize("name", drawn(TRANSLATORS, 2))
def test_a_translation_is_drawn(runs, folder, name, tmp_path):
    png = tmp_path / "a.png"
    assert main(["translate", str(runs[name]), str(folder / "val.en"), "--beam", "1", "--alignment", str(png)]) == 0
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_told_before_anything_is_decoded(runs, folder, tmp_path, capsys):
    for name in ("absent/a.png", "a.pdf"):
        assert main(["translate", str(runs["transformer"]), str(folder / "val.en"), "--alignment",
                     str(tmp_path / name)]) == 2
        assert capsys.readouterr().out == ""


def test_a_run_alone_is_enough_to_use_it(runs, folder, tmp_path, capsys, written):
    """Without the files that it was trained on, which a training and an evaluation ask for."""
    text = written("lines.en", "\na dog\n \n")
    for name, *words in (("transformer", "translate", str(text)), ("characters", "sample", "--length", "5")):
        run = tmp_path / name
        shutil.copytree(runs[name], run)
        config = run / "config.json"
        config.write_text(config.read_text().replace(str(folder), str(tmp_path / "absent")))
        assert main([words[0], str(run), *words[1:]]) == 0
        out = capsys.readouterr().out
        assert name == "characters" or [bool(line) for line in out.split("\n")] == [False, True, False, False]
        assert main(["evaluate", str(run)]) == 2
        assert "data must be a folder" in capsys.readouterr().err


def test_a_run_writes_behind_a_prompt(runs, capsys):
    run = str(runs["characters"])
    for _ in range(2):
        assert main(["sample", run, "--prompt", "a dog", "--length", "12", "--top-k", "5", "--seed", "3"]) == 0
    first, second = capsys.readouterr().out.split("a dog")[1:]
    assert first == second
    assert len(first.removesuffix("\n")) == 12
    assert main(["sample", run, "--prompt", "Ω"]) == 2
    assert "'Ω'" in capsys.readouterr().err
    assert main(["sample", run, "--temperature", "0"]) == 2


def test_a_cycle_in_a_treebank_is_a_bad_file(tmp_path, refused):
    (tmp_path / "a.conllu").write_text(tree("a dog runs").replace("\t0\troot", "\t3\tdep"))
    refused(words_of("parser", tmp_path), "a.conllu, line ", 3)


def test_a_series_of_text_is_a_bad_file(folder, tmp_path, refused):
    (tmp_path / "series.csv").write_text((folder / "series.csv").read_text().replace("\n30.00,", "\nfast,", 1))
    refused(words_of("series", tmp_path), "series.csv, line 32: expected a finite number in column 1", 3)


def test_a_series_too_short_is_a_bad_file(folder, tmp_path, refused):
    (tmp_path / "series.csv").write_text("".join((folder / "series.csv").read_text().splitlines(True)[:30]))
    refused(words_of("series", tmp_path), "history=24", 3)


@pytest.mark.parametrize(("option", "said"), [
    ("patch=5", "patch must divide history=24"), ("heads=3", "heads must divide hidden=8"),
    ("valid=0.4", "leave something for the test"), ("missing=some", "missing must be one of nan, zero")])
def test_options_of_series_that_do_not_fit(folder, option, said, refused):
    refused(words_of("series", folder, option), said)


def test_forecasts_have_a_row_for_each_model_and_are_drawn(runs):
    summary = summary_of(runs["series"])
    assert list(summary["groups"]) == ["without-attention", "attention", "period-aware", "linear", "last-value", "mean",
                                       "zero"]
    assert summary["below_last_value"].keys() == {"without-attention", "attention", "period-aware"}
    mean = {name: row["test_mae"]["mean"] for name, row in summary["groups"].items()}
    seeds = range(summary["headline"]["seeds"])
    ratios = [summary["results"][f"attention/seed-{seed}"]["test_mae"]
              / summary["results"][f"period-aware/seed-{seed}"]["test_mae"] for seed in seeds]
    assert summary["headline"]["value"] == pytest.approx(math.prod(ratios) ** (1 / len(ratios)))
    assert mean["zero"] > max(mean["mean"], mean["linear"])
    for name in ("attention", "period-aware"):
        assert (runs["series"] / "pictures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_verbs_refuse_runs_that_they_are_not_for(runs, capsys):
    assert main(["sample", str(runs["transformer"])]) == 2
    assert main(["translate", str(runs["characters"])]) == 2
    assert "can translate" in capsys.readouterr().err


@pytest.mark.parametrize("name, file", [("transformer", "train.de.gz"), ("parser", "a.conllu"),
                                        ("series", "series.csv"), ("characters", "text.txt")])
def test_a_run_is_not_continued_on_other_data(runs, folder, name, file, capsys):
    run, before = runs[name], (folder / file).read_bytes()
    try:
        (folder / file).write_bytes(before + b"x")
        for verb in ("resume", "evaluate"):
            assert main([verb, str(run)]) == 3
            said = capsys.readouterr().err
            assert f"{folder / file}: expected the file as it was" in said and "Put it back" in said
    finally:
        (folder / file).write_bytes(before)
    assert main(["evaluate", str(run)]) == 0


def test_a_file_in_the_place_of_one_with_another_name_is_other_data(runs, folder, capsys):
    run, packed, plain = runs["transformer"], folder / "train.de.gz", folder / "train.de"
    before = packed.read_bytes()
    try:
        plain.write_bytes(gzip.decompress(before))
        packed.unlink()
        for verb in ("resume", "evaluate"):
            assert main([verb, str(run)]) == 3
            assert "expected the file as it was" in capsys.readouterr().err
    finally:
        packed.write_bytes(before)
        plain.unlink()


@pytest.mark.parametrize("text", ['{"a":', "5", "[1]", "null", "{}", "[" * 100_000])
def test_a_run_whose_files_list_is_torn(runs, folder, tmp_path, text, capsys):
    cut = shutil.copytree(runs["characters"], tmp_path / "cut")
    (cut / "files.json").write_text(text)
    assert main(["resume", str(cut)]) == 3
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"steps": None}, {"ema": {}}, {"threads": [1]}])
def test_a_run_whose_options_are_no_options(runs, tmp_path, change, capsys):
    cut = shutil.copytree(runs["characters"], tmp_path / "cut")
    config = json.loads((cut / "config.json").read_text())
    (cut / "config.json").write_text(json.dumps({**config, **change}))
    assert main(["resume", str(cut)]) == 2
    assert f"{next(iter(change))} must be" in capsys.readouterr().err


@pytest.mark.parametrize("change", [{"channels": 8}, {"ema": 0.5}])
def test_a_checkpoint_of_other_options_is_refused(runs, tmp_path, change, capsys):
    cut = shutil.copytree(runs["characters"], tmp_path / "cut")
    for final in (cut / "checkpoints").rglob("final"):
        shutil.rmtree(final)
    config = json.loads((cut / "config.json").read_text())
    (cut / "config.json").write_text(json.dumps({**config, **change}))
    assert main(["resume", str(cut)]) == 2
    assert "must be those that the checkpoint was trained with" in capsys.readouterr().err


def test_an_option_that_begins_with_a_dash_and_one_that_is_given_twice(capsys):
    assert main(["train", "fixed-heads", "--shifts", "-1,0", "channels=32"]) == 2
    assert "channels must be a multiple of the 3 heads" in capsys.readouterr().err
    assert main(["train", "characters", "--steps", "2", "--steps", "3"]) == 2
    assert "--steps must be given once" in capsys.readouterr().err


def test_a_training_that_is_not_finite_in_its_last_steps_diverged(folder, tmp_path, capsys):
    words = [word for word in words_of("characters", folder) if not word.startswith("warmup")]
    run = str(tmp_path / "run")
    for command in ([*words, "--out", run, "--learning-rate", "1e30", "--clip", "0"], ["resume", run]):
        assert main(command) == 4
        assert "the last steps were not finite" in capsys.readouterr().err


def test_reproducing_records_outcomes_and_continues(folder, tmp_path, capsys, monkeypatch):
    from structconv_systems.recipes.options.sequences import Characters

    monkeypatch.setattr(Characters, "presets", {"quick": {
        "text": "text.txt", "length": 16, "batch_size": 4, "channels": 16, "layers": 1, "heads": 2, "steps": 4,
        "sample": 5, "threads": 1}})
    monkeypatch.setattr(Characters, "effect", None)
    (tmp_path / "text").symlink_to(folder)
    words = ["reproduce", "characters", "--preset", "quick", "--data", str(tmp_path), "--out", str(tmp_path / "out"),
             "--record", str(tmp_path / "kept.json"), "--json"]
    for _ in range(2):
        assert main(words) == 0
    [row] = json.loads((tmp_path / "kept.json").read_text())
    assert (row["recipe"], row["state"], row["reason"]) == ("characters", "not shown", NO_BASELINE)
    assert row["machine"]
    page = (tmp_path / "kept.md").read_text()
    assert "| [characters](kept/characters.md) | nats a character | 1.47 on Tiny Shakespeare |" in page
    own = (tmp_path / "kept" / "characters.md").read_text()
    assert "`structconv reproduce characters --data DIR --preset quick`" in own
    assert main([*words[:2], "steps=2", "heads=1", *words[2:]]) == 0
    rows = json.loads((tmp_path / "kept.json").read_text())
    assert [actual["overrides"] for actual in rows] == [{}, {"heads": 1, "steps": 2}]
    assert rows[0] == row
    assert "| [characters](kept/characters.md) heads=1 steps=2 | nats" in (tmp_path / "kept.md").read_text()
    assert "## quick heads=1 steps=2" in (tmp_path / "kept" / "characters.md").read_text()
    assert main([*words, "--budget", "0"]) == 0
    assert len(json.loads(capsys.readouterr().out.splitlines()[-1])["outcomes"]) == 1
    assert main([*words, "--budget", "0", "--out", str(tmp_path / "new")]) == 0
    actual = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (actual["outcomes"], actual["left_out"]) == ([], ["characters"])
    assert main([*words, "--budget", "nan"]) == 2
    known = {name: entry_named(name) for name in ("molecules", "characters")}
    monkeypatch.setattr("structconv_systems.commands.reproduce.RECIPES", known)
    assert main([*words[:1], "--all", *words[2:]]) == 0
    out, err = capsys.readouterr()
    actual = json.loads(out.splitlines()[-1])
    assert ([row["recipe"] for row in actual["outcomes"]], actual["left_out"]) == (["characters"], ["molecules"])
    assert "molecules is left out" in err and "data must be a folder" in err


def _torn(folder):
    path = folder / "train.de.gz"
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize(("spoil", "said"), [
    (_torn, "train.de.gz"), (lambda folder: (folder / "val.en").write_bytes(b"a dog\n\xff\xfe\n"), "val.en, line 2"),
    (lambda folder: (folder / "train.en").write_text("a dog\n"), "as many lines"),
    (lambda folder: (folder / "test_2016_flickr.en").write_text(""), "an empty file"),
    (lambda folder: (folder / "train.en").unlink(), "train.en")])
def test_bad_files_end_with_3_and_leave_nothing(folder, tmp_path, spoil, said, refused):
    shutil.copytree(folder, tmp_path / "data")
    spoil(tmp_path / "data")
    refused(words_of("transformer", tmp_path / "data"), said, 3)


def test_a_missing_folder_is_a_bad_option(tmp_path, capsys):
    assert main(["train", "characters", "--data", str(tmp_path / "none")]) == 2
    assert "Give it with --data DIR" in capsys.readouterr().err


def test_a_table_has_a_row_for_each_kind_of_training(runs):
    assert list(summary_of(runs["luong"])["groups"]) == ["none", "global-location", "local-p-general"]


@slow
def test_rows_of_other_recipes(runs):
    sizes = summary_of(runs["fixed-heads"])["parameters"]
    assert sizes["fixed-heads"] < sizes["learned-heads"]
    summary = summary_of(runs["pervasive"])
    means = {name: row["test_bleu"]["mean"] for name, row in summary["groups"].items()}
    assert summary["headline"]["value"] == pytest.approx(means["pervasive"] - means["rnnsearch"])
    assert set(summary["parameters"]) == {"pervasive", "rnnsearch"}
    assert list(summary_of(runs["relative-positions"])["groups"])[:2] == ["clip-0", "clip-2"]


def test_unknown_rows_are_refused(folder, refused):
    refused(["train", "relative-positions", "--data", str(folder), "rows=clip-2,shaw"], "got shaw")


def test_bleu_of_the_longest_is_that_of_the_tenth_with_most_words(folder, monkeypatch):
    recipe = resolve(entry_named("rnnsearch").recipe, [f"data={folder}", *TEXT])
    task = entry_named("rnnsearch").runner().jobs(recipe, None)[0].make()
    most = sorted(len(line.split()) for line in (folder / "test_2016_flickr.en").read_text().splitlines())[-2]

    class LongOnly:
        def translate(self, lines):
            words = [line.split() for line in lines]
            return [" ".join(WORDS[word] for word in line) if len(line) >= most else "" for line in words]

    monkeypatch.setattr(type(task), "translator", LongOnly())
    with final_evaluation():
        figures = task.figures("test")
    assert figures["test_bleu_long"] == pytest.approx(100)
    assert figures["test_bleu"] < 90
