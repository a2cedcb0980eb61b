"""Nested tensors (torch.jagged): the sequences of one are the samples of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from structconv.errors import ConfigError, StructureError
from structconv.structures.samples import Samples, same_samples
from structconv.structures.supports import Support

__all__ = ["check_named", "is_nested", "packed", "unpacked"]


def is_nested(*tensors: Any) -> bool:
    """Return True if one of these is a nested tensor in the layout torch.jagged."""
    return any(type(t) is not Tensor and isinstance(t, Tensor) and t.is_nested for t in tensors)


def unpacked(owner: str, x: Any, z: Any, structure: Any, name: str = "x", other_name: str = "z"
             ) -> tuple[Tensor, Tensor | None, Any]:
    """The entries of all sequences, and the structure whose samples they are; errors name x and z so. Both must be
    nested as (B, entries, channels) without holes, and the structure of the same samples."""
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
    """Raise `StructureError` where named structures are no batches of the sequences of x."""
    samples, own = Samples(x.offsets().diff()), getattr(named, "samples", None)
    if own is None or own.sizes()[0] != samples.sizes()[0]:
        raise StructureError(owner, f"named structures must be batches of the samples of x, {samples!r}",
                             "none" if own is None else f"samples of {own.sizes()[0]} entries")


def packed(y: Tensor, outputs: Any, samples: Samples | None) -> Tensor:
    """The outputs of all sequences as a nested tensor, with the offsets of `outputs` where these are as many; as they
    are where there is one for each sequence (`samples` is `None`)."""
    if samples is None:
        return y
    offsets, (sizes, _) = outputs.offsets(), samples.sizes()
    if not torch.equal(samples.input_starts.to(offsets), offsets):
        offsets = samples.input_starts.to(offsets)
    result: Tensor = torch.nested.nested_tensor_from_jagged(y, offsets, min_seqlen=min(sizes), max_seqlen=max(sizes))
    return result
