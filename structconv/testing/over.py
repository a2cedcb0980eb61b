"""Laws of layers, held by a `Conv` over a mechanism: samples side by side, prepared inputs, outputs at their places."""

from __future__ import annotations

from collections.abc import Callable

from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.testing import batches, decoding
from structconv.testing.calls import Use
from tests.support.layers import layer_over, seeded
from structconv.testing.specimens import Specimen

__all__ = ["check_places", "check_prepared", "check_samples"]


def check_samples(specimen: Specimen) -> None:
    """A batch of two samples of different sizes gives what each gives alone, or is refused."""
    _held(specimen, batches.takes_samples, batches.check_samples)


def check_prepared(specimen: Specimen) -> None:
    """Prepared inputs give what the inputs give, also entry by entry, or are refused."""
    _held(specimen, decoding.takes_prepared, decoding.check_prepared)


def check_places(specimen: Specimen) -> None:
    """Outputs that are told where they stand are those of the whole call, or refuse to be told."""
    _held(specimen, decoding.takes_positions, decoding.check_positions)


def _held(specimen: Specimen, applies: Callable[[Use], bool], check: Callable[[Use], None]) -> None:
    use = seeded(lambda: layer_over(specimen))()
    if not applies(use):
        return
    try:
        check(use)
    except (ConfigError, ShapeError, StructureError):
        return  # said, and so no wrong number
