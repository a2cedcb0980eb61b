"""Laws of layers, checked with a `Conv` over a mechanism: batches, prepared inputs, positions of outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.mechanisms.given import Given
from structconv.nn.conv import Conv
from structconv.testing import batches, decoding
from structconv.testing.checks import F64, with_batch
from structconv.testing.specimens import Setup, Specimen, mapped, random_numbers
from structconv.testing.use import Use

__all__ = ["Make", "check_output_positions", "check_prepared", "check_samples", "layer_over", "seeded", "use"]

Make = Callable[[], Use]
P, Q = 4, 3


def check_samples(specimen: Specimen) -> None:
    """A batch of two samples of different sizes gives what each gives by itself, or is refused."""
    _check(specimen, batches.takes_samples, batches.check_samples)


def check_prepared(specimen: Specimen) -> None:
    """Cache inputs give what the inputs give, also entry by entry, or are refused."""
    _check(specimen, decoding.takes_prepared, decoding.check_prepared)


def check_output_positions(specimen: Specimen) -> None:
    """Check that outputs at given positions equal those of the whole call, or that the layer refuses positions."""
    _check(specimen, decoding.takes_positions, decoding.check_positions)


def _check(specimen: Specimen, applies: Callable[[Use], bool], check: Callable[[Use], None]) -> None:
    use_of_layer = seeded(lambda: layer_over(specimen))()
    if not applies(use_of_layer):
        return
    try:
        check(use_of_layer)
    except (ConfigError, ShapeError, StructureError):
        return  # said, and so no wrong number


def use(layer: nn.Module, *args: Any, **kwargs: Any) -> Use:
    """A use of a layer in float64, whose parameters are no zeros and whose floating arguments want a gradient."""
    layer = layer.to(F64)
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.any():
                parameter.normal_()
    return Use(layer, args, kwargs).mapped(lambda t: t.requires_grad_() if t.is_floating_point() else t)


def seeded(make: Make) -> Make:
    """Return a function that draws equal random numbers in each call."""
    def again() -> Use:
        with random_numbers(0):
            return make()

    return again


def layer_over(specimen: Specimen) -> Use:
    """A `Conv` over a specimen's mechanism, or over its basis as a user's mechanism."""
    subject = specimen.subject()
    if isinstance(subject, Setup):
        other = None if subject.z is None else subject.z.shape[-1]
        conv = Conv(subject.mechanism, subject.x.shape[-1], Q, other_channels=other)
        return use(conv, subject.x, subject.structure, **({} if subject.z is None else {"z": subject.z}))
    lead = with_batch(subject)
    return use(Conv(Given(mapped(subject, nn.Parameter)), P, Q), torch.randn(*lead, subject.num_inputs, P, dtype=F64))
