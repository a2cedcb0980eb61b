"""Results for programs."""

from __future__ import annotations

from typing import Any

from structconv_systems.data.text import json_text

__all__ = ["print_json"]


def print_json(value: dict[str, Any]) -> None:
    """One object on one line; a number that is not finite is null."""
    print(json_text(value), flush=True)
