"""The arguments of a call of `Conv`: their checks, several x by name, and nested tensors (torch.jagged), whose
sequences are the samples of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from structconv.errors import ConfigError, ShapeError, StructureError, text_of
from structconv.mechanisms.expression import Mechanism, check_mechanism
from structconv.mechanisms.naming import all_named, by_name, called_on, called_with, check_structure, names_of_x
from structconv.nn.images import to_entries
from structconv.planning.precision import autocast_dtype, cast
from structconv.shapes import check_alike, check_entries, check_leads, check_positive, check_tensor, leads_fit
from structconv.structures.samples import Samples, same_samples
from structconv.structures.supports import Support
from structconv.structures.values import FrozenValue

__all__ = ["CallNames", "Several", "channels_of", "check_by_name", "check_inputs", "check_named",
           "check_output_positions", "fits", "has_sizes", "is_nested", "other_outputs", "packed", "structures_of",
           "unpacked", "x_by_name"]

#: x, or several by name.
Several = Tensor | dict[str, Tensor]


class CallNames(NamedTuple):
    """The names in errors: of a layer, of x and z, of a call with both, and of a call with a structure."""

    owner: str
    x: str
    z: str
    call: str
    structured: str


def channels_of(mechanism: Mechanism, channels: Any) -> Any:
    """Return P, or the P of each x by name for a mixture."""
    names = all_named(mechanism) if mechanism._reads_by_name else names_of_x(mechanism)
    if isinstance(channels, Mapping):
        if None in names:
            raise ConfigError("Conv", "in_channels must be a number, for no part of the mechanism names an x",
                              repr(dict(channels)), "Parts of | have names by expression.of(NAME).")
        by: Mapping[str, int] = by_name("Conv", "in_channels", filter(None, names), channels)
        counts = {name: check_positive("Conv", f"in_channels[{name!r}]", own) for name, own in by.items()}
        return counts if mechanism._reads_by_name else next(iter(counts.values()))
    count: int = check_positive("Conv", "in_channels", channels)
    return dict.fromkeys(filter(None, names), count) if mechanism._reads_by_name else count


def x_by_name(layer: Any, x: Any) -> Any:
    """Return x as the mechanism of a layer needs it; see `called_on`."""
    if "_reads" not in layer.mechanism.__dict__:
        check_mechanism(type(layer).__name__, layer.mechanism)
    return called_on(layer.mechanism, x)


def structures_of(mechanism: Mechanism, structure: Any, axes: int) -> Any:
    """The structure of a call, or its structures by name."""
    structures = called_with(mechanism, None if axes and type(structure) is not dict else structure)
    if axes and type(structure) is dict:
        raise ConfigError("Conv", "an image must have no structure beside its grid", ", ".join(map(repr, structure)),
                          "Call it on entries: layer(x, structure={name: Grid((H, W)), ...}).")
    return structures


def has_sizes(t: Tensor, entries: int | None, channels: int) -> bool:
    """Return True if a tensor has this number of entries, if given, and of channels."""
    return t.dim() > 1 and entries in (None, t.shape[-2]) and channels == t.shape[-1]


def check_inputs(layer: Any, x: Any, z: Tensor | None, structure: Any, axes: int) -> None:
    """Raise an error that says which argument of a call does not fit."""
    check_mechanism(type(layer).__name__, layer.mechanism)
    x = x_by_name(layer, x) if type(x) is dict else x
    if type(x) is dict:
        check_by_name(layer, x, z, structure, axes)
        return
    if any(isinstance(t, Tensor) and t.is_nested for t in (x, z)):  # in any layout
        unpacked(layer, x, z, structure)
    owner, of_x, of_z, _, structured = layer._names(z)
    owner = type(layer).__name__ if is_compiling() else owner  # nothing is renamed on the way out of a compiler
    hint = f"Give the structure after it: {structured}." if isinstance(x, FrozenValue) else ""
    check_tensor(owner, of_x, x, hint)
    if axes:
        x, structure = to_entries(x, axes)
    dtype = autocast_dtype(x)
    x = cast(x, dtype)
    if z is not None:
        check_tensor(owner, of_z, z)
        _check_order(layer, x, z, structure)
    check_entries(owner, x, entries=layer.mechanism._input_entries(structure), channels=layer.in_channels, name=of_x)
    if z is not None:
        check_entries(owner, z, channels=layer.other_channels, name=of_z, letters=("N", "P'"))
        check_alike(owner, x, cast(z, dtype), name=of_x, other_name=of_z)
        if not axes:
            check_leads(owner, x, z, name=of_x, other_name=of_z)
    numbers = next(iter(layer.weight.parameters()), None)
    numbers = next(layer.parameters(), None) if numbers is None else numbers
    if numbers is not None:
        check_alike(owner, x, cast(numbers, dtype), name=of_x, other_name="the layer's parameters")


def _check_order(layer: Any, x: Tensor, z: Tensor, structure: Any) -> None:
    """Raise an error if x and z are swapped: if each fits only in the place of the other."""
    inputs = layer.mechanism._input_entries(structure), layer.in_channels
    outputs = layer.mechanism._output_entries(structure), layer.other_channels
    right = has_sizes(x, *inputs) and has_sizes(z, *outputs)
    if not right and has_sizes(x, *outputs) and has_sizes(z, *inputs):
        owner, of_x, of_z, call, _ = layer._names(z)
        expected = (f"{of_x} must be the inputs (keys), with P={inputs[1]} channels, and {of_z} the outputs "
                    f"(queries), with P'={outputs[1]}")
        raise ShapeError(owner, expected, f"{text_of(x.shape)} and {text_of(z.shape)}",
                         f"They are swapped: write {call}.")


def check_by_name(layer: Any, x: dict[str, Tensor], z: Tensor | None, structure: Any, axes: int) -> None:
    """Raise an error that says which argument of a call of a mixture does not fit, with the name of the x."""
    if axes:
        raise ConfigError("Conv", "an image must be the only x", ", ".join(map(repr, x)),
                          "Call it on entries, (..., M, P).")
    first = next(iter(x))
    for name, own in x.items():
        check_tensor("Conv", f"x[{name!r}]", own)
        check_entries("Conv", own, channels=layer.in_channels[name], name=f"x[{name!r}]")
        _check_alike(own, x[first], name, f"x[{first!r}]")
        check_leads("Conv", x[first], own)
    numbers = next(layer.parameters(), None)
    if numbers is not None:
        _check_alike(x[first], numbers, first, "the layer's parameters")
    if z is not None:
        _check_z(layer, x, z)
    elif not isinstance(layer.other_channels, Mapping):
        raise ShapeError("Conv", f"z must be given, with shape (..., N, P'={layer.other_channels})", "none",
                         "Without other_channels the z of a part is the x that it reads.")
    _check_entries(layer, x, z, structure)


def _check_alike(x: Tensor, other: Tensor, name: str, other_name: str) -> None:
    """Raise an error if dtype or device differ, after autocast."""
    dtype = autocast_dtype(x)
    check_alike("Conv", cast(x, dtype), cast(other, dtype), name=f"x[{name!r}]", other_name=other_name)


def _check_z(layer: Any, x: dict[str, Tensor], z: Tensor) -> None:
    """Raise an error if z does not have the channels of the parts that read it."""
    check_tensor("Conv", "z", z)
    counts = layer.other_channels
    if isinstance(counts, Mapping):
        parts = layer.mechanism._branches()
        reading = {counts[name] for part, name in zip(parts, names_of_x(layer.mechanism), strict=True)
                   if "content" in part.reads}
        if len(reading) > 1:
            raise ConfigError("Conv", "other_channels must be given for a z that parts with different x read",
                              f"P'={z.shape[-1]} for {sorted(reading)}", "Say Conv(..., other_channels=P').")
        counts = next(iter(reading), None)
    check_entries("Conv", z, channels=counts, name="z", letters="NP")
    for name, own in x.items():
        _check_alike(own, z, name, "z")
        check_leads("Conv", own, z)


def _check_entries(layer: Any, x: dict[str, Tensor], z: Tensor | None, structure: Any) -> None:
    """Raise an error if an x does not have the entries of its part's structure, or parts differ in their outputs."""
    outputs = []
    for part, name, own in _parts(layer.mechanism, structure):
        check_entries("Conv", x[name], entries=part._input_entries(own), name=f"x[{name!r}]")
        count = part._output_entries(own)
        outputs.append((x[name] if z is None else z).shape[-2] if count is None else count)
    if any(count != outputs[0] for count in outputs):
        counts = zip(outputs, layer.mechanism._branches(), strict=True)
        raise ShapeError("Conv", "all parts of | must have the same outputs N",
                         " and ".join(f"N={count} of {part!r}" for count, part in counts))


