"""Parallel text: which files are read, and that both sides have one sentence a line."""

import dataclasses
import gzip

import pytest

from structconv.errors import DataError
from structconv_systems.data.parallel import Parallel, in_a_row, read_parallel


@pytest.mark.parametrize("part, pairs", [("train", 29_000), ("val", 1014), ("test_2016_flickr", 1000)])
def test_multi30k_has_its_published_counts(real, part, pairs):
    text = read_parallel(real("multi30k") / part, "en", "de")
    assert len(text) == len(text.source) == len(text.target) == pairs
    if part == "train":
        assert text.source[0] == "Two young, White males are outside near many bushes."
        assert text.target[0] == "Zwei junge weiße Männer sind im Freien in der Nähe vieler Büsche."


def write(folder, **texts):
    """The stem of files of text by language."""
    for language, text in texts.items():
        (folder / f"a.b.{language}").write_text(text, encoding="utf-8")
    return folder / "a.b"


def test_plain_and_gzipped_files_go_together(tmp_path):
    stem = write(tmp_path, en=" one dog\ntwo\u2028dogs \n")
    (tmp_path / "a.b.de.gz").write_bytes(gzip.compress(b"ein Hund\r\nzwei Hunde"))
    text = read_parallel(str(stem), "en", "de")
    assert (text.source, text.target) == (("one dog", "two\u2028dogs"), ("ein Hund", "zwei Hunde"))
    assert read_parallel(stem, "de", "en") == type(text)(source=text.target, target=text.source)
    assert repr(text) == "Parallel(2 pairs of sentences)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        text.source = ()


def test_neither_and_both_files_are_named(tmp_path):
    stem = write(tmp_path, en="a")
    with pytest.raises(DataError, match=r"a\.b\.de: expected this file or .*a\.b\.de\.gz; got neither\. .*without the"):
        read_parallel(stem, "en", "de")
    write(tmp_path, de="a")
    (tmp_path / "a.b.de.gz").write_bytes(gzip.compress(b"a"))
    with pytest.raises(DataError, match=r"a\.b\.de: expected either this file or .*a\.b\.de\.gz; got both\. Remove"):
        read_parallel(stem, "en", "de")


@pytest.mark.parametrize("en, de, message", [
    ("a\nb\n", "a\n", r"a\.b\.de: expected as many lines as .*a\.b\.en has, 2; got 1\."),
    ("a\nb\n", "a\nb\n\n", r"a\.b\.de: expected as many lines as .*a\.b\.en has, 2; got 3\."),
    ("a\nb\n", "a\n \n", r"a\.b\.de, line 2: expected a sentence; got a blank line\. Remove the line from both files"),
    ("a\n\nb\n", "a\nb\n\n", r"a\.b\.en, line 2: expected a sentence; got a blank line"),
    ("a\n\nb", "a\n\nb", r"a\.b\.en, line 2: expected a sentence; got a blank line"),
    ("a", "", r"a\.b\.de: expected text; got an empty file")])
def test_lines_without_a_translation_are_named(tmp_path, en, de, message):
    with pytest.raises(DataError, match=message):
        read_parallel(write(tmp_path, en=en, de=de), "en", "de")


@pytest.mark.parametrize("count, source, target", [(1, ("a", "b", "c"), ("x", "y", "z")), (2, ("a b",), ("x y",)),
                                                   (3, ("a b c",), ("x y z",)), (4, (), ())])
def test_neighbors_are_joined_on_both_sides(count, source, target):
    joined = in_a_row(Parallel(source=("a", "b", "c"), target=("x", "y", "z")), count)
    assert (joined.source, joined.target) == (source, target)
