"""Knowledge graphs: triples of names or of numbers in a folder or an archive, and RDF whose entities have classes."""

import io
import lzma
import re
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from structconv.errors import DataError
from structconv.shapes import check_choice
from structconv.structures import KnowledgeGraph
from structconv_systems.data.text import decoded, is_natural, lines_of, read_bytes, read_lines

__all__ = ["Classes", "Triples", "read_classes", "read_ntriples", "read_triples"]

#: The names of the parts of a data set in files.
_PARTS = {"train": ("train",), "valid": ("valid", "val", "dev"), "test": ("test",)}
_ENDINGS = ("", ".txt", ".tsv", ".dat")
_NUMBERED = {"entity": "entity2id.txt", "relation": "relation2id.txt", "train": "train2id.txt",
             "valid": "valid2id.txt", "test": "test2id.txt"}
_IRI = r'(?:[^<>"{}|^`\\\s]|\\u[0-9A-Fa-f]{4}|\\U[0-9A-Fa-f]{8})*'
_TERM = rf'<{_IRI}>|_:\S+'
_LITERAL = r'"(?:[^"\\]|\\.)*"(?:@[\w-]+|\^\^<[^<>\s]*>)?'
_STATEMENT = re.compile(rf"\s*({_TERM})\s*<([^<>\s]*)>\s*({_TERM}|{_LITERAL})\s*\.\s*(#.*)?")

_Row = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Triples:
    """Facts (head, relation, tail) in parts.

    Attributes:
        entities, relations: names, in the order of their numbers.
        parts: ``train``, ``valid`` and ``test``, each (T, 3), int64.

    Example:

        >>> from structconv_systems.data.knowledge import Triples
        >>> facts = torch.tensor([[0, 0, 1], [1, 0, 2]])   # head, relation, tail
        >>> parts = {"train": facts[:1], "valid": facts[1:], "test": facts[1:]}
        >>> triples = Triples(entities=("Paris", "France", "Europe"), relations=("lies in",), parts=parts)
        >>> triples.graph().num_triples                    # of the training part
        1
    """

    entities: tuple[str, ...]
    relations: tuple[str, ...]
    parts: Mapping[str, Tensor]

    def graph(self, triples: Tensor | None = None) -> KnowledgeGraph:
        """Return the graph of the training triples, or of `triples` (T, 3)."""
        return KnowledgeGraph(self.parts["train"] if triples is None else triples, len(self.entities), self.relations,
                              entities=self.entities)

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(triples)} {part}" for part, triples in self.parts.items())
        return f"Triples({len(self.entities)} entities, {len(self.relations)} relations, {counts})"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Classes:
    """A knowledge graph whose entities may have classes.

    Attributes:
        graph: without inverses.
        classes: names of the classes.
        nodes, labels: for ``train`` and ``test``, (n,) entities and (n,) their classes.

    Example:

        >>> from structconv import KnowledgeGraph
        >>> from structconv_systems.data.knowledge import Classes
        >>> graph = KnowledgeGraph(torch.tensor([[0, 0, 1]]), 2, ("knows",))
        >>> nodes = {"train": torch.tensor([0]), "test": torch.tensor([1])}
        >>> labels = {"train": torch.tensor([0]), "test": torch.tensor([0])}
        >>> data = Classes(graph=graph, classes=("person",), nodes=nodes, labels=labels)
        >>> data.nodes["test"].tolist(), data.classes
        ([1], ('person',))
    """

    graph: KnowledgeGraph
    classes: tuple[str, ...]
    nodes: Mapping[str, Tensor]
    labels: Mapping[str, Tensor]

    def __repr__(self) -> str:
        counts = ", ".join(f"{len(nodes)} {part}" for part, nodes in self.nodes.items())
        return f"Classes({self.graph!r}, {len(self.classes)} classes, {counts})"


class _File(NamedTuple):
    """A file of a folder or of an archive: what errors call it, and its lines."""

    name: str
    lines: Callable[[], list[str]]


