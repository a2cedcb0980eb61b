"""JSON files in the user's cache folder, written atomically."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from structconv.cache_folder import cache_folder

__all__ = ["cache_folder", "read", "write"]


def read(path: Path) -> dict[str, Any]:
    """The object in a file, empty where there is no file; a `ValueError` for something else."""
    try:
        result = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    if not isinstance(result, dict):
        raise ValueError(f"{path} holds no JSON object")
    return result


def write(path: Path, content: dict[str, Any]) -> None:
    """Write beside, flush, then rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".json", delete=False) as handle:
        json.dump(content, handle, indent=1)
        handle.flush()
        os.fsync(handle.fileno())
    os.replace(handle.name, path)
