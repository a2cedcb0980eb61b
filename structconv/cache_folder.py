"""The cache folder of the package: measured rates and times, as JSON files, and built kernels."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

__all__ = ["cache_folder", "read_json", "write_json"]


def cache_folder() -> Path:
    """`$STRUCTCONV_CACHE`, else `$XDG_CACHE_HOME/structconv`, else `~/.cache/structconv`; not created here. For a
    user without a home it is a path that can neither be read nor written."""
    own = os.environ.get("STRUCTCONV_CACHE")
    if own:
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "structconv"
    except RuntimeError:  # a user without a home
        return Path(os.devnull) / "structconv"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file; a `ValueError` for something else."""
    try:
        result = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(result, dict):
        raise ValueError(f"{path} holds no JSON object")
    return result


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write beside, flush, then rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as handle:
        json.dump(content, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(handle.name, path)
