"""`Specimen`: a basis or mechanism on which the generic suite runs, and the register of all of them.

A specimen builds its subject again each time, in float64, from torch's global generator, which is seeded before and
restored after. Other dtypes are casts, so that they differ by rounding only.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from structconv.bases.base import Basis
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.mechanisms.expression import Mechanism

__all__ = ["SPECIMENS", "TRAITS", "Setup", "Specimen", "Subject", "add", "as_basis", "as_specimen", "mapped",
           "random_numbers", "specimen", "with_dtype", "with_leaves"]

#: The traits that a specimen may state beyond the laws of every basis; each names its check.
TRAITS = {
    "permutes": "of a mechanism: relabeling the entries relabels the basis",
    "translates": "on a periodic grid, translating x translates the outputs",
    "blockwise": "of a mechanism: a block-diagonal batch of structures gives what each of them gives by itself",
    "resizes": "of a mechanism: x, z and the graph may have any size",
    "compiles": "of a mechanism: torch.compile(fullgraph=True) takes it whole",
    "exports": "of a mechanism: torch.export takes it, with any numbers of entries and edges",
    "masks": "some pairs are masked out; NaN in an input stays away from the outputs that do not read it",
    "repeats": "its graph has duplicate edges, each a pair of its own",
}


@contextmanager
def random_numbers(seed: int) -> Iterator[None]:
    """Random numbers of the CPU from this seed on, and afterwards as if none had been drawn."""
    state = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


@dataclass(frozen=True, eq=False)
class Setup:
    """A mechanism with parameters, and what it is called on: x (..., M, P), z (..., N, P') and a structure.

    Example:

        >>> from structconv.mechanisms import DotProduct
        >>> from structconv.testing import Setup
        >>> Setup(DotProduct(dim=3).softmax().bound(4), torch.randn(5, 4)).basis().dense().shape
        torch.Size([1, 5, 5])
    """

    mechanism: Mechanism
    x: Tensor
    z: Tensor | None = None
    structure: Any = None

    def basis(self) -> Basis:
        """The basis that the mechanism makes."""
        return self.mechanism.basis(self.x, self.structure, z=self.z)


Subject = Basis | Setup


@dataclass(frozen=True, eq=False)
class Specimen:
    """A named basis, or mechanism with its inputs, and what it promises.

    Args:
        name: how the test is called.
        make: returns the subject, in float64 and of a few entries; called again for each check.
        traits: some of `TRAITS`. "permutes", "blockwise", "resizes", "compiles" and "exports" need a mechanism: `make`
            returns a `Setup`.

    Raises:
        ConfigError: `make` is not a function, or there is no such trait; a check of a trait that the subject of `make`
            cannot have.

    Example:

        >>> from structconv.bases import Dense
        >>> from structconv.testing import Specimen
        >>> mine = Specimen("mine", lambda: Dense(torch.randn(2, 4, 3, dtype=torch.float64)))
        >>> torch.equal(mine.basis(seed=1).dense(), mine.basis(seed=1).dense())
        True
    """

    name: str
    make: Callable[[], Subject]
    traits: frozenset[str] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        if not callable(self.make) or isinstance(self.make, nn.Module):
            raise ConfigError("Specimen", "make must be a function without arguments", type(self.make).__name__,
                              "Write lambda: ... before the subject, which each check makes again.")
        unknown = sorted(set(self.traits) - set(TRAITS))
        if unknown:
            raise ConfigError("Specimen", f"traits must be among {', '.join(TRAITS)}", ", ".join(unknown))
        object.__setattr__(self, "traits", frozenset(self.traits))

    def subject(self, seed: int = 0) -> Subject:
        """The subject made again; equal seeds give equal ones."""
        with random_numbers(seed):
            return self.make()

    def basis(self, seed: int = 0) -> Basis:
        """The subject, or the basis that it makes."""
        return as_basis(self.subject(seed))

    def setup(self, trait: str) -> Setup:
        """The subject, if it is a mechanism with its inputs, as the check of a trait needs it; else `ConfigError`."""
        subject = self.subject()
        if not isinstance(subject, Setup):
            raise ConfigError(self.name, f"the trait {trait!r} needs a mechanism with its inputs",
                              type(subject).__name__, "Leave the trait out, or let make return Setup(mechanism, x).")
        return subject

    def __repr__(self) -> str:
        return self.name


#: Every specimen by its name.
SPECIMENS: dict[str, Specimen] = {}


def specimen(*traits: str, name: str | None = None) -> Callable[[Callable[[], Subject]], Callable[[], Subject]]:
    """Register the decorated function as a specimen, under its own name with spaces unless `name` is given.

    Example:

        >>> from structconv import Given
        >>> from structconv.testing import SPECIMENS, Setup, specimen
        >>> @specimen("compiles")
        ... def three_by_three():
        ...     return Setup(Given(torch.randn(3, 3)).bound(2).double(), torch.randn(3, 2, dtype=torch.float64))
        >>> sorted(SPECIMENS.pop("three by three").traits)         # taken out again
        ['compiles']
    """

    def decorate(make: Callable[[], Subject]) -> Callable[[], Subject]:
        add(make.__name__.replace("_", " ") if name is None else name, make, traits)
        return make

    return decorate


def add(name: str, make: Callable[[], Subject], traits: Iterable[str] = ()) -> Specimen:
    """Register a specimen; `ConfigError` where the name is taken.

    Example:

        >>> from structconv.bases import Dense
        >>> from structconv.testing import SPECIMENS, add
        >>> add("ones", lambda: Dense(torch.ones(1, 3, 3, dtype=torch.float64)))
        ones
        >>> SPECIMENS.pop("ones").name                             # taken out again
        'ones'
    """
    if name in SPECIMENS:
        raise ConfigError("specimen", "name must be new", repr(name))
    SPECIMENS[name] = Specimen(name, make, frozenset(traits))
    return SPECIMENS[name]


def as_specimen(subject: Specimen | Subject) -> Specimen:
    """Return a specimen of a basis or setup; a specimen is returned unchanged."""
    return subject if isinstance(subject, Specimen) else Specimen(repr(subject)[:60], lambda: subject)


def as_basis(subject: Subject) -> Basis:
    """The basis itself, or the one that the setup makes."""
    return subject.basis() if isinstance(subject, Setup) else subject


def mapped(value: Any, fn: Callable[[Tensor], Tensor], copies: dict[int, Any] | None = None) -> Any:
    """`value` with fn applied to each floating tensor that it holds, once where it is held twice; parts without any
    stay the same objects. Goes through bases, structures, setups, modules, tuples and lists."""
    copies = {} if copies is None else copies
    if id(value) not in copies:
        copies[id(value)] = (value, _mapped(value, fn, copies))
    return copies[id(value)][1]


def _mapped(value: Any, fn: Callable[[Tensor], Tensor], copies: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return fn(value) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        items = [mapped(item, fn, copies) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, nn.Module):
        module = copy.deepcopy(value)
        for part in module.modules():
            for tensors in (part._parameters, part._buffers):
                tensors.update({name: mapped(t, fn, copies) for name, t in tensors.items() if t is not None})
        return module
    if isinstance(value, Basis) or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        attrs = vars(value).copy()  # at once: another thread may note something meanwhile
        changed = {name: new for name, old in attrs.items() if (new := mapped(old, fn, copies)) is not old}
        return _replaced(value, changed) if changed else value
    return value


def _replaced(value: Any, fields: dict[str, Any]) -> Any:
    twin = copy.copy(value)
    for name, new in fields.items():
        object.__setattr__(twin, name, new)
    return twin


def with_dtype(subject: Any, dtype: torch.dtype) -> Any:
    """The subject with all its floating tensors cast."""
    return mapped(subject, lambda t: _parameter_like(t, t.detach().to(dtype)))


def with_leaves(subject: Any) -> tuple[Any, list[Tensor]]:
    """The subject over fresh copies of its floating tensors that require gradients, and the copies."""
    leaves: list[Tensor] = []

    def leaf(t: Tensor) -> Tensor:
        leaves.append(_parameter_like(t, t.detach().clone()).requires_grad_())
        return leaves[-1]

    return mapped(subject, leaf), leaves


def _parameter_like(t: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else new


# -- draws: the dtype, the gradients, the leading dimensions and the channels of a call, crossed ------------------

_MODES = (torch.float32, True), (torch.float32, False), (torch.float64, False)
_CHANNELS = (1, 3, 8)


class Rounded(NamedTuple):
    """A subject in float64, with numbers that float32 represents too, and in float32."""

    float64: Subject
    float32: Subject

    @classmethod
    def of(cls, subject: Subject) -> Rounded:
        """The subject, rounded."""
        low = with_dtype(subject, torch.float32)
        return cls(with_dtype(low, torch.float64), low)

    def like(self, draw: Draw, dtype: torch.dtype) -> Subject:
        """The subject of a call of the draw, computed in `dtype`."""
        return draw.of(self.float32 if dtype == torch.float32 else self.float64)


class Draw(NamedTuple):
    """One kind of call that a basis or a kernel must compute: the dtype of x, Theta and all tensors of the subject,
    whether gradients are wanted, the number of leading dimensions of x, and P."""

    dtype: torch.dtype
    gradients: bool
    dims: int
    channels: int

    @property
    def out_channels(self) -> int:
        """Q, another number than P."""
        return _CHANNELS[_CHANNELS.index(self.channels) - 2]

    def lead(self, own: tuple[int, ...]) -> tuple[int, ...]:
        """The leading dimensions of x, which broadcast to those that the subject has."""
        if self.dims == 0 or own in ((), (1,)):
            return (2, 3)[:self.dims]
        return own if self.dims == 1 else (3, *own)

    def of(self, subject: Subject) -> Subject:
        """The subject; a mechanism on content of these leading dimensions, unless it refuses them."""
        if not isinstance(subject, Setup):
            return subject
        z = None if subject.z is None else self._with_leading(subject.z)
        setup = dataclasses.replace(subject, x=self._with_leading(subject.x), z=z)
        try:
            setup.basis()
        except (ShapeError, StructureError):
            return subject
        return setup

    def _with_leading(self, t: Tensor) -> Tensor:
        """Return t with these leading dimensions, of other numbers in each sample."""
        own = tuple(t.shape[:-2])
        lead = self.lead(own)
        if lead == own:
            return t
        if self.dims == 0 or own == (1,):
            t, own = t.flatten(0, -3)[0], ()
        added = lead[:len(lead) - len(own)]
        scale = 0.5 ** torch.arange(math.prod(added))  # exact in each dtype
        return t * scale.to(t.dtype).view(*added, *(1 for _ in t.shape))

    def __str__(self) -> str:
        gradients = "" if self.gradients else " without gradients"
        return f"in {str(self.dtype).removeprefix('torch.')}{gradients}, {self.dims} leading dimensions, " \
               f"{self.channels} channels"


def draws(turn: int) -> list[Draw]:
    """Three draws, which have each dtype, mode, number of leading dimensions and number of channels; those of the turns
    0, 1 and 2 have all pairs of them: two orthogonal Latin squares."""
    return [Draw(*_MODES[(i + 2 * turn) % 3], i, _CHANNELS[(i + turn) % 3]) for i in range(3)]
