"""The recipe `convlstm` as its user meets it: trained, resumed, evaluated on other images, and refused bad files."""

import gzip
import struct

import numpy as np
import pytest
import torch

from structconv.cli import main
from structconv_systems.recipes.convlstm import network, videos_of
from structconv_systems.recipes.options.images import MovingDigits
from structconv_systems.train.parts import final_evaluation
from systems.tests.recipes.runs import check_laws, evaluated, others, summary_of, trained

TINY = ["steps=4", "validate_every=2", "checkpoint_every=2", "size=8", "side=4", "history=3", "horizon=2", "samples=8",
        "held_out=4", "patch=2", "hidden=3", "layers=1", "batch_size=4", "warmup=0"]


def images(path, count, *, seed=0, sides=(6, 6), kind=8):
    numbers = np.random.default_rng(seed).integers(0, 256, (count, *sides), dtype=np.uint8)
    head = struct.pack(f">HBB{numbers.ndim}I", 0, kind, numbers.ndim, *numbers.shape)
    path.write_bytes(gzip.compress(head + numbers.tobytes()))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("mnist")
    images(root / "train-images-idx3-ubyte.gz", 20)
    images(root / "t10k-images-idx3-ubyte.gz", 5, seed=1)
    return root


def words_of(folder, *more):
    return ["train", "convlstm", "--data", str(folder), *others(TINY, *more)]


@pytest.fixture(scope="module")
def run(folder, tmp_path_factory):
    return trained(tmp_path_factory.mktemp("runs") / "run", words_of(folder))


def test_a_run_keeps_the_laws_says_its_figure_and_draws_videos(run, tmp_path, capsys):
    summary = check_laws(run, tmp_path, capsys)
    assert list(summary["groups"]) == ["convlstm", "lstm", "lstm-wide", "mean-frame"]
    sizes = summary["parameters"]
    assert abs(sizes["lstm"] - sizes["convlstm"]) < 0.2 * sizes["convlstm"] < sizes["lstm-wide"] - sizes["lstm"]
    for name, begin in (("frames.png", b"\x89PNG"), ("frames.svg", b"<?xml"), ("videos.gif", b"GIF8")):
        assert (run / "pictures" / name).read_bytes().startswith(begin)


def test_the_state_of_the_wide_lstm_has_so_many_numbers_or_as_many_as_that_of_the_convlstm():
    def numbers(name, **options):
        recipe = MovingDigits(size=8, side=4, patch=2, hidden=3, layers=1, **options)
        model = network(recipe, name)
        h, c = model.encoder[0](model.patches(torch.zeros(1, 1, 8, 8))[:, 0], None, model.grid)
        assert h.shape == c.shape
        return h.numel()

    assert [numbers("lstm-wide", wide=wide) for wide in (1, 7, 0)] == [1, 7, numbers("convlstm", wide=0)]
    assert numbers("convlstm", wide=7) == 16 * 3


def test_a_run_is_measured_on_other_images(run, tmp_path, capsys):
    other = images(tmp_path / "other.gz", 7, seed=2, sides=(9, 9))
    actual = evaluated(run, capsys, "--test", str(other))
    assert actual["groups"] != summary_of(run)["groups"]
    assert actual["test"]["name"] == str(other) and list(actual["test"]["files"]) == [str(other)]
    assert main(["evaluate", str(run), "--test", "absent"]) == 3
    assert "absent" in capsys.readouterr().err


@pytest.mark.parametrize(("made", "said"), [
    (lambda path: path.write_text("a dog"), "expected an idx file, which begins with 0, 0"),
    (lambda path: images(path, 5), "expected ten images at least, of which the last tenth validates; got 5"),
    (lambda path: images(path, 20, sides=(6,)), "expected images: bytes with the axes number, row, column; got uint8"),
    (lambda path: images(path, 20, kind=9), "expected images: bytes with the axes number, row, column; got int8")])
def test_bad_files_are_named(folder, tmp_path, made, said, refused):
    made(tmp_path / "bad")
    refused(words_of(folder, f"images={tmp_path / 'bad'}"), f"{tmp_path / 'bad'}: {said}", 3)


@pytest.mark.parametrize(("option", "said"), [("patch=3", "patch must divide size=8"), ("side=8", "side must be")])
def test_options_that_do_not_fit(folder, option, said, refused):
    refused(words_of(folder, option), said)


@final_evaluation()
def test_no_image_is_in_two_parts(folder):
    parts = videos_of(MovingDigits(data=str(folder), size=8, side=4, samples=8, held_out=4, patch=2))
    assert [len(videos) for videos in parts.values()] == [8, 4, 4]
    assert [len(videos.images) for videos in parts.values()] == [18, 2, 5]
    assert parts["train"].at(torch.tensor([1])).shape == (1, 20, 8, 8)
