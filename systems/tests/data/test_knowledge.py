"""Knowledge graphs: the real ones, archives that are read without being unpacked, and every line that is wrong."""

import gzip
import io
import tarfile

import pytest
import torch

from structconv.errors import ConfigError, DataError
from structconv_systems.data.knowledge import read_classes, read_ntriples, read_triples

TRAIN, VALID, TEST = "a\tlikes\tb\nb\tknows\tc c\n\n", "c c likes a\n".replace("c c", "b"), "b\tlikes\tc c\n"


def write(folder, **parts):
    for name, text in parts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return folder


def archive(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text.encode())
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


def test_kinship_has_its_published_counts(real):
    data = read_triples(real("kg/kinship.tar.gz"))
    assert repr(data) == "Triples(104 entities, 25 relations, 8544 train, 1068 valid, 1074 test)"
    assert len(torch.cat(list(data.parts.values())).unique(dim=0)) == 8544 + 1068 + 1074
    assert data.graph().num_triples == 8544
    assert (data.entities[0], data.relations[0]) == ("person100", "term6")


def test_aifb_has_its_published_counts(real):
    folder = real("kg/aifb")
    data = read_classes(folder / "aifb_stripped.nt.gz", folder / "trainingSet.tsv", folder / "testSet.tsv",
                        leaks=("affiliation", "employs"))
    assert (data.graph.num_triples, data.graph.num_entities, data.graph.num_relations) == (29_043, 8_285, 45)
    assert {part: len(nodes) for part, nodes in data.nodes.items()} == {"train": 140, "test": 36}
    assert data.labels["test"].bincount().tolist() == [15, 12, 6, 3]
    assert not [name for name in data.graph.relations if name.endswith(("affiliation", "employs"))]


