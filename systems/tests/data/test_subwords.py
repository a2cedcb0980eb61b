"""Subwords: exact round trips, equal pieces of equal lines, and files that are none."""

import copy
import json
import os
import pickle
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from structconv.errors import ConfigError, DataError
from structconv_systems.data.parallel import read_parallel
from structconv_systems.data.subwords import Subwords

pytest.importorskip("tokenizers", reason="the library tokenizers is not installed: pip install structconv-systems")

LINES = ["Two young, White males are outside near many bushes.", "Zwei junge weiße Männer sind im Freien.",
         "Several men in hard hats are operating a giant pulley system.", "Mehrere Männer mit Schutzhelmen bedienen.",
         "A man and a woman, two men and two women aren't outside; 2016 men are."] * 3


@pytest.fixture(scope="module")
def subwords():
    return Subwords.train(LINES, 350)


@given(line=st.text(st.characters(exclude_categories=["Cs"])) | st.text("a <>/pad\n'ß").filter(bool)
       | st.sampled_from(["", " ", "  two  spaces ", "<pad>", "<unknown> <end>", "\x00", "e\u0301 é", "日本語 😀"]))
def test_every_line_comes_back(subwords, line):
    numbers = subwords.encode(line)
    assert subwords.decode(numbers) == line
    assert all(4 <= number < len(subwords) for number in numbers)


def test_frequent_words_are_one_piece_wherever_they_stand(subwords):
    (two,) = subwords.encode("men")
    assert subwords.encode("Men, men men")[-2:] == [two, two]
    assert subwords.pieces([1, two, 0, 3, 2]) == ["<begin>", " men", "<pad>", "<unknown>", "<end>"]


def test_special_numbers_are_no_text(subwords):
    assert subwords.decode([1, *subwords.encode("two men"), 2, 0, 0, 3]) == "two men"
    assert subwords.decode([]) == subwords.decode([0]) == ""


def test_bytes_that_are_no_text_are_shown(subwords):
    numbers = subwords.encode("x\u65e5")
    assert "\ufffd" in subwords.decode(numbers[:-1])


def test_sizes(subwords):
    assert len(subwords) == 350 and repr(subwords) == "Subwords(350)"
    assert len(Subwords.train(LINES, 260)) == 260
    assert len(Subwords.train(["ab ab"], 10_000)) == 262
    assert len(Subwords.train([], 300)) == 260
    with pytest.raises(ConfigError, match=r"Subwords\.train: size must be at least 260; got 259\."):
        Subwords.train(LINES, 259)


CODE = """
import sys
from structconv_systems.data.subwords import Subwords
print(Subwords.train(sys.stdin.read().splitlines(), 350).merges)
"""


def test_equal_lines_give_equal_pieces(subwords):
    assert Subwords.train(iter(LINES), 350) == subwords
    for threads, seed in (("1", "1"), ("3", "2")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"}
        run = subprocess.run([sys.executable, "-c", CODE], input="\n".join(LINES), capture_output=True, text=True,
                             encoding="utf-8", env=environment, check=True)
        assert run.stdout.strip() == repr(subwords.merges)


def test_it_is_saved_and_loaded(subwords, tmp_path):
    path = tmp_path / "subwords.json"
    subwords.save(path)
    content = path.read_bytes()
    loaded = Subwords.load(path)
    assert loaded == subwords and len(loaded) == len(subwords)
    assert all(loaded.encode(line) == subwords.encode(line) for line in LINES)
    loaded.save(path)
    assert path.read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["subwords.json"]
    Subwords(()).save(path)
    assert Subwords.load(path).decode(Subwords(()).encode("ß")) == "ß"


def test_numbers_are_those_of_training(subwords):
    """The first 256 after the special ones are bytes, then each merge makes the next."""
    last = "".join(subwords.merges[-1])
    assert subwords.encode("!")[-1] == 4
    assert subwords.pieces([len(subwords) - 1]) == [last.replace("Ġ", " ").encode("latin-1").decode()]


def test_copies_and_pickles(subwords):
    for other in (copy.deepcopy(subwords), pickle.loads(pickle.dumps(subwords))):
        assert other == subwords and other.encode(LINES[0]) == subwords.encode(LINES[0])


@pytest.mark.parametrize("value, message", [
    ({"model": {}}, "a list of pairs of pieces; got dict"), ([["a"]], "a list of pairs of pieces; got list"),
    ([["a", 1]], "a list of pairs of pieces; got list"), (["ab"], "a list of pairs of pieces; got list"),
    (None, "a list of pairs of pieces; got NoneType"),
    ([["a", "b"], ["ab", "bc"]], r"merges of two pieces made before; got merge 2, \['ab', 'bc'\]"),
    ([["a", " "]], r"merges of two pieces made before; got merge 1, \['a', ' '\]"),
    ([["", "a"]], "merges of two pieces made before; got merge 1"),
    ([["a", "\ud800"]], "merges of two pieces made before; got merge 1")])
def test_another_file_is_named(written, value, message):
    path = written("subwords.json", json.dumps(value))
    with pytest.raises(DataError, match=rf"subwords\.json: expected {message}"):
        Subwords.load(path)


def test_merges_must_follow_each_other():
    with pytest.raises(ConfigError, match=r"Subwords: a merge must be of two pieces made before; got \('ab', 'c'\)"):
        Subwords((("ab", "c"),))


def test_the_library_is_named_where_it_is_missing(monkeypatch, tmp_path):
    (tmp_path / "subwords.json").write_text("[]")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    message = r"Subwords: tokenizers must be installed; got .* Install it with: pip install 'structconv-systems'"
    with pytest.raises(ConfigError, match=message):
        Subwords.train(LINES, 300)
    with pytest.raises(ConfigError, match=message):
        Subwords.load(tmp_path / "subwords.json")


def test_multi30k_comes_back(real):
    text = read_parallel(real("multi30k") / "val", "en", "de")
    subwords = Subwords.train(text.source + text.target, 2000)
    assert len(subwords) == 2000
    for sentence in text.source + text.target:
        assert subwords.decode(subwords.encode(sentence)) == sentence
