"""Write files atomically: after a crash the old or the new file is there, never a part."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["flush_folder", "write_atomically", "write_flushed"]


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it; an error, of a full disk say, names the file."""
    try:
        with open(path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def flush_folder(folder: Path) -> None:
    """Wait until the disk has a folder's entries (renames are kept after a power cut)."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, content: bytes | str) -> Path:
    """Write beside `path`, flush, then rename over it."""
    beside = path.with_name(f".{path.name}.partial")
    write_flushed(beside, content.encode() if isinstance(content, str) else content)
    os.replace(beside, path)
    flush_folder(path.parent)
    return path
