"""Vocabularies of words, characters and labels."""

import json

import pytest

from structconv.errors import ConfigError, DataError
from structconv_systems.data.words import Vocabulary

SENTENCES = [["the", "dog", "saw", "the", "cat"], ["a", "dog", "ran"]]


def test_words_are_numbered_by_count_and_then_by_spelling():
    words = Vocabulary.of(SENTENCES)
    assert words.words == ("dog", "the", "a", "cat", "ran", "saw")
    assert len(words) == 10
    assert words.encode(["the", "cat", "flew"]) == [5, 7, 3]
    assert words.decode([0, 1, 2, 3, 5, 7]) == ["<pad>", "<begin>", "<end>", "<unknown>", "the", "cat"]
    assert repr(words) == "Vocabulary(10)"
    assert words == Vocabulary.of(iter(SENTENCES)) == Vocabulary.of(SENTENCES[::-1])


def test_rare_words_are_unknown():
    assert Vocabulary.of(SENTENCES, least=2).words == ("dog", "the")
    assert Vocabulary.of(SENTENCES, most=1).words == ("dog",)
    assert Vocabulary.of([], least=2).encode(["dog"]) == [3]


def test_characters_are_words_of_words():
    assert Vocabulary.of(["abba", "b"]).words == ("b", "a")


def test_a_word_spelt_as_a_special_one_is_none():
    words = Vocabulary.of([["<pad>", "<unknown>"]])
    assert words.encode(["<pad>", "<unknown>", "<end>"]) == [4, 5, 3]


def test_a_vocabulary_is_saved(tmp_path):
    words = Vocabulary(("ß", "", '"', "\n", "\ud800"))
    words.save(tmp_path / "words.json")
    assert Vocabulary.load(tmp_path / "words.json") == words
    assert [path.name for path in tmp_path.iterdir()] == ["words.json"]


@pytest.mark.parametrize("value, message", [
    ({"a": 1}, "a list of words; got dict"), ([1], "a list of words; got list"), ("ab", "a list of words; got str"),
    (None, "a list of words; got NoneType"), (["b", "a", "b"], "words, each once; got 'b'")])
def test_another_file_is_no_vocabulary(written, value, message):
    path = written("words.json", json.dumps(value))
    with pytest.raises(DataError, match=rf"words\.json: expected {message}"):
        Vocabulary.load(path)


def test_a_word_comes_once():
    with pytest.raises(ConfigError, match="each word must come once; got 'a'"):
        Vocabulary(("b", "a", "a"))
