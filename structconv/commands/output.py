"""Results for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

__all__ = ["json_text", "print_json"]


def print_json(value: dict[str, Any]) -> None:
    """Print an object on one line; a number that is not finite is null."""
    print(json_text(value), flush=True)


def json_text(value: Any, indent: int | None = None) -> str:
    """Return a value as JSON, which has finite numbers only: others are null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