def read_triples(path: str | Path, *, unseen: Literal["error", "admit"] = "error") -> Triples:
    r"""Read the training, validation and test triples in a folder, or in a tar archive of it, packed or not.

    Two forms are read. Names: files ``train``, ``valid`` (or ``val``, ``dev``) and ``test``, ending in .txt, .tsv, .dat
    or nothing, in a folder plain or gzipped; a line is ``head relation tail`` with tabs between, or white space where
    it has no tab. Numbers, as OpenKE writes them: ``entity2id.txt`` and ``relation2id.txt`` (a line with the count,
    then ``name number``), ``train2id.txt`` and so on (the count, then ``head tail relation``).

    An archive is read in memory: nothing is extracted, links are not followed, of a path the last name alone counts.

    Args:
        path: the folder or the archive.
        unseen: entities and relations without a training triple raise an error, or get numbers after the others.

    Raises:
        ConfigError: another `unseen`.
        DataError: with file and line: a line lacks three columns, a name of validation or test is unknown, a number is
            out of range, a part is missing, duplicate or empty, or the archive is truncated.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.knowledge import read_triples
        >>> for part in ("train", "valid", "test"):
        ...     _ = Path(folder.name, f"{part}.txt").write_text("Paris\tlies in\tFrance\n")
        >>> read_triples(folder.name).entities
        ('Paris', 'France')
    """
    check_choice("read_triples", "unseen", unseen, ("error", "admit"))
    files = _files(Path(path))
    numbered = {key: files[name] for key, name in _NUMBERED.items() if name in files}
    return _numbered(path, numbered) if "entity" in numbered else _named(path, files, unseen == "admit")


def _named(path: str | Path, files: Mapping[str, _File], admit: bool) -> Triples:
    entities: dict[str, int] = {}
    relations: dict[str, int] = {}
    parts = {}
    for part in _PARTS:
        file, rows = _part(path, files, part), []
        for line, (head, relation, tail) in _rows(file):
            if part == "train" or admit:
                for name, numbers in ((head, entities), (relation, relations), (tail, entities)):
                    numbers.setdefault(name, len(numbers))
            rows.append((_number(file, line, "entity", entities, head),
                         _number(file, line, "relation", relations, relation),
                         _number(file, line, "entity", entities, tail)))
        parts[part] = torch.tensor(rows, dtype=torch.int64)
    return Triples(entities=tuple(entities), relations=tuple(relations), parts=parts)


def _part(path: str | Path, files: Mapping[str, _File], part: str) -> _File:
    matches = [files[name + ending] for name in _PARTS[part] for ending in _ENDINGS if name + ending in files]
    if len(matches) != 1:
        raise DataError(path, f"one file {part}.txt", ", ".join(file.name for file in matches) or "none")
    return matches[0]


def _rows(file: _File) -> Iterator[tuple[int, _Row]]:
    """Yield the number and the columns of each line, without blank lines at the end."""
    lines = file.lines()
    while lines and not lines[-1].strip():
        lines.pop()
    for number, line in enumerate(lines, 1):
        columns = [cell.strip() for cell in line.split("\t")] if "\t" in line else line.split()
        if len(columns) != 3 or not all(columns):
            raise DataError(file.name, "three columns: head, relation, tail", repr(line), line=number)
        yield number, (columns[0], columns[1], columns[2])


def _number(file: _File, line: int, kind: str, numbers: Mapping[str, int], name: str) -> int:
    if name not in numbers:
        raise DataError(file.name, f"{'an' if kind == 'entity' else 'a'} {kind} that some training triple has",
                        repr(name), line=line, remedy="unseen=admit numbers it after the others.")
    return numbers[name]


