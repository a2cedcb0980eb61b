"""Subwords: byte pair encoding of bytes (Sennrich et al. 2016; Radford et al. 2019), by the library `tokenizers`."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from structconv.errors import ConfigError, DataError
from structconv.files import write_atomically
from structconv_systems.data.text import read_json
from structconv_systems.models.tokens import SPECIAL
from structconv_systems.optional import require

__all__ = ["Subwords"]

_SMALLEST = len(SPECIAL) + 256


@dataclass(frozen=True, repr=False)
class Subwords:
    """Frequent pieces of words, made of bytes by merging the most frequent pair of neighbors again and again.

    A line is given a space to begin with, so that a word is the same piece wherever it stands; merges stay within a
    word, a number or marks, with the space before. `decode(encode(line)) == line` for any text, since the pieces of
    length one are the 256 bytes. The number 0 pads, 1 begins, 2 ends and 3 is unknown; `encode` uses none of these,
    whatever a line says. Two with equal merges are equal.

    Args:
        merges: pairs of pieces in the order in which they are merged, a byte as one letter as in GPT-2.

    Raises:
        ConfigError: `tokenizers` is not installed; a merge is of a piece that no merge before it makes.

    Example:

        >>> from structconv_systems.data.subwords import Subwords
        >>> subwords = Subwords.train(["low lower lowest"] * 3, size=265)      # four numbers, 256 bytes and five merges
        >>> numbers = subwords.encode("lowest")
        >>> subwords.pieces(numbers), subwords.decode(numbers)
        ([' lowe', 'st'], 'lowest')
    """

    merges: tuple[tuple[str, str], ...]

    def __post_init__(self) -> None:
        wrong = _first_wrong(self.merges)
        if wrong is not None:
            raise ConfigError("Subwords", "a merge must be of two pieces made before", self.merges[wrong])

    @classmethod
    def train(cls, lines: Iterable[str], size: int) -> Self:
        """The pieces of at most `size` numbers, the four special ones and the 256 bytes among them, that lines have.

        A pair that comes once is not merged, so that short texts give fewer. Equal lines give equal pieces.

        Raises:
            ConfigError: `size` is less than 260, or `tokenizers` is not installed.
        """
        if size < _SMALLEST:
            raise ConfigError("Subwords.train", f"size must be at least {_SMALLEST}", size)
        library = _library()
        coder = _coder(library, library.models.BPE())
        coder.train_from_iterator((f" {line}" for line in lines), library.trainers.BpeTrainer(
            vocab_size=size - len(SPECIAL), min_frequency=2, initial_alphabet=_letters(library), show_progress=False))
        return cls(tuple((first, second) for first, second in json.loads(coder.to_str())["model"]["merges"]))

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read the file that `save` wrote.

        Raises:
            DataError: the file has another format.
            ConfigError: `tokenizers` is not installed.
        """
        merges = read_json(path)
        if not isinstance(merges, list) or not all(isinstance(merge, list) and [*map(type, merge)] == [str, str]
                                                   for merge in merges):
            raise DataError(path, "a list of pairs of pieces", f"{type(merges).__name__} of other things")
        wrong = _first_wrong(merges)
        if wrong is not None:
            raise DataError(path, "merges of two pieces made before", f"merge {wrong + 1}, {merges[wrong]}")
        return cls(tuple((first, second) for first, second in merges))

    def save(self, path: str | Path) -> None:
        """Write the merges as a list of JSON, the whole file or none of it."""
        rows = ",\n".join(map(json.dumps, self.merges))
        write_atomically(Path(path), f"[\n{rows}\n]\n")

    def __len__(self) -> int:
        """Return the number of tokens, special ones included."""
        return _SMALLEST + len({first + second for first, second in self.merges})

    def __repr__(self) -> str:
        return f"Subwords({len(self)})"

    def encode(self, line: str) -> list[int]:
        """The numbers of a line, without begin and end."""
        return [number + len(SPECIAL) for number in self._model.encode(f" {line}").ids]

    def decode(self, numbers: Iterable[int]) -> str:
        """Return the line of numbers without the special ones; bytes that are not UTF-8 become U+FFFD."""
        own = [int(number) - len(SPECIAL) for number in numbers if int(number) >= len(SPECIAL)]
        return str(self._model.decode(own)).removeprefix(" ")

    def pieces(self, numbers: Iterable[int]) -> list[str]:
        """Return each number as readable text, with the space before it; special ones in brackets."""
        return [SPECIAL[number] if number < len(SPECIAL) else self._model.decode([number - len(SPECIAL)])
                for number in map(int, numbers)]

    @cached_property
    def _model(self) -> Any:
        library = _library()
        pieces = dict.fromkeys([*_letters(library), *(first + second for first, second in self.merges)])
        return _coder(library, library.models.BPE(vocab={piece: number for number, piece in enumerate(pieces)},
                                                  merges=list(self.merges)))


def _library() -> Any:
    return require("tokenizers", "Subwords")


def _letters(library: Any) -> list[str]:
    """Return the letters that stand for the 256 bytes."""
    return sorted(library.pre_tokenizers.ByteLevel.alphabet())


def _coder(library: Any, model: Any) -> Any:
    coder = library.Tokenizer(model)
    coder.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    coder.decoder = library.decoders.ByteLevel()
    return coder


def _first_wrong(merges: Any) -> int | None:
    """Return the place of the first merge of a piece that no merge before it makes."""
    pieces = set(_letters(_library()))
    for place, (first, second) in enumerate(merges):
        if first not in pieces or second not in pieces:
            return place
        pieces.add(first + second)
    return None