def test_a_folder_and_an_archive_of_it_hold_the_same(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write(folder, train=TRAIN, valid=VALID)
    (folder / "test.txt.gz").write_bytes(gzip.compress(TEST.encode()))
    path = archive(tmp_path / "a.tar.gz", {"deep/down/train.txt": TRAIN, "deep/down/dev.tsv": VALID, "test": TEST})
    for data in (read_triples(folder), read_triples(path)):
        assert (data.entities, data.relations) == (("a", "b", "c c"), ("likes", "knows"))
        assert {part: rows.tolist() for part, rows in data.parts.items()} == {
            "train": [[0, 0, 1], [1, 1, 2]], "valid": [[1, 0, 0]], "test": [[1, 0, 2]]}
        assert data.graph(data.parts["test"]).num_triples == 1


def test_an_archive_is_not_unpacked_and_its_links_are_not_followed(tmp_path, monkeypatch):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("../../valid.txt", "/etc/test.txt"):
            info = tarfile.TarInfo(name)
            info.size = len(TEST)
            tar.addfile(info, io.BytesIO(TEST.encode()))
        link = tarfile.TarInfo("train.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    inner = tmp_path / "inner"
    inner.mkdir()
    monkeypatch.chdir(inner)
    with pytest.raises(DataError, match=r"a\.tar: expected one file train\.txt; got none"):
        read_triples(path)
    assert not list(inner.iterdir())
    assert sorted(tmp_path.iterdir()) == [path, inner]


def test_a_torn_archive_and_none(tmp_path):
    train = 500 * f"{TRAIN.strip()}\n"
    path = archive(tmp_path / "a.tar.gz", {"train.txt": train, "valid.txt": VALID, "test.txt": TEST})
    whole = path.read_bytes()
    for cut in (0, 20, len(whole) // 2, len(whole) - 12):
        path.write_bytes(whole[:cut])
        with pytest.raises(DataError, match=r"a\.tar\.gz: expected "):
            read_triples(path)
    path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="expected a folder, or a whole tar archive"):
        read_triples(path)
    with pytest.raises(DataError, match="got no such file"):
        read_triples(tmp_path / "none")


@pytest.mark.parametrize(("parts", "said"), [
    ({"train": "a\tlikes\n"}, r"train\.txt, line 1: expected three columns: head, relation, tail; got 'a\\tlikes'"),
    ({"train": TRAIN.strip() + "\na b\n"}, r"train\.txt, line 3: expected three columns"),
    ({"train": "a b c d\n"}, r"train\.txt, line 1: expected three columns"),
    ({"valid": "a\t\tb\n"}, r"valid\.txt, line 1: expected three columns"),
    ({"test": "a likes zoe\n"}, r"test\.txt, line 1: expected an entity that some training triple has; got 'zoe'"),
    ({"test": "\na likes b\n"}, r"test\.txt, line 1: expected three columns"),
    ({"valid": "a hates b\n"}, r"valid\.txt, line 1: expected a relation that some training triple has; got 'hates'"),
    ({"test": ""}, r"test\.txt: expected text; got an empty file")])
def test_a_wrong_line_is_named(tmp_path, parts, said):
    with pytest.raises(DataError, match=said):
        read_triples(write(tmp_path, **{"train": TRAIN, "valid": VALID, "test": TEST, **parts}))


def test_names_that_training_lacks_can_be_admitted(tmp_path):
    folder = write(tmp_path, train=TRAIN, valid=VALID, test="zoe hates a\n")
    data = read_triples(folder, unseen="admit")
    assert data.entities[3:] == ("zoe",)
    assert data.parts["test"].tolist() == [[3, 2, 0]]
    with pytest.raises(ConfigError, match="unseen must be one of 'error', 'admit'"):
        read_triples(folder, unseen="skip")


def test_a_part_that_is_missing_or_twice_there(tmp_path):
    write(tmp_path, train=TRAIN, test=TEST)
    with pytest.raises(DataError, match=r"expected one file valid\.txt; got none"):
        read_triples(tmp_path)
    write(tmp_path, valid=VALID, dev=VALID)
    with pytest.raises(DataError, match=r"expected one file valid\.txt; got .*valid\.txt, .*dev\.txt"):
        read_triples(tmp_path)


NUMBERS = {"entity2id": "2\nanna b\t0\nbob\t1\n", "relation2id": "1\nlikes\t0\n", "train2id": "1\n0 1 0\n",
           "valid2id": "1\n1 0 0\n", "test2id": "1\n1 1 0\n"}


def test_triples_of_numbers(tmp_path):
    data = read_triples(write(tmp_path, **NUMBERS))
    assert (data.entities, data.relations) == (("anna b", "bob"), ("likes",))
    assert [rows.tolist() for rows in data.parts.values()] == [[[0, 0, 1]], [[1, 0, 0]], [[1, 0, 1]]]


@pytest.mark.parametrize(("parts", "said"), [
    ({"test2id": "1\n0 2 0\n"}, r"test2id\.txt, line 2: expected entities below 2; got 2"),
    ({"test2id": "1\n0 1 1\n"}, r"test2id\.txt, line 2: expected a relation below 1; got 1"),
    ({"test2id": "1\n0 1 -1\n"}, r"test2id\.txt, line 2: expected 3 columns that end in a number"),
    ({"test2id": "1\nx 1 0\n"}, r"test2id\.txt, line 2: expected three numbers: head, tail, relation"),
    ({"test2id": "2\n0 1 0\n"}, r"test2id\.txt, line 1: expected 2 lines after the first, as it says; got 1"),
    ({"test2id": "0 1 0\n"}, r"test2id\.txt, line 1: expected the number of lines that follow"),
    ({"entity2id": "2\na\t0\nb\t2\n"}, r"entity2id\.txt: expected the numbers 0 to 1; got one up to 2"),
    ({"test2id": "0\n"}, r"test2id\.txt: expected triples; got none"),
    ({"test2id": "2\n0 1 0\n\n0 9 0\n"}, r"test2id\.txt, line 4: expected entities below 2; got 9"),
    ({"test2id": f"{'1' * 5000}\n0 1 0\n"}, r"test2id\.txt, line 1: expected the number of lines that follow"),
    ({"entity2id": "2\na\t0\na\t1\n"}, r"entity2id\.txt, line 3: expected names and numbers that come once")])
def test_a_wrong_number_is_named(tmp_path, parts, said):
    with pytest.raises(DataError, match=said):
        read_triples(write(tmp_path, **{**NUMBERS, **parts}))


def test_a_part_of_numbers_that_is_missing(tmp_path):
    write(tmp_path, **NUMBERS)
    (tmp_path / "valid2id.txt").unlink()
    with pytest.raises(DataError, match=r"expected a file valid2id\.txt beside entity2id\.txt; got none"):
        read_triples(tmp_path)


FACTS = """# people
<http://x/a> <http://x#worksIn> <http://x/g1> .
<http://x/b> <http://x#worksIn> <http://x/g2> . # twice
<http://x/b> <http://x#worksIn> <http://x/g2> .
<http://x/a> <http://x#name> "A \\"B\\" . C"@en .
_:n <http://x/age> "7"^^<http://www.w3.org/2001/XMLSchema#int> .

<http://x/a> <http://x#label> "g1" .
"""
HEAD = "person\tid\tlabel_group\n"
ROWS = {"facts": FACTS, "train": f"{HEAD}http://x/a\t1\tg1\n", "test": f"{HEAD}http://x/b\t2\tg1\n\n"}


def classes(folder, **parts):
    write(folder, **{**ROWS, **parts})
    return read_classes(*(folder / f"{name}.txt" for name in ROWS), leaks=("label",))


def test_rdf_is_read_without_what_tells_the_class(tmp_path):
    data = classes(tmp_path)
    assert data.graph.relations == ("http://x#worksIn", "http://x#name", "http://x/age")
    assert data.graph.num_triples == 4
    assert '"A \\"B\\" . C"@en' in data.graph.entities
    assert {part: [data.graph.entities[node] for node in nodes] for part, nodes in data.nodes.items()} == {
        "train": ["http://x/a"], "test": ["http://x/b"]}
    assert data.classes == ("g1",) and repr(data).endswith("1 classes, 1 train, 1 test)")
    assert [line for line, _ in read_ntriples(tmp_path / "facts.txt")] == [2, 3, 4, 5, 6, 8]


@pytest.mark.parametrize(("parts", "said"), [
    ({"facts": "<a> <b> .\n"}, r"facts\.txt, line 1: expected a statement <subject> <predicate> object \.; got '<a>"),
    ({"facts": FACTS + "<a> <b> <c>\n"}, r"facts\.txt, line 9: expected a statement"),
    ({"facts": '<a> <b> "open .\n'}, r"facts\.txt, line 1: expected a statement"),
    ({"facts": "<a> <x/label> <c> .\n"}, r"facts\.txt: expected facts; got none"),
    ({"train": f"{HEAD}http://x/z\t1\tg1\n"}, r"train\.txt, line 2: expected an entity that has a fact; got 'http://x/z'"),
    ({"test": f"{HEAD}http://x/b\t1\tg7\n"}, r"test\.txt, line 2: expected a class of the training entities; got 'g7'"),
    ({"test": f"{HEAD}http://x/a\t1\tg1\n"}, r"test\.txt, line 2: expected entities that have one class, in one file"),
    ({"test": f"{HEAD}http://x/b\tg1\n"}, r"test\.txt, line 2: expected 3 columns; got 2"),
    ({"test": "person\tid\tgroup\nhttp://x/b\t1\tg1\n"}, r"test\.txt, line 1: expected a column label\.\.\. and"),
    ({"test": HEAD}, r"test\.txt: expected entities and their classes after the line of names; got no other line")])
def test_a_wrong_statement_or_class_is_named(tmp_path, parts, said):
    with pytest.raises(DataError, match=said):
        classes(tmp_path, **parts)


def test_iris_may_have_escapes(written):
    path = written("a.nt", r"<http://e.org/caf\u00E9> <http://e.org/p> <http://e.org/\U0001F600> ." + "\n")
    [(_, row)] = read_ntriples(path)
    assert row[0] == r"http://e.org/caf\u00E9"
