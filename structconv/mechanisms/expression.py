"""`Mechanism`: a module that makes a basis from (x, z, structure), and the expressions that mechanisms form.

The tree of modules built here mirrors the tree of values in `bases/`: an `Operation` applies to the bases of its
operands the very function that the algebra of values registers under its name. No operator is written twice.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from structconv.bases import algebra as _algebra  # noqa: F401 - registers the operators
from structconv.bases.base import OPERATORS, Basis, ScoreMaps
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid
from structconv.structures.supports import And, DenseMask, Not, Or, Padding, Support, Window


class _Structure:
    """The structure that the layer is called with, named in an expression before it is known."""

    def __repr__(self) -> str:
        return "STRUCTURE"

    def __deepcopy__(self, memo: dict[int, Any]) -> _Structure:
        return self

    def __reduce__(self) -> str:
        return "STRUCTURE"


STRUCTURE = _Structure()


@dataclass(frozen=True)
class Channels:
    """Channel counts that a layer gives to its mechanism: P of x, P' of z, Q of y."""

    inputs: int
    others: int
    outputs: int


@dataclass(frozen=True)
class Setting:
    """What a mechanism sees: x (..., M, P), z (..., N, P'), the structure, and x and z after Theta, by heads.

    `projected` holds x Theta_k (..., K, M, Q) and z Theta_k (..., K, N, Q) when some mechanism asks for them; with
    `deferred` projections of x and z may be left to whoever applies the basis (`bases.scores.computed`).
    """

    x: Tensor
    z: Tensor
    structure: Any = None
    projected: tuple[Tensor, Tensor] | None = None
    deferred: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    @property
    def num_inputs(self) -> int:
        return self.x.shape[-2]

    @property
    def num_outputs(self) -> int:
        return self.z.shape[-2]


class Mechanism(ScoreMaps, nn.Module):
    """A module (x, z, structure) -> `Basis`.

    A subclass implements `build(setting)` and says `size`; one with parameters makes them in `bind(channels)`, which
    the layer calls on its own copy, so that an expression is a recipe and may be used for many layers.
    """

    #: Whether a softmax over what is built means something.
    has_scores: bool = False
    #: Whether `build` reads `setting.projected`.
    sees_projection: bool = False

    @property
    def size(self) -> int:
        """K, the number of matrices of the basis."""
        return 1

    def bind(self, channels: Channels) -> None:
        """Make the parameters for these channel counts."""

    def build(self, setting: Setting) -> Basis:
        """The basis for this setting."""
        raise NotImplementedError

    def bound(self, in_channels: int, out_channels: int | None = None, other_channels: int | None = None) -> Mechanism:
        """A copy of the expression with parameters for these channel counts; shared parts stay shared."""
        channels = Channels(in_channels, in_channels if other_channels is None else other_channels,
                            in_channels if out_channels is None else out_channels)
        mechanism = copy.deepcopy(self)
        for module in mechanism.modules():
            if isinstance(module, Mechanism | Position):
                module.bind(channels)
        return mechanism

    def forward(self, x: Tensor, z: Tensor | None = None, structure: Any = None) -> Basis:
        """The basis for inputs x (..., M, P), outputs z (..., N, P') (x itself if absent) and a structure."""
        return self.build(Setting(x, x if z is None else z, structure))

    def parts(self) -> list[Mechanism]:
        """What `|` joins, in order; itself where there is none."""
        return [self]

    def input_entries(self, structure: Any) -> int | None:
        """M by the structure of a call; `None` where x alone tells."""
        return getattr(structure, "num_inputs", getattr(structure, "num_entries", None))

    def output_structure(self, structure: Any) -> Any:
        """The structure of the outputs, where the mechanism leads to another one (a coarser grid)."""
        return structure

    def kept_inputs(self, setting: Setting) -> Tensor | None:
        """Which entries some output can see, (..., M) booleans; `None` for all."""
        return None

    def chain(self) -> tuple[list[Mechanism], Mechanism] | None:
        """What `build` hands from one to the next, from this one down, and the mechanism whose basis is the first.

        `None` where anything but that last one reads x or z, has parameters, or is something else than an operator on
        one basis: then another x may give another expression, and not the same with other numbers.
        """
        return [], self

    def adopted(self, sibling: Mechanism) -> Mechanism:
        """This mechanism as a term beside `sibling`, from which it may take what it left open (heads, queries)."""
        return self

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.extra_repr()})"

    def _operate(self, name: str, *args: Any, **options: Any) -> Mechanism:
        return Operation(name, *args, **options)


