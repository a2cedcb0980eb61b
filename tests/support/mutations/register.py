"""The register of changes."""

from collections.abc import Callable
from typing import NamedTuple

from structconv.testing.use import Use


class Mutation(NamedTuple):
    """What a change does and holds the layer to, and which layers it is for."""

    check: Callable[[Use], None]
    concerns: Callable[[Use], bool]


#: Every change by its name.
MUTATIONS: dict[str, Mutation] = {}


def mutation(concerns: Callable[[Use], bool] = lambda use: True) -> Callable[[Callable[[Use], None]],
                                                                             Callable[[Use], None]]:
    """Enter the decorated function under its own name."""
    def enter(check: Callable[[Use], None]) -> Callable[[Use], None]:
        MUTATIONS[check.__name__] = Mutation(check, concerns)
        return check

    return enter