def _numbered(path: str | Path, files: Mapping[str, _File]) -> Triples:
    missing = [_NUMBERED[key] for key in _NUMBERED if key not in files]
    if missing:
        raise DataError(path, f"a file {missing[0]} beside {_NUMBERED['entity']}", "none")
    entities, relations = _listed(files["entity"]), _listed(files["relation"])
    parts = {part: _indices(files[part], len(entities), len(relations)) for part in _PARTS}
    return Triples(entities=entities, relations=relations, parts=parts)


def _counted(file: _File, columns: int) -> Iterator[tuple[int, list[str]]]:
    """Yield the lines after the first, which holds their number, split into columns from the right."""
    lines = file.lines()
    if not is_natural(lines[0].strip()):
        raise DataError(file.name, "the number of lines that follow", repr(lines[0]), line=1)
    rows = [(number, line) for number, line in enumerate(lines[1:], 2) if line.strip()]
    if len(rows) != int(lines[0]):
        raise DataError(file.name, f"{int(lines[0])} lines after the first, as it says", len(rows), line=1)
    for number, line in rows:
        cells = line.rsplit(maxsplit=columns - 1)
        if len(cells) != columns or not all(map(is_natural, cells[1:])):
            raise DataError(file.name, f"{columns} columns that end in a number", repr(line), line=number)
        yield number, cells


def _listed(file: _File) -> tuple[str, ...]:
    """Return the names in the order of their numbers."""
    names: dict[int, str] = {}
    numbered: set[str] = set()
    for line, (name, number) in _counted(file, 2):
        if int(number) in names or name in numbered:
            raise DataError(file.name, "names and numbers that come once", f"{name!r} {number}", line=line)
        names[int(number)] = name
        numbered.add(name)
    if sorted(names) != list(range(len(names))):
        raise DataError(file.name, f"the numbers 0 to {len(names) - 1}", f"one up to {max(names)}")
    return tuple(names[number] for number in range(len(names)))


def _indices(file: _File, entities: int, relations: int) -> Tensor:
    rows = []
    for line, cells in _counted(file, 3):
        if not is_natural(cells[0]):
            raise DataError(file.name, "three numbers: head, tail, relation", " ".join(cells), line=line)
        head, tail, relation = map(int, cells)
        if max(head, tail) >= entities:
            raise DataError(file.name, f"entities below {entities}", max(head, tail), line=line)
        if relation >= relations:
            raise DataError(file.name, f"a relation below {relations}", relation, line=line)
        rows.append((head, relation, tail))
    if not rows:
        raise DataError(file.name, "triples", "none")
    return torch.tensor(rows, dtype=torch.int64)


def _files(path: Path) -> dict[str, _File]:
    """Return the files of a folder or an archive by their names without .gz."""
    if not path.is_dir():
        return _archived(path)
    files: dict[str, _File] = {}
    for file in sorted(path.iterdir()):
        if file.is_file():
            _add(files, path, file.name.removesuffix(".gz"), _File(str(file), partial(read_lines, file)))
    return files


