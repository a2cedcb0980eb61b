"""`Mechanism`: a module that builds a basis from (x, z, structure).

A call of a layer has four steps:

1. Build: `Mechanism.evaluate(inputs)` calls `forward` and returns the basis, a tree that holds this call's tensors.
2. Key: `bases.tree.tree_key` reads from the basis what a plan may depend on: types, options, dtypes, classes of sizes.
3. Plan: `planning.plan.plan_for` finds the plan with this key, or makes it: the cheapest kernel that matches.
4. Run: the kernel reads the tensors from the basis and computes y.

This module is step 1. Nothing is kept from one call to the next.
"""

from __future__ import annotations

import copy
import enum
import inspect
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any, ClassVar, NamedTuple, Self, cast

import numpy as np
import torch
from torch import Tensor, nn

from structconv import torch_compat as private
from structconv.arguments import check_constructor, is_own
from structconv.bases.base import BASES, Algebra, Basis, is_basis
from structconv.bases.dense import Dense
from structconv.bases.linear import BlockDiagonal
from structconv.bases.placed import placed
from structconv.bases.tree import materialized
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.mechanisms.naming import (
    Named,
    called_on,
    called_with,
    check_name,
    check_structure,
    names_of_x,
    names_structures,
)
from structconv.mechanisms.samples import each_sample, separated
from structconv.mechanisms.visibility import (
    BY_INPUTS,
    BY_PAIRS,
    EVERY_INPUT,
    InputSet,
    Masks,
    cleared_by_pairs,
    visibility,
)
from structconv.planning.precision import autocast_dtype
from structconv.planning.precision import cast as cast_to
from structconv.primitives.segments import segment_sum
from structconv.shapes import check_choice, check_positive
from structconv.structures.batching import AnyStructure
from structconv.structures.graph import Graph
from structconv.structures.named import NamedStructures
from structconv.structures.output_positions import OutputPositions
from structconv.structures.samples import Samples
from structconv.structures.values import VALUES, FrozenValue, static
from structconv.written import written

__all__ = ["Channels", "Inputs", "Mechanism", "Position"]


@dataclass(frozen=True)
class Channels:
    """The channel counts of a layer, for `Mechanism.bind`: P of x, P' of z, Q of y.

    Example:

        >>> from structconv import Conv, Mechanism
        >>> class Scaling(Mechanism):
        ...     def bind(self, channels):
        ...         self.scale = torch.nn.Parameter(torch.ones(channels.inputs))
        ...     def forward(self, inputs):
        ...         return torch.diag((inputs.x * self.scale).mean(-1))[None]
        >>> Conv(Scaling(), 8, 4)(torch.randn(5, 8)).shape
        torch.Size([5, 4])
    """

    inputs: int
    others: int
    outputs: int


