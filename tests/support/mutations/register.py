"""The register of changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from structconv.testing.use import Use

__all__ = ["MUTATIONS", "Mutation", "always", "mutation"]


@dataclass(frozen=True)
class Mutation:
    """A change by its name, what it does and holds the layer to, and which layers it is for."""

    name: str
    check: Callable[[Use], None]
    concerns: Callable[[Use], bool]


#: Every change by its name.
MUTATIONS: dict[str, Mutation] = {}


def always(use: Use) -> bool:
    """Concerns every layer."""
    return True


def mutation(concerns: Callable[[Use], bool] = always) -> Callable[[Callable[[Use], None]], Callable[[Use], None]]:
    """Enter the decorated function under its own name."""
    def enter(check: Callable[[Use], None]) -> Callable[[Use], None]:
        name = check.__name__
        MUTATIONS[name] = Mutation(name, check, concerns)
        return check

    return enter