def fits(layer: Any, x: dict[str, Tensor], structure: Any) -> bool:
    """Return True if each x matches its channels, the dtype of the others and the structure's entries. Runs in each
    call."""
    for part, name, own in [] if structure is None else _parts(layer.mechanism, structure):
        expected = part._input_entries(own)
        if expected is not None and expected != x[name].shape[-2]:
            return False
    counts, (first, *_) = layer.in_channels, x.values()
    if is_compiling() and not all(leads_fit(first, t) for t in x.values()):
        return False
    return not any(t.shape[-1] != counts[name] or t.dtype is not first.dtype or t.is_nested for name, t in x.items())


def _parts(mixture: Mechanism, structure: Any) -> list[tuple[Mechanism, str, Any]]:
    """The parts, each with the name of its x and the structure that it reads, or `None`."""
    return [(part, name, part._own(structure) if "structure" in part.reads else None)
            for part, name in zip(mixture._branches(), mixture.__dict__["_reads"], strict=True)]


def other_outputs(mechanism: Mechanism, x: Any, z: Tensor, y: Tensor) -> ShapeError:
    """Return the error for a z that does not have the entries of the outputs."""
    return ShapeError("Conv", f"z must have N={y.shape[-2]} entries, the outputs to which {mechanism!r} leads from the "
                      f"M={x.shape[-2]} entries of x", tuple(z.shape), "Leave z out: nothing reads it."
                      if "content" not in mechanism.reads else "Give the outputs of the mechanism as z.")