def _archived(path: Path) -> dict[str, _File]:
    files: dict[str, _File] = {}
    packed = io.BytesIO(read_bytes(path))
    try:
        with tarfile.open(fileobj=packed, mode="r:*") as archive:
            for member in archive:
                stream = archive.extractfile(member) if member.isreg() else None
                name = PurePosixPath(member.name).name
                if stream is not None and not name.startswith("."):
                    _add(files, path, name, _File(f"{path}:{name}", partial(_lines, f"{path}:{name}", stream.read())))
    except (tarfile.TarError, EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        raise DataError(path, "a folder, or a whole tar archive", error, remedy="Fetch it again.") from None
    return files


def _lines(name: str, content: bytes) -> list[str]:
    return lines_of(decoded(name, content))


def _add(files: dict[str, _File], path: Path, name: str, file: _File) -> None:
    if name in files:
        raise DataError(path, f"one file {name}", f"{files[name].name} and {file.name}")
    files[name] = file


def read_ntriples(path: str | Path) -> list[tuple[int, _Row]]:
    """Read the statements of an N-Triples file, plain or gzipped, each with its line number.

    IRIs lose their brackets; literals keep quotation marks, language and type. Blank lines and lines with # at the
    start are skipped.

    Raises:
        DataError: a line is not a statement, or an error of `read_lines`.
    """
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _STATEMENT.fullmatch(line)
        if match is None:
            raise DataError(path, "a statement <subject> <predicate> object .", repr(line), line=number)
        head, relation, tail = match.group(1, 2, 3)
        rows.append((number, (_bare(head), relation, _bare(tail))))
    return rows


def _bare(term: str) -> str:
    return term[1:-1] if term.startswith("<") else term


def read_classes(facts: str | Path, train: str | Path, test: str | Path, *, leaks: Sequence[str] = ()) -> Classes:
    r"""Read an RDF graph and the classes of its entities, in the format of the published R-GCN data sets.

    Args:
        facts: N-Triples. Literals are entities too; duplicate facts are one edge.
        train, test: TSV with a header: one column begins with ``label``, and the first other column, except ``id``, has
            the IRI of the entity.
        leaks: relations that reveal the class, by IRI or by its part after the last / or #; their facts are removed, as
            the authors of R-GCN did with ``affiliation`` and ``employs`` of AIFB.

    Raises:
        DataError: with file and line: a line is malformed, an entity has no fact, has two classes or is in both files,
            a test class has no training entity, or no facts are left.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.knowledge import read_classes
        >>> facts, train, test = (Path(folder.name, name) for name in ("facts.nt", "train.tsv", "test.tsv"))
        >>> _ = facts.write_text("<x:ann> <x:knows> <x:bob> .\n")
        >>> _ = train.write_text("person\tlabel_role\nx:ann\tteacher\n")
        >>> _ = test.write_text("person\tlabel_role\nx:bob\tteacher\n")
        >>> read_classes(facts, train, test).classes
        ('teacher',)
    """
    rows = [row for _, row in read_ntriples(facts) if not {row[1], re.split("[/#]", row[1])[-1]} & set(leaks)]
    if not rows:
        raise DataError(facts, "facts", "none")
    graph = KnowledgeGraph.from_labels(dict.fromkeys(rows))
    entities = {name: number for number, name in enumerate(graph.entities)}
    classes: dict[str, int] = {}
    nodes: dict[str, Tensor] = {}
    labels: dict[str, Tensor] = {}
    labeled: set[int] = set()
    for part, file in (("train", train), ("test", test)):
        pairs: list[tuple[int, int]] = []
        for line, entity, label in _labeled(file):
            if part == "train":
                classes.setdefault(label, len(classes))
            for name, known, what in ((entity, entities, "an entity that has a fact"),
                                      (label, classes, "a class of the training entities")):
                if name not in known:
                    raise DataError(file, what, repr(name), line=line)
            if entities[entity] in labeled:
                raise DataError(file, "entities that have one class, in one file", f"{entity!r} again", line=line)
            labeled.add(entities[entity])
            pairs.append((entities[entity], classes[label]))
        nodes[part], labels[part] = torch.tensor(pairs, dtype=torch.int64).unbind(-1)
    return Classes(graph=graph, classes=tuple(classes), nodes=nodes, labels=labels)


def _labeled(path: str | Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, entity and class of each row."""
    lines = read_lines(path)
    head = lines[0].split("\t")
    labels = [place for place, name in enumerate(head) if name.startswith("label")]
    names = [place for place, name in enumerate(head) if place not in labels and name != "id"]
    if len(labels) != 1 or not names:
        raise DataError(path, "a column label... and one of entities", repr(lines[0]), line=1)
    rows = [(number, line.split("\t")) for number, line in enumerate(lines[1:], 2) if line.strip()]
    if not rows:
        raise DataError(path, "entities and their classes after the line of names", "no other line")
    for number, cells in rows:
        if len(cells) != len(head):
            raise DataError(path, f"{len(head)} columns", len(cells), line=number)
        yield number, cells[names[0]], cells[labels[0]]
