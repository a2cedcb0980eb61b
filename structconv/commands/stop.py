"""The exception that ends a verb early, with its exit code."""

from __future__ import annotations

from typing import Any

__all__ = ["Stop"]


class Stop(Exception):
    """A verb stops: the command prints the message and leaves with `exit_code`, which derived classes or objects set;
    `details` are further keys of the object that `--json` prints."""

    exit_code: int = 1

    @property
    def details(self) -> dict[str, Any]:
        """Further keys for `--json`."""
        return {}
