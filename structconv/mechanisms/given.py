"""`Given`: a basis, or a tensor, that is at hand, as a mechanism: fixed, or learnt where it is a parameter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from structconv.bases.base import Basis
from structconv.bases.dense import Dense
from structconv.bases.logdomain import taken_apart
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms.expression import Inputs, Mechanism
from structconv.mechanisms.masks import STRUCTURE, STRUCTURE_IF_GIVEN
from structconv.memo import derived
from structconv.structures.samples import Samples
from structconv.structures.values import map_tensors, tensors_in

__all__ = ["Given", "added"]


class Given(Mechanism):
    """The same basis in every call: the matrices of a Fourier or wavelet transform, an MLP-Mixer's learnt ones.

    `Given(a)` with a tensor (M, N) or (..., K, M, N) is `Given(Dense(a))`. Tensors are buffers, those that are an
    `nn.Parameter` are trained, with the layer's own copy of them. `state_dict` names them tensor0, tensor1, ... in the
    order of the basis's fields.

    Raises:
        ConfigError: if it is neither a basis nor a floating tensor.
        ShapeError: in a call with other numbers of inputs than M, or of outputs than N where z is given.
    """

    reads_entries = False
    reads_structure = False
    reads_content = False

    def __init__(self, basis: Basis | Tensor) -> None:
        super().__init__()
        if isinstance(basis, Tensor):
            basis = Dense(basis.unsqueeze(0) if basis.dim() == 2 else basis)
        if not isinstance(basis, Basis):
            raise ConfigError("Given", "it must be given a basis or a tensor (K, M, N)", type(basis).__name__)
        self._given = basis
        for number, tensor in enumerate(tensors_in(basis)):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"tensor{number}", tensor)
            else:
                self.register_buffer(f"tensor{number}", tensor)
        self._count = len(tensors_in(basis))

    @property
    def size(self) -> int:
        return self._given.size

    @property
    def has_scores(self) -> bool:  # type: ignore[override]
        return self._given.has_scores

    def build(self, inputs: Inputs) -> Basis:
        sizes = self._given.num_inputs, inputs.num_inputs
        if sizes[0] != sizes[1] and not torch.compiler.is_compiling():
            raise ShapeError("Given", f"x must have M={sizes[0]} entries, as the basis", tuple(inputs.x.shape))
        held = (getattr(self, f"tensor{number}") for number in range(self._count))
        given: Basis = map_tensors(self._given, lambda t: next(held))
        if given is not self._given:  # one and the same object until a tensor is replaced
            self._given = given
        return given

    def input_entries(self, structure: Any) -> int | None:
        return self._given.num_inputs * _count(structure)

    def output_entries(self, structure: Any) -> int | None:
        return self._given.num_outputs * _count(structure)

    def output_structure(self, structure: Any) -> Any:
        samples: Samples | None = getattr(structure, "samples", None)
        outputs = self._given.num_outputs
        return structure if samples is None or outputs == self._given.num_inputs else derived(
            samples, ("given", outputs), lambda: Samples([outputs] * samples.num_samples))

    def extra_repr(self) -> str:
        return repr(self._given)


def _count(structure: Any) -> int:
    """How many samples a call has, each of which gets the basis."""
    samples: Samples | None = getattr(structure, "samples", None)
    return 1 if samples is None else samples.num_samples


def added(first: Mechanism, term: Any) -> Mechanism:
    """`first + term` for what is no mechanism: a basis, a tensor, or a mask in the log domain."""
    if isinstance(term, Basis):
        return first + Given(term)
    later = any(term is named for named in (STRUCTURE, STRUCTURE_IF_GIVEN))
    mask, table = (term, None) if later else taken_apart("mechanisms", term)
    if mask is not None and not first.has_scores:
        raise ConfigError("a + b", "a mask in the log domain must be added to scores", repr(first),
                          "Of a matrix leave pairs out by a.masked(keep=mask).")
    first = first if mask is None else first.masked(keep=mask)
    return first if table is None else first + Given(table)
