"""Results for programs."""

from __future__ import annotations

import json
from typing import Any

__all__ = ["print_json"]


def print_json(value: dict[str, Any]) -> None:
    """One object on one line."""
    print(json.dumps(value), flush=True)
