"""The cache folder of the package: measured rates and times, and built kernels."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["cache_folder"]


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
