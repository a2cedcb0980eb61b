"""Damaged files: a reader reads whatever bytes it is given or raises `DataError`; what is saved is whole or old."""

import gzip
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from structconv.errors import DataError
from structconv_systems.data.characters import Alphabet, read_characters
from structconv_systems.data.conllu import read_conllu
from structconv_systems.data.idx import read_idx
from structconv_systems.data.parallel import read_parallel
from structconv_systems.data.sensors import read_locations
from structconv_systems.data.series import read_series
from structconv_systems.data.subwords import Subwords
from structconv_systems.data.words import Vocabulary

TREE = """# text = Dogs don't run
1\tDogs\tdog\tNOUN\tNNS\tNumber=Plur\t4\tnsubj\t_\t_
2-3\tdon't\t_\t_\t_\t_\t_\t_\t_\t_
2\tdo\tdo\tAUX\tVB\t_\t4\taux\t_\t_
3\tn't\tnot\tPART\tRB\t_\t4\tadvmod\t_\t_
4\trun\trun\tVERB\tVB\t_\t0\troot\t_\t_
4.1\trun\trun\t_\t_\t_\t_\t_\t_\t_

1\tß\t_\tX\t_\t_\t0\troot\t_\t_
"""
READINGS, ADJACENCY = 'a,"b, c",d\n1.5,,-2e3\nnan,0,4\n', "1,0,0.5\n0,1,0\n0.5,0,1\n"
PLACES = "sensor_id,latitude,longitude\na,34.1,-118\nb,33,-117.5\n"


def parallel(folder, content):
    (folder / "a.en").write_bytes(content)
    (folder / "a.de").write_text("ein Hund\nzwei Hunde\n")
    return read_parallel(folder / "a", "en", "de")


def adjacency(folder, content):
    (folder / "a.csv").write_text(READINGS)
    (folder / "adjacency.csv").write_bytes(content)
    return read_series(folder / "a.csv", folder / "adjacency.csv")


def of_file(read):
    def reader(folder, content):
        path = folder / "file"
        path.write_bytes(content)
        return read(path)
    return reader


NUMBERS = "\0\0\x08\x02\0\0\0\x02\0\0\0\x03abcdef"

#: By name a reader of bytes, and bytes that it reads.
READERS = {
    "parallel": (parallel, "one dög\ntwo dogs\n"), "characters": (of_file(read_characters), "To be, or not tö be\n"),
    "alphabet": (of_file(Alphabet.load), '"abc\\n\\u00df"\n'), "conllu": (of_file(read_conllu), TREE),
    "idx": (of_file(lambda path: read_idx(path).numel()), NUMBERS),
    "series": (of_file(read_series), READINGS), "adjacency": (adjacency, ADJACENCY),
    "locations": (of_file(lambda path: [read_locations(path, ("a", "b"))]), PLACES),
    "vocabulary": (of_file(Vocabulary.load), '["a", "\\u00df"]\n'),
    "subwords": (of_file(Subwords.load), '[\n["a", "b"],\n["ab", "c"]\n]\n')}


@st.composite
def damaged(draw, whole):
    """Bytes cut off, lost, changed, or put in; as they are or gzipped before."""
    content = gzip.compress(whole, mtime=0) if draw(st.booleans()) else whole
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        end = draw(st.sampled_from([start, min(start + 1, len(content)), len(content)]))
        piece = draw(st.binary(max_size=4) | st.sampled_from(
            [b"", b"\n", b"\n\n", b"\t", b",", b'"', b"0", b"99", b"-", b".", b"\r", b"\x00", b"[", b"]", b"\\", b"nan",
             content[:start]]))
        content = content[:start] + piece + content[end:]
    return gzip.compress(content, mtime=0) if draw(st.booleans()) else content


@pytest.mark.parametrize("name", READERS)
def test_a_whole_file_is_read(name, tmp_path):
    read, text = READERS[name]
    for content in (text.encode(), gzip.compress(text.encode(), mtime=0)):
        assert read(tmp_path, content)


@pytest.mark.parametrize("name", READERS)
def test_every_truncation_is_read_or_named(name, tmp_path):
    read, text = READERS[name]
    whole = text.encode()
    for content in [whole[:size] for size in range(len(whole))]:
        assert is_read_or_named(read, tmp_path, content)
    zipped = gzip.compress(whole, mtime=0)
    for size in range(2, len(zipped), 3):
        with pytest.raises(DataError, match="expected a whole gzip file"):
            read(tmp_path, zipped[:size])


@pytest.mark.parametrize("name", READERS)
@settings(max_examples=80)
@given(data=st.data())
def test_damage_is_read_or_named(name, data, tmp_path_factory):
    read, text = READERS[name]
    content = data.draw(damaged(text.encode()) | st.binary(max_size=50))
    folder = tmp_path_factory.getbasetemp() / f"damaged-{name}"
    folder.mkdir(exist_ok=True)
    assert is_read_or_named(read, folder, content)


def is_read_or_named(read, folder, content):
    try:
        read(folder, content)
    except DataError as error:
        return str(error).startswith(str(folder)) and "; got " in str(error)
    return True


@pytest.mark.parametrize("first, second", [
    (Alphabet("ab"), Alphabet("abc")), (Vocabulary(("a",)), Vocabulary(("b",))),
    (Subwords(()), Subwords((("a", "b"),)))], ids=["alphabet", "vocabulary", "subwords"])
def test_a_save_that_fails_leaves_the_old_file(first, second, tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    first.save(path)

    def fails(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="disk is full"):
        second.save(path)
    assert type(first).load(path) == first
