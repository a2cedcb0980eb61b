"""What the verbs share: results for programs, and refusing what they do not know."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

__all__ = ["no_more", "print_json"]


def print_json(value: dict[str, Any]) -> None:
    """One object on one line."""
    print(json.dumps(value), flush=True)


def no_more(verb: str, rest: Sequence[str]) -> None:
    """Raise `ConfigError` if the command line has arguments that the verb does not know."""
    if rest:
        from structconv.errors import ConfigError

        raise ConfigError(f"structconv {verb}", "every argument must be known", " ".join(rest),
                          f"See structconv {verb} --help.")
