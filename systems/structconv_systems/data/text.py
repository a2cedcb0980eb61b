"""Read files of text in UTF-8, plain or gzipped, and hash files: the functions that all readers share."""

import gzip
import hashlib
import json
import zlib
from pathlib import Path
from typing import Any

from structconv.errors import DataError

__all__ = ["decoded", "is_natural", "lines_of", "read_bytes", "read_json", "read_lines", "read_text",
           "sha256_of"]

_GZIP = b"\x1f\x8b"


def read_text(path: str | Path) -> str:
    r"""Read the text of a file in UTF-8, plain or gzipped, recognized by its first two bytes.

    Line ends are unchanged, a byte order mark is removed. Cost: one read of the file.

    Raises:
        DataError: the file is missing or cannot be read, a gzip is truncated, a line (named in the error) is not UTF-8,
            or the text is blank.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.text import read_text
        >>> path = Path(folder.name, "text.txt")
        >>> _ = path.write_text("Ein Satz.\n")
        >>> read_text(path)
        'Ein Satz.\n'
    """
    return decoded(path, read_bytes(path))


def decoded(path: str | Path, content: bytes) -> str:
    """Decode the bytes of a file, as `read_text` does; `path` is its name in errors.

    Raises:
        DataError: the bytes are not UTF-8, or nothing but white space.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before, byte = error.object[:error.start], error.object[error.start]
        raise DataError(path, "text in UTF-8", f"the byte 0x{byte:02x}", line=before.count(b"\n") + 1,
                        remedy="Save it again in UTF-8, or fetch it again.") from None
    if not text.strip():
        raise DataError(path, "text", "white space alone" if text else "an empty file")
    return text


def read_lines(path: str | Path) -> list[str]:
    r"""The lines of a file, as `read_text` reads it, without their ends.

    A line ends with LF or CRLF, as editors and `wc -l` count; other separators of Unicode are part of it.

    Raises:
        DataError: as of `read_text`.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.text import read_lines
        >>> path = Path(folder.name, "text.txt")
        >>> _ = path.write_text("one\ntwo\n")
        >>> read_lines(path)
        ['one', 'two']
    """
    return lines_of(read_text(path))


def lines_of(text: str) -> list[str]:
    """Split a text into lines, as `read_lines` does."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def read_json(path: str | Path) -> Any:
    """The value in a file of JSON, as `read_text` reads it.

    Raises:
        DataError: as of `read_text`, or it is no JSON; the line is named.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> folder = TemporaryDirectory()
        >>> from structconv_systems.data.text import read_json
        >>> path = Path(folder.name, "words.json")
        >>> _ = path.write_text('["one", "two"]')
        >>> read_json(path)
        ['one', 'two']
    """
    text = read_text(path)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(path, "JSON", error.msg, line=error.lineno) from None
    except (RecursionError, ValueError) as error:  # nested too deep, or an integer of too many digits
        raise DataError(path, "JSON", error) from None


def read_bytes(path: str | Path) -> bytes:
    """Return the bytes of a file, unpacked if it is a gzip; `DataError` if it cannot be read or is truncated."""
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        raise DataError(path, "a file", "no such file") from None
    except OSError as error:
        raise DataError(path, "a file that can be read", error.strerror) from None
    if not content.startswith(_GZIP):
        return content
    try:
        return gzip.decompress(content)
    except (EOFError, OSError, zlib.error) as error:
        raise DataError(path, "a whole gzip file", error, remedy="Fetch it again.") from None


def is_natural(text: str) -> bool:
    """Return True for a number 0, 1, ... below 10^18 in plain digits."""
    return text.isascii() and text.isdigit() and len(text) <= 18


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
