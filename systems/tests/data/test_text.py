"""Text files: plain and gzipped, with any ends of lines, and everything that is no text."""

import functools
import gzip
import json

import pytest

from structconv.commands.output import json_text
from structconv.errors import DataError
from structconv_systems.data.text import read_json, read_lines, read_text

zipped = functools.partial(gzip.compress, mtime=0)
TEXT = "Zwei junge weiße Männer\nim Freien\n"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
@pytest.mark.parametrize("pack", [bytes, zipped])
def test_the_content_tells_whether_it_is_gzipped(written, name, pack):
    path = written(name, pack(TEXT.encode()))
    assert read_text(path) == read_text(str(path)) == TEXT
    assert read_lines(path) == ["Zwei junge weiße Männer", "im Freien"]


def test_a_gzip_of_several_parts_is_one_text(written):
    path = written("a.gz", gzip.compress(b"a\n", mtime=0) + gzip.compress(b"b\n"))
    assert read_lines(path) == ["a", "b"]


@pytest.mark.parametrize("text, lines", [
    ("a\nb", ["a", "b"]), ("a\nb\n", ["a", "b"]), ("a\nb\n\n", ["a", "b", ""]), ("a\r\nb\r\n", ["a", "b"]),
    ("\na", ["", "a"]), (" a \n\tb", [" a ", "\tb"]), ("a\rb\n", ["a\rb"]),
    ("a\u2028b\x85c\x0bd\x0ce\x1cf\n", ["a\u2028b\x85c\x0bd\x0ce\x1cf"]),
    ("\ufeffa\n\ufeffb", ["a", "\ufeffb"])])
def test_lines_end_where_editors_say(written, text, lines):
    path = written("a.txt", text.encode())
    assert read_lines(path) == lines


@pytest.mark.parametrize("content, message", [
    (b"", r"a\.txt: expected text; got an empty file\."),
    (zipped(b""), r"a\.txt: expected text; got an empty file\."),
    (b" \n\t\r\n", r"a\.txt: expected text; got white space alone\."),
    (b"a\nb\n\xff", r"a\.txt, line 3: expected text in UTF-8; got the byte 0xff\."),
    (b"\xef\xbb\xbfa\n\xe4\n", r"a\.txt, line 2: expected text in UTF-8; got the byte 0xe4\."),
    (zipped(b"a\n\xfc"), r"a\.txt, line 2: expected text in UTF-8; got the byte 0xfc\."),
    (TEXT.encode("utf-16"), r"a\.txt, line 1: expected text in UTF-8; got the byte 0xff\."),
    (zipped(TEXT.encode())[:-1], r"a\.txt: expected a whole gzip file; got Compressed file ended .* Fetch"),
    (zipped(TEXT.encode())[:5], r"a\.txt: expected a whole gzip file; got Compressed file ended before"),
    (zipped(TEXT.encode()) + b"more", r"a\.txt: expected a whole gzip file; got Not a gzipped file"),
    (zipped(TEXT.encode())[:-8] + bytes(8), r"a\.txt: expected a whole gzip file; got CRC check failed"),
    (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xff\xff\xff", r"a\.txt: expected a whole gzip file; got Error -3")])
def test_what_is_no_text_is_named(written, content, message):
    path = written("a.txt", content)
    for read in (read_text, read_lines, read_json):
        with pytest.raises(DataError, match=message):
            read(path)


def test_what_is_no_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"b\.txt: expected a file; got no such file\."):
        read_text(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"expected a file that can be read; got Is a directory\."):
        read_text(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(DataError, match=r"expected a file that can be read; got Not a directory\."):
        read_text(tmp_path / "a.txt" / "b.txt")


@pytest.mark.parametrize("text, message", [
    ('[1,\n2,\n"a]', r"a\.json, line 3: expected JSON; got Unterminated string"),
    ("{}\n{}", r"a\.json, line 2: expected JSON; got Extra data"),
    ("[" * 100_000, r"a\.json: expected JSON; got .*recursion"),
    ("1" * 5000, r"a\.json: expected JSON; got Exceeds the limit")])
def test_what_is_no_json_is_named(written, text, message):
    path = written("a.json", text)
    with pytest.raises(DataError, match=message):
        read_json(path)


def test_json(written):
    path = written("a.json", '{"a": [1, "ß"]}')
    assert read_json(path) == {"a": [1, "ß"]}


def test_json_knows_no_number_that_is_not_finite():
    actual = json_text({"a": float("nan"), "b": [float("inf"), 1.5, (-float("inf"), True, "NaN")], "c": {"d": 2}})
    assert json.loads(actual, parse_constant=pytest.fail) == {"a": None, "b": [None, 1.5, [None, True, "NaN"]],
                                                             "c": {"d": 2}}
