"""Files that are written atomically, and the cache folder of the package.

After a crash the old or the new file is there, never a part.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "flush_folder", "read_json", "write_atomically", "write_flushed", "write_json"]


def write_flushed(path: Path, content: bytes) -> None:
    """Write a file and wait until the disk has it; an error, for example of a full disk, names the file."""
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


def cache_folder() -> Path:
    """The folder of measured rates and times, and of built kernels; not created here.

    `$STRUCTCONV_CACHE`, else `$XDG_CACHE_HOME/structconv`, else `~/.cache/structconv`. For a user without a home it
    is a path that can neither be read nor written.
    """
    own = os.environ.get("STRUCTCONV_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "structconv"
    except RuntimeError:  # a user without a home
        return Path(os.devnull) / "structconv"


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file, empty if there is no file; `ValueError` if it holds something else."""
    try:
        result = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(result, dict):
        raise ValueError(f"{path} holds no JSON object")
    return result


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object beside `path`, in a file that no other process writes, flush, then rename over it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as handle:
        json.dump(content, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(handle.name, path)
