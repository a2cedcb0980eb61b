"""Reading text files that may be something else."""

from __future__ import annotations

from pathlib import Path

from structconv.errors import StructureError

__all__ = ["read_text"]


def read_text(path: Path, owner: str) -> str:
    """The text of a file in UTF-8.

    Raises:
        StructureError: it has other bytes; the file and the first of them are named.
    """
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise StructureError(owner, f"{path} must be text in UTF-8",
                             f"the byte 0x{content[error.start]:02x} at position {error.start}",
                             "Save it again in UTF-8, or fetch it again.") from None
