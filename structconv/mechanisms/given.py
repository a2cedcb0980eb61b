"""Mechanisms that read neither content nor structure: the identity, a basis of the user, a learned table."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from structconv.bases.algebra import check_masks_scores, mask_and_table, with_heads
from structconv.bases.base import Basis
from structconv.bases.dense import Dense
from structconv.bases.dense import Identity as IdentityBasis
from structconv.derived import derived
from structconv.errors import ConfigError, ShapeError
from structconv.mechanisms.expression import Channels, Inputs, Mechanism
from structconv.mechanisms.masks import STRUCTURE, STRUCTURE_IF_GIVEN, is_borrowed
from structconv.shapes import check_positive
from structconv.structures.samples import Samples
from structconv.structures.values import FrozenValue, field_names, fields, map_tensors, refreshed, tensors_in

__all__ = ["Given", "Identity", "Learned"]

#: Remembered, because it is a value of a few numbers.
_identity = lru_cache(maxsize=64)(IdentityBasis)


class Identity(Mechanism):
    """Each output is its own input, `size` times; a layer over it is a 1x1 convolution.

    Args:
        size: K.

    Example:

        >>> from structconv import Conv, Identity
        >>> layer = Conv(Identity(), 4, 8)                         # a 1x1 convolution
        >>> layer(torch.randn(5, 4)).shape
        torch.Size([5, 8])
    """

    reads = ()
    batching = "structure"

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self._size = check_positive("Identity", "size", size)

    @property
    def size(self) -> int:
        return self._size

    def _outputs_are(self, structure: Any, num_inputs: int) -> str | None:
        return "x"

    def forward(self, inputs: Inputs) -> Basis:
        entries, device = inputs.x.shape[-2], inputs.x.device
        make = _identity if type(entries) is int and not is_compiling() else IdentityBasis
        return make(entries, self._size, device)


class Given(Mechanism):
    """One basis for every call: for example the matrices of a Fourier or wavelet transform, or an MLP-Mixer's learned
    ones.

    `Given(a)` with a tensor (M, N) or (..., K, M, N) is `Given(Dense(a))`. Tensors become buffers. An `nn.Parameter` is
    trained; each layer has its own copy. `state_dict` names them tensor0, tensor1, ... in the order of the basis's
    fields. `Given(a).transpose()` shares them.

    Raises:
        ConfigError: the argument is neither a basis nor a floating tensor, or it is a basis with parameters whose class
            is not a `structconv.bases.value`.
        ShapeError: in a call whose number of inputs is not M, or whose z has not N outputs.

    Example:

        >>> from structconv import Conv, Given
        >>> mixing = torch.nn.Parameter(torch.randn(2, 9, 5))          # K, M, N
        >>> Conv(Given(mixing), 4, 6)(torch.randn(9, 4)).shape
        torch.Size([5, 6])
    """

    reads = ()
    _reads_sizes = False

    def __init__(self, basis: Basis | Tensor) -> None:
        super().__init__()
        if isinstance(basis, Tensor):
            basis = Dense(with_heads(basis))
        if not isinstance(basis, Basis):
            raise ConfigError("Given", "it must be given a basis or a tensor (K, M, N)", type(basis).__name__)
        _check_fields(basis)
        self._basis = basis
        for number, tensor in enumerate(tensors_in(basis)):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(f"tensor{number}", tensor)
            else:
                self.register_buffer(f"tensor{number}", tensor)
        self._count = len(tensors_in(basis))
        self._turned = False

    @property
    def size(self) -> int:
        return self._basis.size

    @property
    def has_scores(self) -> bool:  # type: ignore[override]
        return self._basis.has_scores

    def forward(self, inputs: Inputs) -> Basis:
        if not is_compiling():
            own = self._sizes()[0]
            if own != inputs.num_inputs:
                raise ShapeError("Given", f"x must have M={own} entries, as the basis", tuple(inputs.x.shape))
        tensors = (getattr(self, f"tensor{number}") for number in range(self._count))
        basis: Basis = map_tensors(self._basis, lambda t: next(tensors))
        basis = refreshed(basis)
        if basis is not self._basis and not is_borrowed(self):  # one and the same object until a tensor is replaced
            self._basis = basis
        return basis.transpose() if self._turned else basis

    def transpose(self) -> Given:
        """The transposed basis, over the same tensors."""
        turned = Given(self._basis)
        turned._turned = not self._turned
        return turned

    def _input_entries(self, structure: Any) -> int | None:
        return self._sizes()[0] * _num_samples(structure)

    def _output_entries(self, structure: Any) -> int | None:
        return self._sizes()[1] * _num_samples(structure)

    def output_structure(self, structure: Any) -> Any:
        return _with_outputs(structure, *self._sizes())

    def _sizes(self) -> tuple[int, int]:
        """M and N."""
        sizes = self._basis.num_inputs, self._basis.num_outputs
        return sizes[::-1] if self._turned else sizes

    def extra_repr(self) -> str:
        return f"{self._basis!r}{'.transpose()' if self._turned else ''}"


def _check_fields(value: Any) -> None:
    """Raise `ConfigError` where a plain class within a basis holds parameters: they would never be trained."""
    plain = isinstance(value, FrozenValue) and not field_names(value)
    for name, held in (vars(value).items() if plain else zip(field_names(value), fields(value), strict=True)):
        for part in held if isinstance(held, tuple | list) else (held,):
            if plain and isinstance(part, nn.Parameter | nn.Module):
                raise ConfigError("Given", "the parameters of a basis must be fields of it", f"{name} of a "
                                  f"{type(value).__name__}", "Make the class a frozen dataclass by "
                                  "structconv.bases.value, or write a Mechanism that holds them.")
            if isinstance(part, FrozenValue):
                _check_fields(part)


class Learned(Mechanism):
    """K learned matrices A (K, M, N), the same in every call: the token mixing of MLP-Mixer (Tolstikhin et al. 2021,
    eq. 1), and with `.softmax()` the random Synthesizer (Tay et al. 2021, section 3.3).

    With N = M sequences of any length up to M are taken: the leading rows and columns of the table say how their
    entries meet. Otherwise there are N outputs for any number of inputs up to M. Numbers are drawn normal with variance
    1/M; K M N of them are held, and 2 K M N C flops spent on C channels.

    Args:
        inputs: M, the largest number of inputs.
        outputs: N; M where absent.
        size: K.

    Raises:
        ConfigError: if a size is not a positive integer.
        ShapeError: in a call with more than M inputs, or more than N outputs.

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import Learned
        >>> layer = Conv(Learned(16, size=2).softmax(), 4, 6)           # for up to 16 entries
        >>> layer(torch.randn(9, 4)).shape
        torch.Size([9, 6])
    """

    has_scores = True
    reads = ()
    _reads_sizes = True

    def __init__(self, inputs: int, outputs: int | None = None, *, size: int = 1) -> None:
        super().__init__()
        self.inputs = check_positive("Learned", "inputs", inputs)
        self.outputs = self.inputs if outputs is None else check_positive("Learned", "outputs", outputs)
        self._size = check_positive("Learned", "size", size)

    @property
    def size(self) -> int:
        return self._size

    def bind(self, channels: Channels) -> None:
        self.table = nn.Parameter(torch.empty(self._size, self.inputs, self.outputs))
        nn.init.normal_(self.table, std=self.inputs ** -0.5)

    def forward(self, inputs: Inputs) -> Basis:
        m, n = inputs.num_inputs, inputs.num_outputs if self.inputs == self.outputs else self.outputs
        if not is_compiling():
            for name, letter, count, most in (("x", "M", m, self.inputs), ("z", "N", n, self.outputs)):
                if count > most:
                    raise ShapeError("Learned", f"{name} must have at most {letter}={most} entries", count,
                                     f"Learn a larger table: {self._written(m, n)}.")
        table: Tensor = self.table
        return Dense(table if (m, n) == tuple(table.shape[-2:]) else table[:, :m, :n])

    def transpose(self) -> Mechanism:
        """The transposed square table; one of other sizes is written so."""
        if self.inputs != self.outputs:
            raise ConfigError("Learned.transpose", "the table must be square", self.extra_repr(),
                              f"Write Learned({self.outputs}, {self.inputs}), or Given(parameter) to share a table.")
        return super().transpose()

    def _output_entries(self, structure: Any) -> int | None:
        square = self.inputs == self.outputs
        return super()._output_entries(structure) if square else self.outputs * _num_samples(structure)

    def output_structure(self, structure: Any) -> Any:
        return _with_outputs(structure, self.inputs, self.outputs)

    def _written(self, m: int, n: int) -> str:
        """The mechanism with at least these sizes."""
        m, n = max(m, self.inputs), max(n, self.outputs)
        return f"Learned({m}{'' if m == n else f', {n}'}{'' if self._size == 1 else f', size={self._size}'})"

    def extra_repr(self) -> str:
        return self._written(0, 0).removeprefix("Learned(").removesuffix(")")


def _with_outputs(structure: Any, inputs: int, outputs: int) -> Any:
    """The structure of a call, or the samples of its outputs if these are not the inputs of a batch."""
    samples: Samples | None = getattr(structure, "samples", None)
    return structure if samples is None or outputs == inputs else derived(
        samples, ("given", outputs), lambda: Samples([outputs] * samples.num_samples))


def _num_samples(structure: Any) -> int:
    """Return the number of samples, each of which gets the basis; 1 if the call has no batch."""
    samples: Samples | None = getattr(structure, "samples", None)
    return 1 if samples is None else samples.num_samples


def added(first: Mechanism, term: Any) -> Mechanism:
    """`first + term` for a term that is no mechanism: a basis, a tensor, or a mask in the log domain."""
    if isinstance(term, Basis):
        return first + Given(term)
    later = any(term is named for named in (STRUCTURE, STRUCTURE_IF_GIVEN))
    mask, table = (term, None) if later else mask_and_table("mechanisms", term)
    check_masks_scores(first, mask)
    first = first if mask is None else first.masked(keep=mask)
    return first if table is None else first + Given(table)
