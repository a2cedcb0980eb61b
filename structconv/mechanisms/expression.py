"""`Mechanism`: what makes a basis from (x, z, structure).

A mechanism has two sides. Called as a module it hands out the *leaves* of a call: tensors computed from x and z by its
parameters, masks, the structure's matrices. `fill` says, without computing anything, which value they are the leaves
of; filled with stand-ins it is the spec for which a plan is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from structconv import torch_private as private
from structconv.bases.base import Basis, ScoreMaps
from structconv.bases.block_diagonal import BlockDiagonal
from structconv.bases.placed import placed
from structconv.bases.spec import Leaf, StandIns, Token, materialised
from structconv.errors import ConfigError, StructureError
from structconv.mechanisms.inputs import Channels, Inputs
from structconv.mechanisms.mixing import Mixing
from structconv.mechanisms.naming import Named, called_with, check_name, names_structures
from structconv.mechanisms.options import KEPT, may_change, options
from structconv.mechanisms.reading import called_on, names_of_x
from structconv.mechanisms.samples import each_sample, left_out
from structconv.planning.precision import autocast_dtype, cast_leaves
from structconv.planning.precision import cast as cast_to
from structconv.shapes import check_choice
from structconv.structures.batching import AnyStructure
from structconv.structures.entries import show_use
from structconv.structures.named import NamedStructures
from structconv.structures.samples import Samples
from structconv.structures.values import static, tensors_in
from structconv.written import written

__all__ = ["Channels", "Inputs", "Leaves", "Mechanism", "Position", "check_bound", "check_mechanism"]

Leaves = tuple[Any, ...]
_BATCHING = ("apart", "structure", "pairs", "offsets")


class _TokenAttribute:
    """The token of a mechanism, made anew until a layer binds it; then it is an ordinary attribute."""

    def __get__(self, mechanism: Mechanism | None, owner: type) -> Any:
        if mechanism is None:
            return self
        return None if torch.compiler.is_compiling() else mechanism._token()


class Mechanism(ScoreMaps["Mechanism"], Named, nn.Module):
    """A module that makes a basis.

    A subclass says `size`; one with parameters makes them in `bind(channels)`, which the layer calls on its own copy,
    so that an expression is a recipe and may be used for many layers. It gives either `build(inputs)`, or the two
    halves of it: `forward(inputs)`, the leaves, and `fill(inputs, leaves)`, the basis over them. With the halves no
    call but the first of its kind builds a basis.

    Options are fixed once a layer has bound the mechanism; parameters and submodules may change at any time.

    Args:
        structure: the name of the structure that it reads, in calls with several: `layer(x, structure={name: ...})`.
            `on` names it too, also where a subclass takes no such argument.
    """

    #: What stands before the names of its parameters in the `state_dict` of a layer; nothing where it is empty.
    role: str = ""
    #: Whether a softmax over what is built means something.
    has_scores: bool = False
    #: Whether the leaves are made of `inputs.projected`.
    sees_projection: bool = False
    #: Whether the leaves are made of `inputs.sibling`, the mechanism beside this one in a sum or a product.
    reads_sibling: bool = False
    #: Whether the leaves depend on x or z, or on more of the call than the structure, the dtype and the device.
    reads_entries: bool = True
    #: Whether the leaves depend on the numbers in x or z, so that the layer is not linear in x.
    reads_content: bool = True
    #: How it takes a batch of samples. "apart": it is asked for each sample alone. "structure": the structure of the
    #: batch tells it all. "pairs": an entry depends on its own input and output alone, so that it makes those of the
    #: whole batch, and pairs of different samples are left out. "offsets": so too, and on how far apart they are.
    batching: str = "apart"
    #: Whether it heeds `inputs.places` itself. Else what it makes by offsets is moved to where the outputs stand, and
    #: of what it makes by the structure the outputs there are taken.
    reads_places: bool = False
    #: Names of methods (x (..., M, P), place of the first) -> (..., K, M, D) or (..., K, M), a tensor or a lazy leaf,
    #: whose entry at m comes of input m and its place alone: `forward` asks for them by `inputs.of_x`, and
    #: `Conv.prepare` ahead.
    sources: tuple[str, ...] = ()
    #: What an operator of the algebra makes of mechanisms (`operations`).
    operation: ClassVar[Callable[..., Mechanism]]
    #: Whether its parts read inputs of their own, so that a call gives them by name.
    reads_by_name: bool = False
    #: The name of the x that it reads, in a call with several; `of` gives it.
    input_name: str | None = None
    #: Stands for the type and the options among the leaves of a call.
    token: Any = _TokenAttribute()

    def __init__(self, *, structure: str | None = None) -> None:
        super().__init__()
        self.structure_name = None if structure is None else check_name(type(self).__name__, structure)
        self.input_name = None

    def of(self, x: str) -> Self:
        """A copy that reads the x of this name, in calls with several: in an expression all parts that have no name yet
        do. Parts of `|` may read different ones: `(Incidence("sender") | Incidence("receiver")).of("nodes") |
        Identity().of("edges")` is called as `layer({"nodes": nodes, "edges": edges}, structure=graph)`.
        """
        if not isinstance(x, str) or not x:
            raise ConfigError(type(self).__name__, "of must be given the name of an x of the call", type(x).__name__,
                              "The tensor itself goes to the layer: layer(x={name: tensor, ...}).")
        twin = copy.deepcopy(self)
        for part in twin.modules():
            if isinstance(part, Mechanism) and part.input_name is None and not part.hands_on:
                part.input_name = x
        return twin

    def __init_subclass__(cls, **options: Any) -> None:
        """A class that gives one of the two ways to make a basis does not inherit the other."""
        super().__init_subclass__(**options)
        if "build" in cls.__dict__ and "forward" not in cls.__dict__:
            cls.forward, cls.fill = Mechanism.forward, Mechanism.fill  # type: ignore[method-assign]
        elif "build" not in cls.__dict__ and ("forward" in cls.__dict__ or "fill" in cls.__dict__):
            cls.build = _build_of(cls)  # type: ignore[method-assign, assignment]

    @property
    def size(self) -> int:
        """K, the number of matrices of the basis."""
        return 1

    def bind(self, channels: Channels) -> None:
        """Make the parameters for these channel counts."""

    def forward(self, inputs: Inputs) -> Leaves:
        """The leaves of the basis for these inputs, in the order in which `fill` takes them."""
        return (self.build(inputs),)

    def fill(self, inputs: Inputs, leaves: Iterator[Any]) -> Basis:
        """The basis over these leaves, or its spec over stand-ins of them; computes nothing."""
        return cast(Basis, next(leaves))

    def build(self, inputs: Inputs) -> Basis:
        """The basis for these inputs."""
        raise NotImplementedError(f"{type(self).__name__} must define build, or forward and fill")

    def basis(self, x: Tensor, z: Tensor | None = None, structure: AnyStructure = None) -> Basis:
        """The basis for inputs x (..., M, P), outputs z (..., N, P') (x itself if absent) and a structure."""
        x = called_on(self, x)
        dtype = autocast_dtype(x)
        x, z = cast_to(x, dtype), cast_to(z, dtype)
        structure = called_with(self, structure)
        inputs = Inputs(x, x if z is None else z, structure)
        try:
            inputs = inputs._replace(kept=self.kept_inputs(inputs)) if self.hides(structure) else inputs
            return self.filled(inputs, cast_leaves(self.leaves(inputs), dtype))
        except AttributeError:
            check_bound("basis", self)
            raise

    def leaves(self, inputs: Inputs, closed: bool = True) -> Leaves:
        """The options' token, then the leaves, and for a batch, where it is to be `closed`, what leaves pairs out."""
        structure = inputs[2]
        if type(structure) is NamedStructures:
            inputs = self._told(inputs)
            structure = inputs[2]
        samples = None if structure is None else getattr(structure, "samples", None)
        if inputs.places is not None and self._is_moved(samples):
            return self.token, *private.called(self, inputs), inputs.places
        if samples is None:
            return self.token, *private.called(self, inputs)
        if self.batching in ("pairs", "offsets") and inputs.z is inputs.x and not samples.square:
            raise StructureError(type(self).__name__, "z must be given where the samples have other outputs than "
                                 "inputs", repr(samples), "Call it as layer(x, z, structure).")
        own = each_sample(inputs) if self._asked_apart(samples) else (inputs,)
        leaves = self.token, *(leaf for part in own for leaf in private.called(self, part))
        return (*leaves, self._pairs_of(structure)) if closed and self._is_open(samples) else leaves

    def filled(self, inputs: Inputs, leaves: Sequence[Any]) -> Basis:
        """The basis over what `leaves` gave, or its spec over their stand-ins."""
        return self._spec(inputs, leaves) if isinstance(leaves, StandIns) else self._fill_next(
            inputs, iter(materialised(leaves)))

    def _spec(self, inputs: Inputs, leaves: StandIns) -> Basis:
        """The spec, made of options and leaves alone: whatever else `fill` read would stay behind in the plan."""
        owner, given = type(self).__name__, iter(leaves)
        try:
            spec = self._alone()._fill_next(inputs.sealed(), given)
        except AttributeError as error:
            raise ConfigError(owner, "fill must read nothing but options and leaves", str(error),
                              "Return it from forward, as a leaf, or make it an option.") from error
        except StopIteration:
            raise ConfigError(owner, "fill must take as many leaves as forward gives", "more",
                              "forward returns a tuple of them.") from None
        except TypeError as error:
            if Leaf.__name__ not in str(error):
                raise
            raise ConfigError(owner, "fill must compute nothing of a leaf", str(error),
                              "Compute in forward, and return what comes of it as a leaf.") from error
        if (left := len(list(given))):
            raise ConfigError(owner, "fill must take as many leaves as forward gives", f"{left} fewer",
                              "forward returns a tuple of them.")
        if tensors_in(spec):
            if torch.jit.is_tracing():  # where sizes are tensors
                raise ConfigError(type(self).__name__, "an expression must be exported or compiled", "torch.jit.trace",
                                  "Use torch.export.export(layer, (x,)) or torch.compile(layer).")
            raise ConfigError(type(self).__name__, "fill must take tensors from its leaves", repr(spec),
                              "Return the tensor from forward, as a leaf.")
        show_use(lambda: self._alone()._fill_next(inputs.showing(), iter(leaves)))
        return spec

    def _alone(self) -> Self:
        """A twin with the options, and with the mechanisms inside, but without tensors, modules and modes."""
        twin = object.__new__(type(self))
        twin.__dict__.update(options(self), _parameters={}, _buffers={}, _modules=_mechanisms_alone(self))
        return twin

    def _fill_next(self, inputs: Inputs, leaves: Iterator[Any], closed: bool = True) -> Basis:
        """`fill`, behind the token; for a batch without the pairs of different samples where it is to be `closed`."""
        next(leaves)
        if type(inputs[2]) is NamedStructures:
            inputs = self._told(inputs)
        samples = getattr(inputs[2], "samples", None)
        if samples is None:
            basis = self.fill(inputs, leaves)
            if inputs.moved and self._is_moved(None):
                return placed(basis, next(leaves), inputs.num_outputs)
            return basis
        if self._asked_apart(samples):
            basis = BlockDiagonal(tuple(self.fill(part, leaves) for part in each_sample(inputs)))
        else:
            basis = self.fill(inputs, leaves)
        return left_out(basis, next(leaves)) if closed and self._is_open(samples) else basis

    def _is_moved(self, samples: Samples | None) -> bool:
        """Whether what it makes is still to be moved to where the outputs stand."""
        if samples is not None:
            raise StructureError("positions", "positions must be left out in a batch of samples", repr(samples),
                                 "Give x as (B, M, P), with a Padding mask.")
        if self.batching == "pairs" or self.reads_places:
            return False
        if self.batching == "apart" or (self.batching == "structure" and self.has_scores):
            raise ConfigError(type(self).__name__, "positions must be left out, for what it makes is not known to "
                              "depend on offsets alone; nor can it be stepped", repr(self), "A mechanism says so by "
                              "batching ('pairs' or 'offsets'), or heeds inputs.places and says reads_places = True.")
        return True

    def _pairs_of(self, structure: Any) -> Samples:
        """Which pairs are of one sample."""
        if type(structure) is NamedStructures:
            return cast(Samples, structure.samples)
        samples, led = structure.samples, self.output_structure(structure)
        return cast(Samples, samples if led is structure else samples.leading_to(led.samples))

    def _asked_apart(self, samples: Samples) -> bool:
        """Whether it is asked for each sample alone."""
        return self.batching == "apart" or (self.batching == "offsets" and not samples.square)

    def _is_open(self, samples: Samples) -> bool:
        """Whether what it makes of a batch may have pairs of different samples, which are still to be left out."""
        return self.has_scores if self._asked_apart(samples) else self.batching != "structure"

    def bound(self, in_channels: int, out_channels: int | None = None, other_channels: int | None = None) -> Mechanism:
        """A copy of the expression with parameters for these channel counts; shared parts stay shared."""
        mechanism = copy.deepcopy(self)
        mechanism._bind_all(Channels(in_channels, in_channels if other_channels is None else other_channels,
                                     in_channels if out_channels is None else out_channels))
        return mechanism

    def _bind_all(self, channels: Channels) -> None:
        """Make the parameters of all parts, and fix their options."""
        for module in self.modules():
            if isinstance(module, Mechanism | Mixing | Position):
                module.__dict__.pop("_bound", None)
                module.bind(channels)
        self._fix_all()

    def _fix_all(self) -> None:
        """Fix the options of all parts, and note what they name."""
        for module in self.modules():
            if isinstance(module, Mechanism | Position):
                check_choice(type(module).__name__, "batching", module.batching, _BATCHING)
            if isinstance(module, Mechanism):
                module._check_sources()
                module._fix_options()
        if names_structures(self):
            self.__dict__["_names"] = True
        names = names_of_x(self)
        if names[0] is not None:
            self.__dict__["_reads"] = names

    def _check_sources(self) -> None:
        """Raise `ConfigError` where a source is no method."""
        for name in self.sources:
            if not callable(getattr(self, name, None)):
                raise ConfigError(type(self).__name__, "sources must name its methods (x, place) -> a leaf", repr(name))

    def _gives_basis(self) -> bool:
        """Whether the leaf is the basis itself."""
        return type(self).forward is Mechanism.forward

    def _inside(self) -> list[Mechanism]:
        """The mechanisms inside whose options `fill` may read."""
        return [module for module in self.modules() if isinstance(module, Mechanism) and module is not self]

    def _token(self) -> Token:
        """The token of the types and the options, which do not matter where the leaf is the basis itself."""
        if self._gives_basis():
            return Token.of((type(self),))
        return Token.of((type(self), static(options(self)), *(module.token for module in self._inside())))

    def _fix_options(self) -> None:
        self.__dict__["_bound"] = True
        self.__dict__.pop("token", None)
        if self._gives_basis() or not (self._inside() or any(map(may_change, options(self).values()))):
            self.__dict__["token"] = self._token()

    def __setattr__(self, name: str, value: Any) -> None:
        bound = "_bound" in self.__dict__ and name not in KEPT
        if bound and name in self.__dict__ and not (name.startswith("_") or isinstance(value, Tensor)):
            raise ConfigError(type(self).__name__, f"{name} is fixed once a layer has bound its mechanism", repr(value),
                              "Make a new layer.")
        super().__setattr__(name, value)
        if bound and name in self.__dict__ and not isinstance(value, Tensor):
            self._fix_options()

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if "_bound" in self.__dict__:
            self._fix_options()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or a file has, which finds its token anew."""
        state: dict[str, Any] = super().__getstate__()
        state.pop("token", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Of a copy or a file, whose options may be other objects."""
        super().__setstate__(state)
        if "_bound" in self.__dict__:
            self._fix_options()

    def parts(self) -> list[Mechanism]:
        """What `|` joins, in order; itself where there is none."""
        return [self]

    def input_entries(self, structure: Any) -> int | None:
        """M by the structure of a call; `None` where x alone tells."""
        return None if structure is None else _count(structure, "num_inputs")

    def output_entries(self, structure: Any) -> int | None:
        """N by the structure of a call; `None` where z alone tells."""
        led = self.output_structure(structure)
        return _count(led, "num_outputs")

    def _outputs_are(self, structure: Any, num_inputs: int) -> str | None:
        """Whose entries the outputs are: those of "z", or, whatever z is, those of "x"; `None` for others, of which
        nothing is known but how many there are (a coarser grid, edges, learnt queries)."""
        return "z"

    def _samples_of_outputs(self, structure: Any) -> Any:
        """The `Samples` whose entries are the outputs of a batch; `None` where those are the samples themselves."""
        return self._leads(structure).samples.of_outputs()

    def hides(self, structure: Any) -> bool:
        """Whether `kept_inputs` is to be asked in a call with this structure. Cheap: it is asked in each."""
        return False

    def kept_inputs(self, inputs: Inputs) -> Tensor | None:
        """Which entries some output can see, (..., M) booleans; `None` for all."""
        return None

    def _adopted_beside(self, sibling: Mechanism) -> Mechanism:
        """This mechanism as a term beside `sibling`, from which it may take what it left open (heads, queries)."""
        return self

    def __repr__(self) -> str:
        own = written(self) if type(self).extra_repr is nn.Module.extra_repr else self.extra_repr()
        named = [] if self.structure_name is None else [f"structure={self.structure_name!r}"]
        of = "" if self.input_name is None else f".of({self.input_name!r})"
        return f"{type(self).__name__}({', '.join([*filter(None, [own]), *named])}){of}"

    def _operate(self, name: str, *args: Any, **options: Any) -> Mechanism:
        return Mechanism.operation(name, *args, **options)


def _mechanisms_alone(module: nn.Module) -> dict[str, Any]:
    """The mechanisms among the submodules, and lists of such; one that is compiled, or wrapped, as it is."""
    found: dict[str, Any] = {}
    for name, part in module._modules.items():
        if isinstance(part, nn.ModuleList | nn.ModuleDict):
            found[name] = object.__new__(type(part))
            found[name].__dict__.update(part.__dict__, _modules=_mechanisms_alone(part))
        elif hasattr(part, "leaves"):
            found[name] = part._alone() if isinstance(part, Mechanism) else part
    return found


def _count(structure: Any, name: str) -> int | None:
    """How many inputs or outputs a structure has; entries where both are the same; `None` where it is a filter only."""
    found: int | None = getattr(structure, name, None)
    return getattr(structure, "num_entries", None) if found is None else found


def check_mechanism(owner: str, module: Any) -> None:
    """Raise `ConfigError` where another module stands in the place of a mechanism, here or further down."""
    if not hasattr(module, "leaves"):
        raise ConfigError(owner, "its mechanism must be a Mechanism", type(module).__name__,
                          "Register a hook, or derive a class, instead of wrapping one.")
    for operand in getattr(module, "operands", ()):
        check_mechanism(type(module).__name__, operand)


def check_bound(owner: str, mechanism: Mechanism) -> None:
    """Raise `ConfigError` where a mechanism, which may lack its parameters, was never given channel counts."""
    if "_bound" not in mechanism.__dict__:
        raise ConfigError(owner, "its mechanism must be bound to channel counts", repr(mechanism),
                          "Make a new layer with it, or bind it: mechanism.bound(in_channels, out_channels).")


def _build_of(cls: type[Mechanism]) -> Callable[[Mechanism, Inputs], Basis]:
    """`build` by the two halves that a class has, also where a subclass calls it by `super()`."""
    def build(self: Mechanism, inputs: Inputs) -> Basis:
        """The basis for these inputs."""
        return cls.fill(self, inputs, iter(materialised(cls.forward(self, inputs))))

    return build


class Position(nn.Module):
    """A module that predicts from `Inputs` a position for each output, (..., N): the centre of a window."""

    #: As those of a mechanism; positions are those in the sample of each output.
    reads_structure: bool = True
    batching: str = "apart"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({written(self)})"

    def bind(self, channels: Channels) -> None:
        """Make the parameters for these channel counts."""
