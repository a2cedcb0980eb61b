"""A vocabulary of words, characters, parts of speech or relations."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

from structconv.errors import ConfigError, DataError
from structconv.files import write_atomically
from structconv_systems.data.text import read_json
from structconv_systems.models.tokens import SPECIAL, UNKNOWN

__all__ = ["Vocabulary"]


@dataclass(frozen=True, repr=False)
class Vocabulary:
    """Words and their numbers; 0 pads, 1 begins, 2 ends, 3 is any word that is not in `words`, whose numbers follow.

    Raises:
        ConfigError: a word comes twice.

    Example:

        >>> from structconv_systems.data.words import Vocabulary
        >>> words = Vocabulary.of([["a", "dog"], ["a", "cat"]])
        >>> words.encode(["a", "bird"]), words.decode([4])
        ([4, 3], ['a'])
    """

    words: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(set(self.words)) < len(self.words):
            raise ConfigError("Vocabulary", "each word must come once", repr(_twice(self.words)))

    @classmethod
    def of(cls, sentences: Iterable[Iterable[str]], *, least: int = 1, most: int | None = None) -> Self:
        """The words that come at least `least` times, the `most` frequent of them, where it is given.

        By falling count, words of the same count in order of code points: equal for equal sentences. Of characters:
        ``Vocabulary.of(words)``, since a word is a sequence of characters.
        """
        counts = Counter(word for sentence in sentences for word in sentence)
        ordered = sorted((word for word, count in counts.items() if count >= least),
                         key=lambda word: (-counts[word], word))
        return cls(tuple(ordered[:most]))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file that `save` wrote; `DataError` for any other file."""
        words = read_json(path)
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise DataError(path, "a list of words", f"{type(words).__name__} of other things")
        if len(set(words)) < len(words):
            raise DataError(path, "words, each once", repr(_twice(words)))
        return cls(tuple(words))

    def save(self, path: str | Path) -> None:
        """Write the words as a list of JSON, the whole file or none of it."""
        write_atomically(Path(path), json.dumps(self.words, indent=0) + "\n")

    def __len__(self) -> int:
        """Return the number of tokens: `words` and the four special ones."""
        return len(self.words) + len(SPECIAL)

    def __repr__(self) -> str:
        return f"Vocabulary({len(self)})"

    def encode(self, sentence: Iterable[str]) -> list[int]:
        """Return the number of each word, 3 for unknown words."""
        return [self._numbers.get(word, UNKNOWN) for word in sentence]

    def decode(self, numbers: Iterable[int]) -> list[str]:
        """Return the word of each number; the special ones are ``<pad>``, ``<begin>``, ``<end>``, ``<unknown>``."""
        return [(SPECIAL + self.words)[number] for number in numbers]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, len(SPECIAL))}


def _twice(words: Sequence[str]) -> str:
    return Counter(words).most_common(1)[0][0]
