"""CoNLL-U: the words of sentences with their dependency trees (universaldependencies.org/format.html)."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from structconv.errors import DataError
from structconv_systems.data.text import read_lines
from structconv_systems.models.trees import cycle_of

__all__ = ["Sentence", "read_conllu"]

_COLUMNS = ("ID", "FORM", "LEMMA", "UPOS", "XPOS", "FEATS", "HEAD", "DEPREL", "DEPS", "MISC")
_HEAD = _COLUMNS.index("HEAD")
#: Multiword tokens (1-2) and empty nodes (1.1), which are not words of the tree.
_NO_WORD = re.compile(r"[0-9]+[-.][0-9]+")
_NUMBER = re.compile(r"[0-9]{1,9}")

Row = tuple[int, list[str]]  # the number of a line, and its columns


@dataclass(frozen=True, kw_only=True)
class Sentence:
    """The words of a sentence, numbered from 1, and the tree over them.

    Attributes:
        forms, lemmas: the words in the text, and their dictionary forms.
        upos, xpos: universal and language-specific parts of speech.
        heads: for each word the number of its head, 0 for the root.
        relations: the relation of each word to its head, for example ``"nsubj"``.

    Columns that a treebank leaves open hold ``"_"``.

    Example:

        >>> from structconv_systems.data.conllu import Sentence
        >>> sentence = Sentence(forms=("Dogs", "bark"), lemmas=("dog", "bark"), upos=("NOUN", "VERB"), xpos=("_", "_"),
        ...                     heads=(2, 0), relations=("nsubj", "root"))
        >>> len(sentence), sentence.forms[sentence.heads[0] - 1]
        (2, 'bark')
    """

    forms: tuple[str, ...]
    lemmas: tuple[str, ...]
    upos: tuple[str, ...]
    xpos: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.forms)


def read_conllu(path: str | Path) -> list[Sentence]:
    r"""Read the sentences of a CoNLL-U file, plain or gzipped, each a tree with one root.

    Comments, multiword tokens (1-2) and empty nodes (1.1) are skipped. Cost: O(words).

    Raises:
        DataError: with its line, where a word has other than ten columns or an empty one, is not numbered after the one
            before, or has a head that is no number or no word of its sentence; where a sentence has no root, several
            roots, or a cycle; where the file has no sentence; or `read_lines` cannot read it.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.conllu import read_conllu
        >>> path = Path(folder.name, "dogs.conllu")
        >>> _ = path.write_text("1\tDogs\tdog\tNOUN\t_\t_\t2\tnsubj\t_\t_\n2\tbark\tbark\tVERB\t_\t_\t0\troot\t_\t_\n")
        >>> sentence, = read_conllu(path)
        >>> sentence.forms, sentence.heads
        (('Dogs', 'bark'), (2, 0))
    """
    sentences = [_sentence(path, rows) for rows in _blocks(path)]
    if not sentences:
        raise DataError(path, "a sentence", "comments alone")
    return sentences


def _blocks(path: str | Path) -> Iterator[list[Row]]:
    """Yield the rows of each sentence; a blank line, or the end of the file, ends a sentence."""
    rows: list[Row] = []
    for number, line in enumerate([*read_lines(path), ""], 1):
        if line.strip():
            if not line.startswith("#"):
                rows.append((number, _columns(path, number, line)))
        elif rows:
            yield rows
            rows = []


def _columns(path: str | Path, number: int, line: str) -> list[str]:
    columns = line.split("\t")
    if len(columns) != len(_COLUMNS):
        raise DataError(path, f"{len(_COLUMNS)} columns with tabs between them", len(columns), line=number)
    if "" in columns:
        raise DataError(path, f"something in column {_COLUMNS[columns.index('')]}", "nothing", line=number,
                        remedy="What is left open is written as _.")
    return columns


def _sentence(path: str | Path, rows: list[Row]) -> Sentence:
    words = [row for row in rows if not _NO_WORD.fullmatch(row[1][0])]
    if not words:
        raise DataError(path, "a sentence with words", "none", line=rows[0][0])
    for place, (number, columns) in enumerate(words, 1):
        if columns[0] != str(place):
            raise DataError(path, f"the ID {place}, or one of the forms 1-2 and 1.1", repr(columns[0]), line=number)
        if not _NUMBER.fullmatch(columns[_HEAD]) or int(columns[_HEAD]) > len(words):
            raise DataError(path, f"a HEAD from 0 to {len(words)}", repr(columns[_HEAD]), line=number)
    heads = tuple(int(columns[_HEAD]) for _, columns in words)
    _check_tree(path, [number for number, _ in words], heads)
    _, forms, lemmas, upos, xpos, _, _, relations, *_ = zip(*(columns for _, columns in words), strict=True)
    return Sentence(forms=forms, lemmas=lemmas, upos=upos, xpos=xpos, heads=heads, relations=relations)


def _check_tree(path: str | Path, lines: Sequence[int], heads: Sequence[int]) -> None:
    roots = [word for word, head in enumerate(heads, 1) if head == 0]
    if not roots:
        raise DataError(path, "a word whose HEAD is 0, the root of its sentence", "none", line=lines[0])
    if len(roots) > 1:
        raise DataError(path, "one root of the sentence", f"words {roots[0]} and {roots[1]}, both with HEAD 0",
                        line=lines[roots[1] - 1])
    cycle = cycle_of([0, *heads])
    if cycle:
        raise DataError(path, "a tree", f"a cycle of heads, {' -> '.join(map(str, [*cycle, cycle[0]]))}",
                        line=lines[cycle[0] - 1])