def check_output_positions(structure: Any) -> None:
    """Raise `StructureError` if relative positions in the batch would not be those in its samples."""
    samples = getattr(structure, "samples", None)
    if samples is not None and not samples.square:
        raise StructureError("RelativeValue", "each sample must have as many outputs as inputs", repr(samples))


def is_nested(*tensors: Any) -> bool:
    """Return True if one of these is a nested tensor in the layout torch.jagged."""
    return any(type(t) is not Tensor and isinstance(t, Tensor) and t.is_nested for t in tensors)


def unpacked(layer: Any, x: Any, z: Any, structure: Any) -> tuple[Tensor, Tensor | None, Any]:
    """The entries of all sequences, and the structure whose samples they are. x and z must be nested as (B, entries,
    channels) without holes, and the structure a batch of the same samples."""
    owner, (_, name, other_name, call, _) = type(layer).__name__, layer._names(z)
    check_structure(owner, structure, call)
    for own, t in ((name, x), (other_name, x if z is None else z)):
        if not (isinstance(t, Tensor) and t.is_nested):
            raise ConfigError(owner, f"{name} and {other_name} must both be nested tensors, or neither",
                              f"{own} is not")
        ragged: Any = t
        plain = t.layout == torch.jagged and t.dim() == 3 and type(t.shape[1]) is not int and ragged.lengths() is None
        if not plain:
            raise ConfigError(owner, f"{own} must be a nested tensor (B, entries, channels) of layout torch.jagged, "
                              "without holes", f"one of layout {t.layout}", "Make it by "
                              "torch.nested.as_nested_tensor([...], layout=torch.jagged).")
    samples = Samples(x.offsets().diff(), None if z is None else z.offsets().diff())
    both = name if name == other_name else f"{name} and {other_name}"
    return x.values(), None if z is None else z.values(), _joined(owner, samples, structure, both)


def _joined(owner: str, samples: Samples, structure: Any, names: str) -> Any:
    if type(structure) is dict:  # whose samples `check_named` compares
        return structure
    own = getattr(structure, "samples", None)
    if structure is None or (own is None and isinstance(structure, Support)):
        return samples if structure is None else samples & structure
    if own is None or not same_samples(own, samples):
        expected = f"structure must be a batch of the samples of {names}, {samples!r}"
        raise StructureError(owner, expected, repr(structure))
    return structure


def check_named(owner: str, x: Any, named: Any) -> None:
    """Raise `StructureError` if named structures are not batches of the sequences of x."""
    samples, own = Samples(x.offsets().diff()), getattr(named, "samples", None)
    if own is None or own.sizes()[0] != samples.sizes()[0]:
        raise StructureError(owner, f"named structures must be batches of the samples of x, {samples!r}",
                             "none" if own is None else f"samples of {own.sizes()[0]} entries")


def packed(y: Tensor, outputs: Any, samples: Samples | None) -> Tensor:
    """The outputs of all sequences as a nested tensor, with the offsets of `outputs` if the sizes are equal. Outputs
    without samples, one for each sequence, are returned unchanged."""
    if samples is None:
        return y
    offsets, (sizes, _) = outputs.offsets(), samples.sizes()
    if not torch.equal(samples.input_starts.to(offsets), offsets):
        offsets = samples.input_starts.to(offsets)
    result: Tensor = torch.nested.nested_tensor_from_jagged(y, offsets, min_seqlen=min(sizes), max_seqlen=max(sizes))
    return result