class Inputs(NamedTuple):
    """The arguments of one call of a mechanism. Most mechanisms read x, z, the structure and the sizes only.

    Args:
        x: (..., M, P). z: (..., N, P'), x itself if the call has no z. For a mechanism that reads no entries
            (`Given`, grids and graphs) both may be images (..., P, *S).
        structure: the structure of the call, or `None`.
        projected: x Theta_k (..., K, M, Q) and z Theta_k (..., K, N, Q), if a mechanism reads them.
        sibling: the other operand of a sum or a product, for a mechanism that reads it.
        visible: (..., M) booleans, the inputs that some output reads; `None` if masks hide none.
        output_positions: the positions of the outputs among the inputs; `None` if output n is at input n.
        cache: results computed from x in an earlier call.

    Example:

        >>> from structconv import Conv, Mechanism
        >>> class Ones(Mechanism):
        ...     def forward(self, inputs):
        ...         return torch.ones(1, inputs.num_inputs, inputs.num_outputs, dtype=inputs.dtype)
        >>> Conv(Ones(), 8, 4)(torch.randn(5, 8)).shape
        torch.Size([5, 4])
    """

    x: Tensor
    z: Tensor
    structure: Any = None
    projected: tuple[Tensor, Tensor] | None = None
    sibling: Any = None
    visible: Tensor | None = None
    output_positions: OutputPositions | None = None
    cache: Any = None

    @property
    def samples(self) -> Samples | None:
        """The samples of the batch, if the structure is one."""
        return getattr(self.structure, "samples", None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x."""
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        """The device of x."""
        return self.x.device

    @property
    def num_inputs(self) -> int:
        """M."""
        return self.x.shape[-2]

    @property
    def num_outputs(self) -> int:
        """N."""
        return self.z.shape[-2]

    def of_x(self, function: Callable[[Tensor, int], Any], unread: bool = False) -> Any:
        """Compute function(x, 0), one of a mechanism's `sources`; for a prepared x, return the stored result.

        With `unread` the result of the last entries may not be computed yet. Use it only if the result goes into the
        basis unchanged.
        """
        return function(self.x, 0) if self.cache is None else self.cache.of(function, unread)

    @property
    def start(self) -> int:
        """The position of the first input: 0 unless x is prepared and earlier inputs were dropped."""
        return 0 if self.cache is None else self.cache.dropped

    def positions_of_outputs(self) -> Tensor:
        """Return the position of each output among the existing inputs, (..., N) integers."""
        if self.output_positions is None:
            return torch.arange(self.num_outputs, device=self.device)
        return self.output_positions.of_outputs(self.num_outputs, self.device)

    def existing(self) -> int | Tensor:
        """Return the number of existing inputs: M, or (..., 1) without masked ones; for a batch, the number in each
        output's sample, (..., N)."""
        samples, visible = self.samples, self.visible
        if samples is None:
            return self.num_inputs if visible is None else visible.sum(-1, keepdim=True)
        of_inputs, of_outputs = samples.members(self.device)
        visible = torch.ones_like(of_inputs, dtype=torch.bool) if visible is None else visible
        return segment_sum(visible.to(self.dtype), of_inputs, samples.num_samples)[..., of_outputs]


#: The attributes that torch, or this package, sets in every module.
KEPT = frozenset((*nn.Module().__dict__, "_known_parts", "_known_in_layer", "_options_key", "_bound",
                  "_names", "_reads"))
#: Types whose objects do not change, and are compared by identity or by contents.
_FIXED = (float, complex, type, enum.Enum, np.generic, FunctionType, MethodType, partial, FrozenValue, nn.Module,
          Tensor)


def options(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module, by name, beside parameters, buffers and submodules; not tensors, which pruning,
    weight norms and replicas set in the place of a parameter at each call, and not a child of another module."""
    return {name: value for name, value in module.__dict__.items()
            if name not in KEPT and not isinstance(value, Tensor | nn.Module)}


def may_change(option: Any) -> bool:
    """Return True if an option may change in place without notice."""
    if isinstance(option, tuple | frozenset) and not hasattr(option, "__dict__"):
        return any(map(may_change, option))
    return type(option) not in VALUES and not isinstance(option, _FIXED)


_BATCHING = ("apart", "structure", "pairs", "offsets")
_READS = ("content", "structure", "projected", "sibling", "positions")


class Mechanism(Algebra["Mechanism"], Named, nn.Module):
    """A module that builds a basis: y = sum_k A_k^T x Theta_k with A = mechanism(inputs).

    A subclass defines one method, `forward(inputs)`, which returns a `Basis` or a tensor (..., K, M, N), and `size`, if
    K is not 1. `forward` may compute anything: parameters, submodules and options are read in each call. Create
    parameters in `bind(channels)`. Each layer copies its mechanism and calls `bind` on the copy, so that one mechanism
    may be used for many layers. Options that `__init__` sets are fixed once a layer has bound its copy.

    Args:
        structure: the name of the structure that it reads, in calls with several: `layer(x, structure={name: ...})`.
            `on` names it too, also where a subclass takes no such argument.

    Example:

        >>> from structconv import Conv, Eye, Mechanism
        >>> class Reversed(Mechanism):
        ...     def forward(self, inputs):
        ...         return torch.eye(inputs.num_inputs).flip(0)[None]
        >>> Conv(Reversed(), 1, 1, weight=Eye(), bias=False)(torch.arange(3.0)[:, None]).flatten()
        tensor([2., 1., 0.])
    """

    #: The name that a layer has for it; that of its class in snake case where it is empty.
    _role: str = ""
    #: True if its entries are scores, so that a softmax over them has a meaning.
    has_scores: bool = False
    #: The inputs that `forward` reads. "content": the numbers in x or z; without it the layer is linear in x.
    #: "structure": `inputs.structure`. "projected": `inputs.projected`. "sibling": `inputs.sibling`, the other operand
    #: of a sum or a product. "positions": `inputs.output_positions`; without it a basis of offsets is moved to the
    #: positions of the outputs, and of a basis of the structure the outputs at these positions are selected.
    reads: Collection[str] = ("content", "structure")
    #: The facts of a batch of samples that its basis depends on. "apart": anything; `forward` is called for each
    #: sample. "structure": the structure of the batch. "pairs": an entry depends on its own input and output only;
    #: `forward` is called once, and pairs of different samples are masked out. "offsets": like "pairs", and also on
    #: m - n.
    batching: str = "apart"
    #: Names of methods (x (..., M, P), position of the first) -> (..., K, M, D) or (..., K, M), a tensor or a lazy
    #: product, whose entry at m depends on input m and its position only. `forward` gets their results by
    #: `inputs.of_x(method)`, so that `Conv.prepare` can compute them once.
    sources: tuple[str, ...] = ()
    #: Applies an operator of the algebra to mechanisms: `operations.operation`.
    _operation: ClassVar[Callable[..., Mechanism]]
    #: True if the basis depends on the number of entries in x and z; if not, they may be images.
    _reads_sizes: bool = True
    #: True if its parts read different x, which a call passes by name.
    _reads_by_name: bool = False
    #: The name of the x that it reads, in a call with several; `of` gives it.
    _input_name: str | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        """Let the constructor name arguments of a wrong type."""
        super().__init_subclass__(**options)
        check_constructor(cls)
        if inspect.isfunction(cls.__dict__.get("size")):
            raise ConfigError(cls.__name__, "size must be a property", "a method", "Write @property above it.")

    def __init__(self, *, structure: str | None = None) -> None:
        super().__init__()
        self._structure_name = None if structure is None else check_name(type(self).__name__, structure)
        self._input_name = None

    def of(self, x: str) -> Self:
        """A copy that reads the x of this name, in calls with several: in an expression all parts that have no name yet
        do. Parts of `|` may read different ones: `(Incidence("sender") | Incidence("receiver")).of("nodes") |
        Identity().of("edges")` is called as `layer({"nodes": nodes, "edges": edges}, structure=graph)`."""
        if not isinstance(x, str) or not x:
            raise ConfigError(type(self).__name__, "of must be given the name of an x of the call", type(x).__name__,
                              "The tensor itself goes to the layer: layer(x={name: tensor, ...}).")
        twin = copy.deepcopy(self)
        for part in twin.modules():
            if isinstance(part, Mechanism) and part._input_name is None and not part._passes_structures:
                part._input_name = x
        return twin

    @property
    def size(self) -> int:
        """K, the number of matrices of the basis."""
        return 1

    def bind(self, channels: Channels) -> None:
        """Create the parameters for these channel counts."""

    def forward(self, inputs: Inputs) -> Basis | Tensor:
        """The basis for these inputs."""
        raise NotImplementedError(f"{type(self).__name__} must define forward(inputs), which returns a Basis")

    @private.calls_forward
    def __call__(self, *args: Any, **options: Any) -> Any:
        """`forward`, as any module's, with all products of the basis computed: whoever calls a mechanism may use its
        basis at once. A layer calls `evaluate`, and leaves them to the kernel."""
        if args and not hasattr(args[0], "num_inputs"):
            raise ConfigError(type(self).__name__, "a mechanism must be called with the Inputs of a call",
                              type(args[0]).__name__, "In a layer: Conv(mechanism, P, Q)(x); or mechanism.basis(x).")
        cache = getattr(args[0], "cache", None) if args else None
        if cache is not None:
            cache.compute_pending()
        return materialized(super().__call__(*args, **options))

    def basis(self, x: Tensor, structure: AnyStructure = None, *, z: Tensor | None = None) -> Basis:
        """The basis for inputs x (..., M, P), outputs z (..., N, P') (x itself if absent) and a structure."""
        check_structure("basis", structure, "mechanism.basis(x, z=z)")
        x = called_on(self, x)
        dtype = autocast_dtype(x)
        x, z = cast_to(x, dtype), cast_to(z, dtype)
        structure = called_with(self, structure)
        try:
            return cast(Basis, materialized(cast_to(self.evaluate(self._call_inputs(x, z, structure)[0]), dtype)))
        except AttributeError:
            check_bound("basis", self)
            raise

    def _call_inputs(self, x: Tensor, z: Tensor | None, structure: Any) -> tuple[Inputs, Tensor]:
        """The inputs of a call, and x with zeros where the weights are zero."""
        inputs = Inputs(x, x if z is None else z, structure)
        masking, values = self._may_mask_inputs(structure, z is not None), x
        if masking & BY_INPUTS:
            visible = visibility(self, inputs)
            values, scores = visible.cleared(x)
            inputs = inputs._replace(x=scores, z=visible.outputs(x) if z is None else z, visible=visible.values)
        if masking & BY_PAIRS:
            values, scores = cleared_by_pairs(self, inputs, values)
            inputs = inputs._replace(x=scores)
        return inputs, values

    def evaluate(self, inputs: Inputs, separate: bool = True) -> Basis:
        """The basis for the inputs of a call, moved to the positions of the outputs if the call has such.

        With `separate=False` the basis of a batch may have pairs of different samples, which the caller masks.
        """
        structure = inputs[2]
        if type(structure) is NamedStructures:
            inputs = self._own_inputs(inputs)
            structure = inputs[2]
        samples = None if structure is None else getattr(structure, "samples", None)
        to_positions = inputs.output_positions is not None and self._must_move(samples)
        by_sample, crosses = (False, False) if samples is None else self._in_batch(samples.square)
        if samples is not None and not samples.square and self.batching in ("pairs", "offsets") and (
                inputs.z is inputs.x):
            raise StructureError(type(self).__name__, "z must be given where the samples have other outputs than "
                                 "inputs", repr(samples), "Call it as layer(x, structure, z=z).")
        if by_sample:
            bases = [private.called(self, part) for part in each_sample(inputs)]
            basis: Any = BlockDiagonal(tuple([each if is_basis(each) else self._as_basis(each) for each in bases]))
        else:
            attrs = self.__dict__
            if (private.PLAIN_CALLS and not (attrs["_forward_hooks"] or attrs["_forward_pre_hooks"]
                                             or attrs["_backward_hooks"] or attrs["_backward_pre_hooks"]
                                             or "forward" in attrs or "_compiled_call_impl" in attrs)
                    and type(self).__call__ in private.PLAIN and nn.Module.__call__ is private.CALL
                    and not private.global_hooks()):
                basis = self.forward(inputs)  # `private.called`, for each node of each call
            else:
                basis = self(inputs)
            if type(basis) not in BASES:
                basis = self._as_basis(basis)
        if to_positions:
            return placed(basis, cast(OutputPositions, inputs.output_positions), inputs.num_outputs)
        return separated(basis, self._pairs_of(structure)) if crosses and separate else basis

    def _as_basis(self, basis: Any) -> Basis:
        """Return a result of `forward` that is no basis as one."""
        if isinstance(basis, Tensor) and basis.layout is torch.strided:
            return Dense(basis.unsqueeze(0) if basis.dim() == 2 else basis)
        sparse = isinstance(basis, Tensor)
        raise ConfigError(type(self).__name__, "forward must return a Basis, or a tensor (..., K, M, N)",
                          basis.layout if sparse else type(basis).__name__,
                          "Edges with weights are bases.Sparse(Graph(edge_index, num_nodes=N), values)." if sparse
                          else "")

    def _must_move(self, samples: Samples | None) -> bool:
        """Return True if `forward` leaves it to `evaluate` to move the basis to the positions of the outputs."""
        if samples is not None:
            raise StructureError("positions", "positions must be left out in a batch of samples", repr(samples),
                                 "Give x as (B, M, P), with a Padding mask.")
        if self.batching == "pairs" or "positions" in self.reads:
            return False
        if self.batching == "apart" or (self.batching == "structure" and self.has_scores):
            raise ConfigError(type(self).__name__, "positions and step need a mechanism whose basis depends only on "
                              "pairs or offsets", repr(self), "Set its batching to 'pairs' or 'offsets', or read "
                              "inputs.positions_of_outputs() and add 'positions' to its reads.")
        return True

    def _pairs_of(self, structure: Any) -> Samples:
        """Return the samples whose pairs (m, n) exist."""
        if type(structure) is NamedStructures:
            return cast(Samples, structure.samples)
        samples, outputs = structure.samples, self.output_structure(structure)
        return cast(Samples, samples if outputs is structure else samples.leading_to(outputs.samples))

    def _in_batch(self, square: bool) -> tuple[bool, bool]:
        """Return True if each sample of a batch is computed by itself, and True if pairs of the basis may cross
        samples, so that they must be masked. `square`: True if the outputs of the samples are their inputs."""
        batching = self.batching
        by_sample = batching == "apart" or (batching == "offsets" and not square)
        return by_sample, self.has_scores if by_sample else batching != "structure"

    def bound(self, in_channels: int, out_channels: int | None = None, other_channels: int | None = None) -> Mechanism:
        """A copy of the expression with parameters for these channel counts; shared parts stay shared."""
        mechanism = copy.deepcopy(self)
        mechanism._bind_all(Channels(in_channels, in_channels if other_channels is None else other_channels,
                                     in_channels if out_channels is None else out_channels))
        return mechanism

    def _bind_all(self, channels: Channels) -> None:
        """Make the parameters of all parts."""
        for module in self.modules():
            if isinstance(module, Mechanism | Mixing | Position):
                module.__dict__.pop("_bound", None)
                module.bind(channels)
        self._note_names()

    def _note_names(self) -> None:
        """Check the parts of a bound expression, and note the names of structures and of x in it."""
        parts = [module for module in self.modules() if isinstance(module, Mechanism | Position)]
        for module in sorted(parts, key=lambda part: len(list(part.modules()))):  # operands before their operation
            owner = type(module).__name__
            check_choice(owner, "batching", module.batching, _BATCHING)
            if isinstance(module.reads, str):
                raise ConfigError(owner, "reads must be a tuple", repr(module.reads),
                                  'A tuple of one word has a comma: reads = ("content",).')
            for fact in module.reads:
                check_choice(owner, "reads", fact, _READS)
            if isinstance(module, Mechanism):
                for name in module.sources:
                    if not callable(getattr(module, name, None)):
                        raise ConfigError(owner, "sources must name its methods (x, place) -> a leaf", repr(name))
                module.__dict__["_bound"] = True
        if names_structures(self):
            self.__dict__["_names"] = True
        names = names_of_x(self)
        if names[0] is not None:
            self.__dict__["_reads"] = names

    @property
    def _static_key(self) -> Hashable:
        """Return a key of the type and the options, under which values derived from a structure are remembered."""
        if torch.compiler.is_compiling():
            return None
        key = self.__dict__.get("_options_key")
        if key is None:
            settings = options(self)
            key = type(self), static(settings)
            if not any(map(may_change, settings.values())):
                self.__dict__["_options_key"] = key
        return cast(Hashable, key)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OF_EVERY_MECHANISM:
            self._check_assigned(name, value)
        own = self.__dict__
        if "_bound" in own and name in own and name[0] != "_" and name not in KEPT and not isinstance(value, Tensor):
            raise ConfigError(type(self).__name__, f"{name} is fixed once a layer has bound its mechanism", repr(value),
                              "Make a new layer.")
        self.__dict__.pop("_options_key", None)
        super().__setattr__(name, value)

    def _check_assigned(self, name: str, value: Any) -> None:
        """Raise `ConfigError` if the attribute would hide a method, or be hidden by an attribute of the class."""
        held, owner, got = getattr(type(self), name, None), type(self).__name__, type(value).__name__
        if isinstance(held, property) and held.fset is None:
            source = "heads" if name == "size" else f"own_{name}"
            raise ConfigError(owner, f"{name} is a read-only property of a mechanism", got, "Assign another name and "
                              f"define the property: {name} = property(lambda self: self.{source}).")
        hidden = isinstance(value, nn.Module | nn.Parameter) and not isinstance(held, property)
        if callable(held) or hidden:
            kind = "a method" if callable(held) else "an attribute"
            raise ConfigError(owner, f"{name} is {kind} of every mechanism, so nothing else may have this name", got,
                              f"Choose another name, such as self.own_{name}.")

    def __delattr__(self, name: str) -> None:
        self.__dict__.pop("_options_key", None)
        super().__delattr__(name)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy or a file, without notes for calls."""
        state: dict[str, Any] = super().__getstate__()
        return {name: value for name, value in state.items() if name != "_options_key" and name[:7] != "_known_"}

    def _branches(self) -> list[Mechanism]:
        """Return the parts that `|` joins, in order; the mechanism itself in a list if there is no `|`."""
        return [self]

    def _input_entries(self, structure: Any) -> int | None:
        """M by the structure of a call; `None` where x tells."""
        if type(structure) is Graph:
            return structure.num_inputs
        return None if structure is None else _count(structure, "num_inputs")

    def _output_entries(self, structure: Any) -> int | None:
        """N by the structure of a call; `None` where z tells."""
        return _count(self.output_structure(structure), "num_outputs")

    def _outputs_are(self, structure: Any, num_inputs: int) -> str | None:
        """Return "z" or "x" if the outputs are the entries of z or of x; `None` for other outputs, such as a coarser
        grid, edges or learned queries."""
        return "z"

    def _samples_of_outputs(self, structure: Any) -> Any:
        """The `Samples` whose entries are the outputs of a batch; `None` where those are the samples themselves."""
        return self._leads(structure).samples.of_outputs()

    def _may_mask_inputs(self, structure: Any, others: bool = False) -> int:
        """How masks may hide inputs in a call with this structure, and with other outputs than inputs: the bits
        `BY_INPUTS` and `BY_PAIRS`. Cheap, because each call needs it."""
        return 0

    def _visible_inputs(self, inputs: Inputs, masks: Masks) -> tuple[InputSet, InputSet]:
        """The inputs that are in some existing pair, in the sense of `masked`, and those whose weights may differ from
        zero."""
        return EVERY_INPUT, EVERY_INPUT

    def _needed_inputs(self, inputs: Inputs, masks: Masks, needed: InputSet) -> list[InputSet]:
        """The inputs that its scores read, where those above it read the scores of `needed`; none if it reads no x."""
        return [needed] if "content" in self.reads else []

    def _adopted_beside(self, sibling: Mechanism) -> Mechanism:
        """This mechanism as a term beside `sibling`, from which it takes the heads or queries that it has not."""
        return self

    def __repr__(self) -> str:
        own = written(self) if type(self).extra_repr is nn.Module.extra_repr else self.extra_repr()
        named = [] if self._structure_name is None else [f"structure={self._structure_name!r}"]
        of = "" if self._input_name is None else f".of({self._input_name!r})"
        return f"{type(self).__name__}({', '.join([*filter(None, [own]), *named])}){of}"

    def __truediv__(self, divisor: float | Tensor) -> Mechanism:
        if isinstance(divisor, nn.Parameter):
            raise ConfigError("a / b", "a mechanism must be divided by a number or a tensor", "an nn.Parameter",
                              "Learn the factor: scores * nn.Parameter(1 / b).")
        return super().__truediv__(divisor)

    def _operate(self, name: str, *args: Any, **options: Any) -> Mechanism:
        return Mechanism._operation(name, *args, **options)


#: The names of attributes that every mechanism has. `forward` is left out: torch and tools replace it in a module.
_OF_EVERY_MECHANISM = frozenset(
    name for kind in Mechanism.__mro__ if is_own(kind) for name, held in vars(kind).items()
    if isinstance(held, FunctionType | property) and not name.startswith("__")
) - {"forward"} | {"has_scores", "reads", "batching", "sources"}


def _count(structure: Any, name: str) -> int | None:
    """Return the number of inputs or outputs of a structure; `None` for a mask without sizes."""
    count: int | None = getattr(structure, name, None)
    return getattr(structure, "num_entries", None) if count is None else count


def check_mechanism(owner: str, module: Any) -> None:
    """Raise `ConfigError` if the module, or one of its operands, is no mechanism."""
    if not hasattr(module, "evaluate"):
        raise ConfigError(owner, "its mechanism must be a Mechanism", type(module).__name__,
                          "Register a hook, or derive a class, instead of wrapping one.")
    for operand in getattr(module, "operands", ()):
        check_mechanism(type(module).__name__, operand)


def check_bound(owner: str, mechanism: Mechanism) -> None:
    """Raise `ConfigError` where a mechanism, which may lack its parameters, was never given channel counts."""
    unbound = next((part for part in mechanism.modules()
                    if isinstance(part, Mechanism) and "_bound" not in part.__dict__), None)
    if unbound is not None:
        raise ConfigError(owner, "its mechanism must be bound to channel counts", repr(unbound),
                          "Make a new layer with it, or bind it: mechanism.bound(in_channels, out_channels).")


# -- modules of an expression that are no mechanisms ---------------------------------------------------------------

class Position(nn.Module):
    """A module that predicts a position for each output, `Inputs` -> (..., N): the center of a window.

    Example:

        >>> from structconv import Conv, DotProduct, Window
        >>> from structconv.mechanisms import Position
        >>> class Middle(Position):
        ...     def forward(self, inputs):
        ...         return inputs.x.new_full((inputs.num_outputs,), inputs.num_inputs / 2)
        >>> layer = Conv(DotProduct(dim=4).masked(keep=Window(1, center=Middle())).softmax(), 8, 4)
        >>> layer.basis(torch.randn(6, 8)).dense()[0].count_nonzero(1).tolist()
        [0, 0, 6, 6, 6, 0]
    """

    #: These attributes have the meaning of a mechanism's. Positions count from the first entry of the output's sample.
    reads: Collection[str] = ("content", "structure")
    batching: str = "apart"
    #: True if it reads x, False if it reads only z.
    reads_x: bool = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({written(self)})"

    def bind(self, channels: Channels) -> None:
        """Make the parameters for these channel counts."""


class Mixing(nn.Module):
    """W (K, J) over the heads of an expression: a number J for a learned one, normal with variance 1/K, or a matrix of
    K rows, trained if it is a parameter."""

    _role = "mixing"

    def __init__(self, heads: Any, size: int) -> None:
        super().__init__()
        self.drawn = not isinstance(heads, Tensor)
        if self.drawn:
            check_positive("mix", "heads", heads)
        elif not heads.is_floating_point():
            raise ConfigError("mix", "the matrix must be floating", str(heads.dtype), "Convert it with .float().")
        elif heads.dim() != 2 or heads.shape[0] != size:
            raise ShapeError("mix", f"the matrix must have shape (K={size}, J)", tuple(heads.shape))
        self.shape = (size, heads if self.drawn else heads.shape[1])
        if self.drawn or isinstance(heads, nn.Parameter):
            self.register_parameter("mixing", None if self.drawn else heads)
        else:
            self.register_buffer("mixing", heads)

    def bind(self, channels: Any) -> None:
        """Draw W again; a matrix from the user stays."""
        if self.drawn:
            self.mixing = nn.Parameter(torch.empty(self.shape))
            nn.init.normal_(self.mixing, std=self.shape[0] ** -0.5)

    def forward(self) -> Tensor:
        """W."""
        mixing: Tensor = self.mixing
        return mixing

    def extra_repr(self) -> str:
        """K and J."""
        return f"{self.shape[0]} -> {self.shape[1]}"


class Factor(nn.Module):
    """A tensor of numbers that moves, saves and loads with its expression: a buffer, or a parameter if it was one."""

    def __init__(self, factor: Tensor, role: str = "scale") -> None:
        super().__init__()
        #: The name that a layer has for it.
        self._role = role
        if isinstance(factor, nn.Parameter):
            self.factor: Tensor = factor
        else:
            self.register_buffer("factor", factor)

    def forward(self) -> Tensor:
        """The numbers."""
        return self.factor
