"""The suites: what is compared, a module each; nothing is built before a case is run."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.case import Case
    from benchmarks.runner import Probe

__all__ = ["SUITES", "cases"]

SUITES = ("grid", "graph", "attention", "windows", "relational", "messages", "planner", "dispatch",
          "new-graphs", "decode", "precision", "models", "compat", "sampling")


def cases(suite: str) -> tuple[Case | Probe, ...]:
    """The cases of one suite."""
    return tuple(import_module(f"{__name__}.{suite.replace('-', '_')}").CASES)
