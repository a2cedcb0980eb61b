"""Composition of two mechanisms: the inputs of the second are the outputs of the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from structconv.bases.base import Basis
from structconv.errors import StructureError
from structconv.mechanisms.expression import Inputs, Mechanism
from structconv.structures.named import NamedStructures
from structconv.structures.samples import Samples

__all__ = ["behind_first"]


def behind_first(first: Mechanism, second: Mechanism, basis: Callable[[], Basis], inputs: Inputs) -> Inputs:
    """The inputs of the second of two composed mechanisms: its x are the outputs of the first. If these are the entries
    of x or of z, they have their content; others have only a number and a structure, a `StructureError` where the
    second reads content."""
    x, z, structure, projected, *_ = inputs
    own = first._own(structure)
    whose = first._outputs_are(own, x.shape[-2])
    if whose == "x":
        return inputs
    counted = first._output_entries(own)
    count = basis().num_outputs if counted is None else counted
    known = whose == "z" and count == inputs.num_outputs
    if known and z is x:
        return inputs
    structure = _led(first, second, structure, known)
    if known:
        return type(inputs)(z, z, structure, projected and (projected[1], projected[1]))
    if "content" in second.reads:
        raise StructureError("a @ b", "the outputs of a must be entries of x or of z, of which b reads the content",
                             f"{first!r} @ {second!r}", "Make two layers: the second reads what the first gives.")
    x = x.new_zeros(()).expand(*x.shape[:-2], count, x.shape[-1])
    return type(inputs)(x, x, structure)


def _led(first: Mechanism, second: Mechanism, structure: Any, to_z: bool) -> Any:
    """Return the structure (or structures) after the first of two composed mechanisms; its entries may be those of z.
    """
    samples = getattr(structure, "samples", None)
    named = type(structure) is NamedStructures
    led = first._leads(structure)
    if led is structure and samples is not None and (isinstance(led, Samples) or to_z):
        if named:
            led = led._replace(samples=samples.of_outputs())
        elif led is samples or "structure" not in second.reads:
            led = samples.of_outputs()
    return led.at(second._samples_of(led)) if named else led
