"""Text as characters: the split, the alphabet, and characters that it lacks."""

import gzip

import pytest
import torch

from structconv.errors import ConfigError, DataError
from structconv_systems.data.characters import Alphabet, read_characters


def test_tiny_shakespeare_is_split_as_usual(real):
    path = real("text/tinyshakespeare.txt")
    text = read_characters(path)
    parts = text.train, text.validation, text.test
    assert (len(text.alphabet), *map(len, parts)) == (65, 892_315, 111_539, 111_540)
    assert text.alphabet.decode(torch.cat(parts)) == path.read_text()


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_the_parts_follow_each_other(written, pack):
    path = written("a.txt", pack("zähe\r\nzebras".encode()))
    text = read_characters(path, 0.25)
    assert text.alphabet == Alphabet("\n\rabehrszä")
    parts = text.train, text.validation, text.test
    assert [text.alphabet.decode(part) for part in parts] == ["zähe\r\n", "zeb", "ras"]
    assert {part.dtype for part in parts} == {torch.int64}
    assert text.train[:2].tolist() == [8, 9]


def test_numbers_and_back():
    alphabet = Alphabet.of("hello")
    assert (alphabet.characters, len(alphabet)) == ("ehlo", 4)
    assert alphabet.encode("hole").tolist() == [1, 3, 2, 0]
    assert alphabet.decode([1, 3, 2, 0]) == alphabet.decode(torch.tensor([1, 3, 2, 0])) == "hole"
    assert alphabet.encode("").shape == (0,) and alphabet.encode("").dtype == torch.int64


def test_an_unknown_character_is_named(written):
    alphabet = Alphabet("\nab")
    with pytest.raises(ConfigError, match=r"the text must be of the 3 characters learned; got 'c' at position 2\."):
        alphabet.encode("bacd")
    with pytest.raises(ConfigError, match=r"got '\\udcff' at position 0"):
        alphabet.encode("\udcff")
    path = written("a.txt", "ab\na\nbß\né")
    with pytest.raises(DataError, match=r"a\.txt, line 3: expected one of the 3 characters learned; got 'ß'\."):
        alphabet.read(path)
    path.write_text("ab\na\n")
    assert alphabet.read(path).tolist() == [1, 2, 0, 1, 0]


@pytest.mark.parametrize("share", [0, 0.5, -0.5, 2, float("nan")])
def test_a_share_must_be_one(tmp_path, share):
    with pytest.raises(ConfigError, match="held_out must be above 0 and below 1/2"):
        read_characters(tmp_path / "none", share)


def test_a_text_of_one_part_is_named(written):
    path = written("a.txt", "a")
    with pytest.raises(DataError, match=r"a\.txt: expected text enough to train, to validate and to test; got 1 ch"):
        read_characters(path)


def test_an_alphabet_is_saved(tmp_path):
    alphabet = Alphabet("\n\r\"\\aß😀\ud800")
    alphabet.save(tmp_path / "alphabet.json")
    assert Alphabet.load(tmp_path / "alphabet.json") == alphabet
    assert [path.name for path in tmp_path.iterdir()] == ["alphabet.json"]


@pytest.mark.parametrize("content", ["[]", "1", "null", '"aa"', '{"a": 1}'])
def test_another_file_is_no_alphabet(written, content):
    path = written("alphabet.json", content)
    with pytest.raises(DataError, match=r"alphabet\.json: expected a string of characters, each once"):
        Alphabet.load(path)


def test_a_character_comes_once():
    with pytest.raises(ConfigError, match="each character must come once; got 'aba'"):
        Alphabet("aba")
