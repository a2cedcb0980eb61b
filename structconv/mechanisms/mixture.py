"""`Mixture`: `a | b` whose parts read inputs of their own, by name."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.compiler import is_compiling

from structconv.bases import linear as bases
from structconv.bases.base import Basis
from structconv.bases.tree import materialized
from structconv.errors import ConfigError, StructureError
from structconv.mechanisms.expression import Channels, Inputs, Mechanism
from structconv.mechanisms.naming import all_named, by_name, called_on, called_with, names_of_x
from structconv.planning.precision import autocast_dtype
from structconv.planning.precision import cast as cast_to
from structconv.structures.named import NamedStructures, Place
from structconv.structures.samples import same_samples

__all__ = ["Mixture"]


class InputsOfParts(NamedTuple):
    """The inputs of a mixture's call: the inputs of each part, z, the structure, and the x of each part."""

    parts: tuple[Inputs, ...]
    z: Tensor | None
    structure: Any
    output_positions: None = None
    values: tuple[Tensor, ...] = ()

    @property
    def num_inputs(self) -> tuple[int, ...]:
        """M of each part."""
        return tuple([part.num_inputs for part in self.parts])


class Mixture(Mechanism):
    """Heads side by side of parts that read inputs of their own: y = sum_i sum_k A_ik^T x_i Theta_ik.

    The rows of its basis are the inputs of all parts, one after the other. Where z is not given, that of a part is the
    x that it reads.

    Args:
        operands: the parts; `|` makes one where a part has a name for its x (`Mechanism.of`).

    Raises:
        ConfigError: a part whose scores are of x Theta, or with names of several x.

    Example:

        >>> from structconv import Conv, Identity
        >>> from structconv.mechanisms import Mixture
        >>> layer = Conv(Identity().of("words") | Identity().of("tags"), {"words": 4, "tags": 2}, 8)
        >>> isinstance(layer.mechanism, Mixture), layer.mechanism.size
        (True, 2)
    """

    _passes_structures = True
    batching = "structure"
    _reads_by_name = True

    def __init__(self, operands: Sequence[Mechanism]) -> None:
        super().__init__()
        self.operands = nn.ModuleList(operands)
        names_of_x(self)
        if any("projected" in part.reads for part in operands):
            raise ConfigError("on='projected'", "it must be in a layer of one x", repr(self),
                              "Scores of x itself may read an x by name.")

    @property
    def size(self) -> int:
        return sum(part.size for part in self._branches())

    @property
    def reads(self) -> Collection[str]:  # type: ignore[override]
        return {fact for part in self._branches() for fact in part.reads} - {"positions"}

    def _branches(self) -> list[Mechanism]:
        return cast("list[Mechanism]", list(self.operands))

    def bound(self, in_channels: Any, out_channels: int | None = None, other_channels: Any = None) -> Mechanism:
        """A copy with parameters for these channel counts, P and P' of each x by its name or of all."""
        mixture = copy.deepcopy(self)
        names = all_named(mixture)
        of_x = _counts("in_channels", names, in_channels)
        of_z = of_x if other_channels is None else _counts("other_channels", names, other_channels)
        for part, name in zip(mixture._branches(), names, strict=True):
            part._bind_all(Channels(of_x[name], of_z[name], of_x[name] if out_channels is None else out_channels))
        mixture._note_names()
        return mixture

    def inputs_of_parts(self, x: Mapping[str, Tensor], z: Tensor | None, structure: Any) -> InputsOfParts:
        """Return the inputs of each part in a call."""
        parts, names = self._branches(), self.__dict__["_reads"]
        structures = self._structures_of_parts(parts, names, structure)
        result = [part._call_inputs(x[name], z, own) for part, name, own in zip(parts, names, structures, strict=True)]
        return InputsOfParts(tuple([own for own, _ in result]), z, structure, None, tuple([own for _, own in result]))

    def basis(self, x: Any, structure: Any = None, *, z: Tensor | None = None) -> Basis:
        """The basis for inputs x (..., M_i, P_i) by name; see `Mechanism.basis`."""
        x = called_on(self, x)
        dtype = autocast_dtype(next(iter(x.values())))
        x, z = {name: cast_to(t, dtype) for name, t in x.items()}, cast_to(z, dtype)
        inputs = self.inputs_of_parts(x, z, called_with(self, structure))
        return cast(Basis, materialized(cast_to(self.evaluate(cast(Any, inputs)), dtype)))

    def forward(self, inputs: Any) -> Basis:
        inputs_of_parts: tuple[Inputs, ...] = inputs.parts
        each = zip(self._branches(), inputs_of_parts, strict=True)
        return bases.Mixture(tuple([part.evaluate(own) for part, own in each]))

    def _input_entries(self, structure: Any) -> int | None:
        return None

    def _output_entries(self, structure: Any) -> int | None:
        counts = [part._output_entries(part._own(structure)) for part in self._branches()]
        return next((count for count in counts if count is not None), None)

    def _with_own_samples(self, structure: NamedStructures) -> NamedStructures:
        """Return them unchanged, because `inputs_of_parts` selects the samples of each part."""
        return structure

    def _structures_of_parts(self, parts: list[Mechanism], names: tuple[str, ...], structure: Any) -> list[Any]:
        """Return the structure of each part. In a batch, parts must agree on the samples of their outputs, and on the
        samples of an x that they share."""
        named = type(structure) is NamedStructures
        if not structure.batched if named else getattr(structure, "samples", None) is None:
            return [part._own(structure) for part in parts]
        if is_compiling() and not named:  # a traced program holds for any sizes of samples, and reads none
            return [None if _needs_no_structure(part) else structure for part in parts]
        result: list[Any] = []
        outputs: list[Place] = []
        inputs: dict[str, list[Place]] = {}
        for part, name in zip(parts, names, strict=True):
            own, place = _place(part, structure)
            result.append(own)
            if place is not None:
                outputs.append(Place(place.name, place.samples.of_outputs()))
                inputs.setdefault(name, []).append(Place(place.name, place.samples.turned().of_outputs()))
        for places in (outputs, *inputs.values()):
            _check_same_samples(places)
        return result

    def __repr__(self) -> str:
        return f"({' | '.join(map(repr, self._branches()))})"


