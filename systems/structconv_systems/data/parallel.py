"""Parallel text: sentences and their translations in two files, one on each line."""

from dataclasses import dataclass
from pathlib import Path

from structconv.errors import DataError
from structconv_systems.data.text import read_lines

__all__ = ["Parallel", "in_a_row", "read_parallel"]


@dataclass(frozen=True, kw_only=True, repr=False)
class Parallel:
    """Sentences, and at the same places their translations.

    Example:

        >>> from structconv_systems.data.parallel import Parallel
        >>> text = Parallel(source=("a dog", "a cat"), target=("ein Hund", "eine Katze"))
        >>> text, len(text)
        (Parallel(2 pairs of sentences), 2)
    """

    source: tuple[str, ...]
    target: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"Parallel({len(self)} pairs of sentences)"


def read_parallel(stem: str | Path, source: str, target: str) -> Parallel:
    r"""Read two files of sentences that translate each other line by line, plain or gzipped.

    Those of ``read_parallel("multi30k/train", "en", "de")`` are ``multi30k/train.en`` or ``multi30k/train.en.gz``, and
    ``multi30k/train.de`` or ``multi30k/train.de.gz``. White space around a sentence is left out. Each line must hold a
    sentence: a blank one, on one side or on both, is an error, since a pair that nobody wrote would be learned, and
    counted in a test.

    Raises:
        DataError: neither file of a language is there, or both are; the files have unequal numbers of lines; a line is
            blank; or `read_lines` cannot read one.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.parallel import read_parallel
        >>> _ = Path(folder.name, "train.en").write_text("a dog\na cat\n")
        >>> _ = Path(folder.name, "train.de").write_text("ein Hund\neine Katze\n")
        >>> read_parallel(Path(folder.name, "train"), "en", "de").target
        ('ein Hund', 'eine Katze')
    """
    paths = [_find(stem, language) for language in (source, target)]
    sides = [[line.strip() for line in read_lines(path)] for path in paths]
    first, second = map(len, sides)
    if first != second:
        raise DataError(paths[1], f"as many lines as {paths[0]} has, {first}", second,
                        remedy="Line n of one file must translate line n of the other.")
    for path, sentences in zip(paths, sides, strict=True):
        if "" in sentences:
            raise DataError(path, "a sentence", "a blank line", line=sentences.index("") + 1,
                            remedy="Remove the line from both files.")
    return Parallel(source=tuple(sides[0]), target=tuple(sides[1]))


def in_a_row(text: Parallel, count: int) -> Parallel:
    """Join each `count` neighbors to one sentence, and their translations; the rest at the end is left out.

    Example:

        >>> from structconv_systems.data.parallel import Parallel, in_a_row
        >>> text = Parallel(source=("a dog", "a cat", "a bird"), target=("ein Hund", "eine Katze", "ein Vogel"))
        >>> in_a_row(text, 2).source                       # the third is left out
        ('a dog a cat',)
    """
    source, target = (tuple(" ".join(side[first:first + count]) for first in range(0, len(side) - count + 1, count))
                      for side in (text.source, text.target))
    return Parallel(source=source, target=target)


def _find(stem: str | Path, language: str) -> Path:
    """Return the one file of a language."""
    plain = Path(f"{stem}.{language}")
    zipped = Path(f"{plain}.gz")
    existing = [path for path in (plain, zipped) if path.exists()]
    if len(existing) == 1:
        return existing[0]
    if existing:
        raise DataError(plain, f"either this file or {zipped}", "both", remedy="Remove or rename one of them.")
    raise DataError(plain, f"this file or {zipped}", "neither",
                    remedy=f"The path is given without the language: x for x.{language}.")
