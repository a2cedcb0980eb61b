"""The register of changes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from structconv.testing.use import Use

__all__ = ["MUTATIONS", "Check", "Mutation", "always", "mutation", "mutations"]

Make = Callable[[], Use]


@dataclass(frozen=True)
class Mutation:
    """A change by its name, what it does and holds the layer to, and which layers it is for."""

    name: str
    check: Callable[[Use], None]
    concerns: Callable[[Use], bool]


@dataclass(frozen=True)
class Check:
    """One change of one layer; calling it raises `AssertionError` where the layer fails."""

    mutation: Mutation
    make: Make

    def __call__(self) -> None:
        self.mutation.check(self.make())

    def __str__(self) -> str:
        return self.mutation.name


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


def mutations(make: Make, names: Collection[str] | None = None) -> Iterator[Check]:
    """The changes that concern a layer, which `make` makes anew, with its arguments, for each of them.

    Args:
        names: which changes; all of them where absent.
    """
    use = make()
    for each in MUTATIONS.values():
        if (names is None or each.name in names) and each.concerns(use):
            yield Check(each, make)