def mixed(name: str, *operands: Any) -> Mixture | None:
    """Apply an operator to operands of which some name their x; `None` if the result is not a mixture. Only `|` takes
    one."""
    mechanisms = [operand for operand in operands if isinstance(operand, Mechanism)]
    if name == "concat" and len(mechanisms) == len(operands):
        named = any(result is not None for part in mechanisms for result in names_of_x(part))
        return Mixture([part for operand in mechanisms for part in operand._branches()]) if named else None
    if any(isinstance(operand, Mixture) for operand in mechanisms):
        raise ConfigError(f"Mechanism.{name}", "its operands must read one x", " and ".join(map(repr, operands)),
                          "Parts of | that read an x by name are joined last: apply it to each part.")
    return None


def _counts(argument: str, names: tuple[str, ...], counts: Mapping[str, int] | int) -> Mapping[str, int]:
    """Channel counts by the names of x."""
    return by_name("Conv", argument, names, counts) if isinstance(counts, Mapping) else dict.fromkeys(names, counts)


def _place(part: Mechanism, structure: Any) -> tuple[Any, Place | None]:
    """Return the structure of a part and the samples that it sets; `None` for a part without a structure."""
    if _needs_no_structure(part):
        return None, None
    if type(structure) is not NamedStructures:
        return structure, Place("structure", part._pairs_of(structure))
    named_samples = part._samples_of(structure)
    return part._own(structure.at(named_samples)), named_samples[0] if named_samples else None


def _needs_no_structure(part: Mechanism) -> bool:
    return "structure" not in part.reads and all(
        inner.batching == "structure" for inner in part.modules()
        if isinstance(inner, Mechanism) and not inner._passes_structures)


def _check_same_samples(places: list[Place]) -> None:
    for place in places[1:]:
        if not same_samples(places[0].samples, place.samples):
            raise StructureError("|", "parts must speak of the same samples of their outputs, and of an x that they "
                                 "share", f"{places[0].samples!r} and {place.samples!r}",
                                 "Name one for each, whose samples are those of its x: expression.on(NAME).")
