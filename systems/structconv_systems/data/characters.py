"""Text as a sequence of characters, for language models."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from structconv.errors import ConfigError, DataError
from structconv.files import write_atomically
from structconv_systems.data.text import read_json, read_text

__all__ = ["Alphabet", "Characters", "read_characters"]


@dataclass(frozen=True)
class Alphabet:
    """Characters and their numbers: the number of a character is its place in `characters`.

    Raises:
        ConfigError: a character comes twice.

    Example:

        >>> from structconv_systems.data.characters import Alphabet
        >>> alphabet = Alphabet.of("banana")
        >>> alphabet.characters, alphabet.encode("nab").tolist(), alphabet.decode([1, 0])
        ('abn', [2, 0, 1], 'ba')
    """

    characters: str

    def __post_init__(self) -> None:
        if len(set(self.characters)) < len(self.characters):
            raise ConfigError("Alphabet", "each character must come once", repr(self.characters))

    @classmethod
    def of(cls, text: str) -> Self:
        """The characters of a text, sorted by code point."""
        return cls("".join(sorted(set(text))))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file that `save` wrote; `DataError` for any other file."""
        characters = read_json(path)
        if not isinstance(characters, str) or len(set(characters)) < len(characters):
            raise DataError(path, "a string of characters, each once", repr(characters))
        return cls(characters)

    def save(self, path: str | Path) -> None:
        """Write the characters as a string of JSON, the whole file or none of it."""
        write_atomically(Path(path), json.dumps(self.characters) + "\n")

    def __len__(self) -> int:
        return len(self.characters)

    def encode(self, text: str) -> Tensor:
        """The numbers (N,), int64, of a text of N characters.

        Raises:
            ConfigError: it has a character that the alphabet lacks.
        """
        at = self._unknown(text)
        if at is not None:
            raise ConfigError("Alphabet", f"the text must be of the {len(self)} characters learned",
                              f"{text[at]!r} at position {at}")
        return torch.tensor([self._numbers[character] for character in text], dtype=torch.int64)

    def decode(self, numbers: Iterable[int] | Tensor) -> str:
        """Return the text of numbers (N,)."""
        return "".join(self.characters[number] for number in
                       (numbers.tolist() if isinstance(numbers, Tensor) else numbers))

    def read(self, path: str | Path) -> Tensor:
        """The numbers (N,), int64, of a whole file, plain or gzipped.

        Raises:
            DataError: `read_text` cannot read it, or it has a character that the alphabet lacks; its line is named.
        """
        return self._of_file(read_text(path), path)

    def _of_file(self, text: str, path: str | Path) -> Tensor:
        at = self._unknown(text)
        if at is not None:
            raise DataError(path, f"one of the {len(self)} characters learned", repr(text[at]),
                            line=text.count("\n", 0, at) + 1)
        return self.encode(text)

    def _unknown(self, text: str) -> int | None:
        """Return the position of the first unknown character."""
        unknown = set(text).difference(self._numbers)
        return min(map(text.index, unknown), default=None)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {character: number for number, character in enumerate(self.characters)}


@dataclass(frozen=True, kw_only=True, eq=False)
class Characters:
    """A text as numbers of its characters.

    Attributes:
        alphabet: the characters of the whole text, sorted.
        train, validation, test: (N,), int64, one behind the other in the text.

    Example:

        >>> from structconv_systems.data.characters import Alphabet, Characters
        >>> alphabet = Alphabet.of("banana")
        >>> train, validation, test = alphabet.encode("banana").split(2)
        >>> text = Characters(alphabet=alphabet, train=train, validation=validation, test=test)
        >>> text.alphabet.decode(text.test)
        'na'
    """

    alphabet: Alphabet
    train: Tensor
    validation: Tensor
    test: Tensor


def read_characters(path: str | Path, held_out: float = 0.1, alphabet: Alphabet | None = None) -> Characters:
    """Read a text, plain or gzipped, as the numbers of its characters.

    With N characters the first int((1 - 2 held_out) N) train, the next validate, and those from int((1 - held_out) N)
    on test. Without an `alphabet` it is that of the whole text, as is usual for Tiny Shakespeare.

    Raises:
        ConfigError: held_out is not above 0 and below 1/2.
        DataError: `read_text` cannot read the file, or it is too short to have three parts, or has characters
            that the alphabet lacks.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.characters import read_characters
        >>> path = Path(folder.name, "text.txt")
        >>> _ = path.write_text("to be or not to be")
        >>> text = read_characters(path, held_out=0.2)
        >>> [text.alphabet.decode(part) for part in (text.train, text.validation, text.test)]
        ['to be or n', 'ot t', 'o be']
    """
    if not 0 < held_out < 0.5:
        raise ConfigError("read_characters", "held_out must be above 0 and below 1/2", held_out)
    text = read_text(path)
    alphabet = Alphabet.of(text) if alphabet is None else alphabet
    numbers = alphabet._of_file(text, path)
    first, second = (int(share * len(numbers)) for share in (1 - 2 * held_out, 1 - held_out))
    if not 0 < first < second < len(numbers):
        raise DataError(path, "text enough to train, to validate and to test", f"{len(numbers)} characters")
    return Characters(alphabet=alphabet, train=numbers[:first], validation=numbers[first:second], test=numbers[second:])