class Position(nn.Module):
    """A module that predicts from a `Setting` a position for each output, (..., N): the centre of a window."""

    def bind(self, channels: Channels) -> None:
        """Make the parameters for these channel counts."""


def _adopted(operands: list[Mechanism], name: str) -> list[Mechanism]:
    if name not in ("add", "multiply") or len(operands) != 2:
        return operands
    first, second = operands
    return [first.adopted(second), second.adopted(first)]


def _size(name: str, sizes: list[int]) -> int:
    if name == "concat":
        return sum(sizes)
    if name in ("compose", "outer"):
        return sizes[0] * sizes[1]
    if name in ("add", "multiply") and len(sizes) == 2:
        if sizes[0] != sizes[1] and 1 not in sizes:
            raise ShapeError(f"a {'+' if name == 'add' else '*'} b",
                             "the sizes K of both mechanisms must be equal, or one of them 1",
                             f"{sizes[0]} and {sizes[1]}", "Use a.outer(b) for every pair of heads.")
        return max(sizes)
    return sizes[0]


class Operation(Mechanism):
    """An operator of the algebra, waiting for its operands' bases."""

    def __init__(self, name: str, *args: Any, **options: Any) -> None:
        super().__init__()
        self.name = name
        strange = [type(arg).__name__ for arg in args if not isinstance(arg, Mechanism)]
        if strange and name in ("concat", "compose", "add", "outer"):
            raise ConfigError(f"Mechanism.{name}", "both operands must be mechanisms", strange[0])
        self.operands = nn.ModuleList(_adopted([arg for arg in args if isinstance(arg, Mechanism)], name))
        self.constants = [arg for arg in args if not isinstance(arg, Mechanism | Tensor)]
        self.factors = nn.ParameterList([_parameter(arg) for arg in args if isinstance(arg, Tensor)])
        self.options = options
        self.held = nn.ModuleList(_modules(options))
        self._size = _size(name, [operand.size for operand in self._mechanisms()])
        scored = any(operand.has_scores for operand in self._mechanisms())
        if name == "masked" and (options["keep"] is None) == (options["drop"] is None):
            got = "neither" if options["keep"] is None else "both"
            raise ConfigError("masked", "exactly one of keep= and drop= must be given", got)
        if name == "normalize" and options["kind"] in ("softmax", "sigmoid") and not scored:
            raise ConfigError(options["kind"], "its basis must have scores", _leaves(self._mechanisms()[0]),
                              "Scores come from a content-based mechanism such as DotProduct.")
        self.has_scores = scored and name != "normalize"
        self.sees_projection = any(operand.sees_projection for operand in self._mechanisms())

    @property
    def size(self) -> int:
        return self._size

    def build(self, setting: Setting) -> Basis:
        if self.name == "compose":
            return self._composed(setting)
        bases = [operand.build(setting) for operand in self._mechanisms()]
        return OPERATORS[self.name](*bases, *self.constants, *self.factors, **self._resolved(setting))

    def kept_inputs(self, setting: Setting) -> Tensor | None:
        if self.name == "transpose":
            return None
        if self.name == "compose":
            return self._mechanisms()[0].kept_inputs(setting)
        kept = [operand.kept_inputs(setting) for operand in self._mechanisms()]
        if self.name == "concat" or (self.name == "add" and not self.has_scores):
            return None if any(k is None for k in kept) else torch.stack(torch.broadcast_tensors(*kept)).any(0)
        if self.name == "masked":
            kept.append(_kept_by(self._resolved(setting), setting))
        known = [k for k in kept if k is not None]
        return torch.stack(torch.broadcast_tensors(*known)).all(0) if known else None

    def input_entries(self, structure: Any) -> int | None:
        return None if self.name == "transpose" else self._mechanisms()[0].input_entries(structure)

    def output_structure(self, structure: Any) -> Any:
        if self.name == "transpose":  # it is called with the finer grid, on which its outputs lie
            return structure
        for operand in self._mechanisms()[: 2 if self.name == "compose" else 1]:
            structure = operand.output_structure(structure)
        return structure

    def chain(self) -> tuple[list[Mechanism], Mechanism] | None:
        operands = self._mechanisms()
        if self.name not in _CHAINED or len(operands) != 1 or len(self.factors) or len(self.held):
            return None
        below = operands[0].chain()
        return None if below is None else ([self, *below[0]], below[1])

    def _composed(self, setting: Setting) -> Basis:
        """The second mechanism stands on the outputs of the first: their number, and their structure."""
        first, second = self._mechanisms()
        basis = first.build(setting)
        structure = setting.structure
        if structure is not None and getattr(second, "name", "") != "transpose":
            structure = first.output_structure(structure)
        if structure is not setting.structure or (structure is None and basis.num_outputs != setting.num_inputs):
            x = setting.x.new_zeros(()).expand(basis.num_outputs, setting.x.shape[-1])
            setting = dataclasses.replace(setting, x=x, z=x, structure=structure)
        return OPERATORS["compose"](basis, second.build(setting))

    def parts(self) -> list[Mechanism]:
        if self.name != "concat":
            return [self]
        return [part for operand in self._mechanisms() for part in operand.parts()]

    def _mechanisms(self) -> list[Mechanism]:
        return list(self.operands)  # type: ignore[arg-type]

    def _resolved(self, setting: Setting) -> dict[str, Any]:
        if self.name == "dropout":
            return {"p": self.options["p"] if self.training else 0.0}
        return {key: _resolve(option, setting) for key, option in self.options.items()}

    def __repr__(self) -> str:
        first, *others = [*map(repr, self._mechanisms()), *map(repr, self.constants), *("factor" for _ in self.factors)]
        if self.name in _SIGNS:
            return f"({first} {_SIGNS[self.name]} {', '.join(others)})"
        given = {key: option for key, option in self.options.items() if option is not None}
        name = self.name if given.get("kind") != "softmax" else given.pop("kind")
        return f"{first}.{name}({', '.join([*others, *(f'{key}={option!r}' for key, option in given.items())])})"


#: Operators of one basis that makes nodes over it, the same for the same options.
_CHAINED = frozenset(("dropout", "leaky_relu", "map", "masked", "multiply", "normalize", "scaled", "softcap"))
_SIGNS = {"concat": "|", "compose": "@", "add": "+", "multiply": "*"}


def _parameter(factor: Tensor) -> nn.Parameter:
    """A factor that moves, saves and loads with the module; trained only if it was a parameter already."""
    return factor if isinstance(factor, nn.Parameter) else nn.Parameter(factor, requires_grad=False)


def _leaves(mechanism: Mechanism) -> str:
    return ", ".join(type(part).__name__ for part in mechanism.modules()
                     if isinstance(part, Mechanism) and not isinstance(part, Operation))


def _modules(options: dict[str, Any]) -> list[nn.Module]:
    """The modules that options hold, directly or in the fields of a support."""
    found: list[nn.Module] = []
    for option in options.values():
        if isinstance(option, nn.Module):
            found.append(option)
        elif isinstance(option, Support):
            found += _modules(_fields(option))
    return found


def _fields(support: Support) -> dict[str, Any]:
    return {f.name: getattr(support, f.name) for f in dataclasses.fields(support)}  # type: ignore[arg-type]


def _resolve(option: Any, setting: Setting) -> Any:
    """An option with the structure of the call and predicted positions in their places."""
    if option is STRUCTURE:
        if not isinstance(setting.structure, Graph | Support):
            raise StructureError("masked(keep=STRUCTURE)", "the layer must be called with a Graph or a Support",
                                 type(setting.structure).__name__, "Call it as layer(x, structure=graph).")
        return setting.structure
    if isinstance(option, Window) and option.grid is None and option.centre is None:
        return option.on(setting.structure) if isinstance(setting.structure, Grid) else option
    if isinstance(option, Position):
        return option(setting)
    if isinstance(option, Support):
        held = _fields(option)
        resolved = {name: _resolve(field, setting) for name, field in held.items()}
        changed = {name: field for name, field in resolved.items() if field is not held[name]}
        return dataclasses.replace(option, **changed) if changed else option  # type: ignore[type-var]
    return option


def _kept_by(options: dict[str, Any], setting: Setting) -> Tensor | None:
    """Entries that a mask leaves to some output: cheap masks only, a graph's isolated inputs are not looked for."""
    kept = options.get("drop") is None
    mask = options.get("keep" if kept else "drop")
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        mask = Padding(mask) if mask.dim() == 1 else DenseMask(mask)
    return _seen(mask, kept) if isinstance(mask, Support) else None


def _seen(mask: Support, kept: bool) -> Tensor | None:
    """The inputs in some pair that is in the mask (`kept`), or out of it; perhaps more, `None` for all."""
    if isinstance(mask, Not):
        return _seen(mask.kept, not kept)
    if isinstance(mask, And if kept else Or):
        known = [seen for side in (mask.first, mask.second) if (seen := _seen(side, kept)) is not None]
        return torch.stack(torch.broadcast_tensors(*known)).all(0) if known else None
    if kept:
        return mask.kept_inputs()
    if isinstance(mask, Padding):
        return ~mask.keep
    return (~mask.keep).any(-1) if isinstance(mask, DenseMask) else None
