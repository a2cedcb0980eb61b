"""`Conv`: the layer y = sum_k A_k^T x Theta_k + b, for any structure, given or learned.

A call has four steps: check the arguments and evaluate the expression to a basis, a small tree with the tensors of this
call (`Conv._call`, `call_of`); compute its key and find the plan with this key (`plan_for`); run the plan. The layer
stores nothing between calls, so nothing in it can be stale.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.fx import Proxy

from structconv import ops as _ops  # noqa: F401 - registers the kernels
from structconv import torch_compat as private
from structconv.bases.base import Basis
from structconv.bases.tree import Shared
from structconv.errors import ConfigError, ShapeError, StructconvError, class_remedy
from structconv.mechanisms.expression import Inputs, Mechanism, check_bound, check_mechanism
from structconv.mechanisms.naming import check_structure, check_unread, names_of_x
from structconv.mechanisms.reach import reach_of
from structconv.mechanisms.visibility import BY_INPUTS, BY_PAIRS, cleared_by_pairs, visibility
from structconv.nn.cache import Cache
from structconv.nn.expressed import Expressed
from structconv.nn.images import grid_of
from structconv.nn.inputs import (
    CallNames,
    Several,
    channels_of,
    check_by_name,
    check_inputs,
    check_named,
    check_output_positions,
    fits,
    has_sizes,
    is_nested,
    other_outputs,
    packed,
    structures_of,
    unpacked,
    x_by_name,
)
from structconv.nn.layer import Device, copy_parameters, move, name_owner, named, recorded
from structconv.nn.relative import RelativeValue
from structconv.planning import Plan
from structconv.planning.plan import plan_for
from structconv.planning.precision import autocast_dtype, cast, cast_call
from structconv.planning.problem import Call, Image, PartInputs
from structconv.shapes import check_positive, check_tensor, leads_fit
from structconv.structures.batching import AnyStructure
from structconv.structures.output_positions import OutputPositions
from structconv.weights import BoundWeight, Full, MixtureWeights, Weight, WeightList

__all__ = ["Conv"]

T = TypeVar("T")
#: The errors of torch and Python for arguments that do not fit.
ERRORS = (RuntimeError, AttributeError, IndexError, TypeError)


class Conv(Expressed):
    """y_n = sum_k sum_m A_kmn x_m Theta_k + b (Andreoli 2019, eq. 8).

    The mechanism makes the basis A (K, M, N) of each call: only from the structure (convolution), or from x and z
    (attention). The weight yields Theta (K, P, Q), whole or in factors. The layer gives the channel counts to both.

    Args:
        mechanism: any mechanism or expression of mechanisms; the layer binds its own copy, whose options are fixed.
        in_channels: P; for several named x a dict {"nodes": P, "edges": P'}. out_channels: Q.
        weight: how Theta is parametrized, `Full()` if absent; a list gives one to each part of a `|`.
        bias: if True, add b (Q).
        other_channels: P' of z, if it differs from P.
        relative_value: a vector for each relative position, added to the values (Shaw et al. 2018, eq. 3).
        path, max_bytes: limits for the planner; see `ops.conv`.
        device, dtype: of all parameters, and of the masks and graphs in the expression.

    A call takes a structure, or several by name, `layer(x, structure={"bonds": graph, "line": grid})`; see
    `Mechanism.on`. It takes one x, or several by name for the parts of `|`, `layer({"nodes": x, "edges": e},
    structure=graph)`; see `Mechanism.of`. Each part then has its own Theta; z is shared by all parts, and defaults to
    the x of each part.

    Pass z by keyword: `layer(x, z=z)`, `layer(x, graph, z=z)`.

    Shapes: x (..., M, P), z (..., N, P') or none for z = x, y (..., N, Q); with `axes` images (..., P, *S) and
    (..., Q, *S'). A layer takes float64, float32, bfloat16 or float16. Under `torch.autocast` products and y have the
    dtype of autocast, as in torch's layers. A new layer preserves the variance of x if each A_k has columns of unit
    norm; `calibrate` does so for any basis.

    Raises:
        ShapeError: channels, entries, dtype or device of x or z do not fit.
        StructureError: the mechanism needs a structure that was not given.
        ConfigError: the weight does not fit the mechanism.

    Example:

        >>> from structconv import Conv, Cuboid, DotProduct, Grid
        >>> layer = Conv(DotProduct(heads=2).scaled().softmax() | Cuboid((3, 3)), 16, 32)
        >>> layer(torch.randn(5, 64, 16), Grid((8, 8))).shape
        torch.Size([5, 64, 32])
    """

    fixed = frozenset(("in_channels", "out_channels", "other_channels", "relative_value"))
    names_errors = True
    bias: nn.Parameter | None = private.parameter()
    #: In errors: the names of the layer and of its arguments x and z, and how to call it with z or a structure.
    call_names: ClassVar[CallNames] = CallNames("Conv", "x", "z", "layer(x, z=z)", "layer(x, graph)")

    def __init__(self, mechanism: Mechanism, in_channels: int | Mapping[str, int], out_channels: int, *,
                 weight: Weight | Sequence[Weight] | None = None, bias: bool = True,
                 other_channels: int | None = None, relative_value: RelativeValue | None = None,
                 path: str | None = None, max_bytes: int | None = None, device: Device = None,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not isinstance(mechanism, Mechanism):
            raise ConfigError("Conv", "mechanism must be a Mechanism", repr(mechanism), class_remedy(mechanism) or
                              "A basis or a tensor (..., K, M, N) becomes one by Given(basis).")
        self.in_channels = channels_of(mechanism, in_channels)
        self.out_channels = check_positive("Conv", "out_channels", out_channels)
        self.other_channels = self.in_channels if other_channels is None else other_channels
        if mechanism._reads_by_name and relative_value is not None:
            raise ConfigError("Conv", "relative_value must be in a layer of one x", repr(mechanism),
                              "Make a layer of the part that has it, and add both.")
        with nullcontext() if device is None else torch.device(device):
            self.weight = _weight(weight, mechanism, self.in_channels, out_channels)
            self.mechanism = mechanism.bound(self.in_channels, self.weight().head_channels, other_channels)
            self.relative_value = None if relative_value is None else relative_value.bound(self.weight())
            self.bias = nn.Parameter(torch.zeros(out_channels)) if bias else None
        self.path, self.max_bytes = path, max_bytes
        move(self, device, dtype)

    def forward(self, x: Several | Cache, structure: AnyStructure = None, *, z: Tensor | None = None, axes: int = 0,
                positions: int | Tensor | None = None, return_weights: bool = False) -> Any:
        """Compute y, and with `return_weights` the pair (y, A).

        With `axes`, x and y are images with this number of axes, and the image's grid is the structure. A is (..., K,
        E) in the order of the input edges if the basis is a list of edges (a graph, a window), else (..., K, M, N); it
        includes dropout. If parts read an x by name, A is a tuple with one tensor for each part. Nested tensors
        (torch.jagged) of sequences give nested tensors.

        `positions` are the positions of the outputs among the inputs, for masks and terms that depend on positions: an
        integer for the first output, or integers (..., N) for all. Default: output n has the position of input n. x may
        be a `Cache` from `prepare`.
        """
        if type(x) is Proxy:
            return recorded(self, x, structure, z=z, axes=axes, positions=positions, return_weights=return_weights)
        if positions is None and not (axes or return_weights):
            if z is None:
                y = self._directly(x, structure)
            else:
                y = self._directly_others(x, z) if structure is None and type(x) in (Tensor, Cache) else None
            if y is not None:
                return y
        try:
            if type(x) is not Tensor and is_nested(x, z):
                return self._nested(x, z, structure, return_weights=return_weights)
            call, image = self._call(x, z, structure, axes, positions)  # check the arguments, build the basis
            plan = plan_for(call, self.path, self.max_bytes, image)  # by the key of the call
            y = plan.run(call)
            if call.pending is not None:
                x.bind(plan, call, structure)  # type: ignore[union-attr]
            if z is not None and not axes and y.shape[-2] != z.shape[-2]:
                raise other_outputs(self.mechanism, x, z, y)
            return (y, plan.weights(call)) if return_weights else y
        except StructconvError as error:
            name_owner(self, error)
            raise
        except ERRORS:
            self._explain(x, z, structure, axes)
            raise

    #: The original `forward`: a step binds to a plan only if `forward` was not replaced.
    computes: ClassVar[Any] = forward

    def _call(self, x: Any, z: Tensor | None, structure: Any, axes: int, positions: Any = None
              ) -> tuple[Call, Image | None]:
        """Check the arguments of a call, and build its basis."""
        modules: Any = self._modules
        cache = None
        if structure is not None and isinstance(structure, Tensor):
            if not isinstance(x, dict | Cache):
                check_tensor(type(self).__name__, self.call_names.x, x)
            check_structure(type(self).__name__, structure, self.call_names.call)
        if type(x) is Cache:
            cache, x, structure = x, *self._of_prepared(x, structure, axes)
        mechanism, relative = self.mechanism, modules.get("relative_value")

        if cache is None:
            parameters = self._parameters
            theta: Weight = private.called(modules["weight"])
            bias: Tensor | None = parameters["bias"] if "bias" in parameters else self.bias  # noqa: SIM401 - lazy
            if self._added is not None:
                theta, bias = self._added(theta, bias)
        else:
            theta, bias = cache.constants()

        reads, expected_inputs = mechanism.reads, None
        if type(x) is dict or "_reads" in mechanism.__dict__:
            x = x_by_name(self, x)
        if type(structure) is dict or "_names" in mechanism.__dict__:
            structure = structures_of(mechanism, structure, axes)
        if cache is not None and structure is cache.structure:
            expected_inputs = cache.expected_inputs
        elif structure is not None and not axes:
            if "structure" not in reads:
                check_unread(structure, reads)
            if relative is not None:
                check_output_positions(structure)
            expected_inputs = mechanism._input_entries(structure)

        if type(x) is dict:
            if axes or z is not None or type(self.other_channels) is not dict or not fits(self, x, structure):
                check_by_name(self, x, z, structure, axes)
        elif (not isinstance(x, Tensor) or (expected_inputs is not None and expected_inputs != x.shape[-2])
              or (z is not None and not self._fit(x, z))
              or (is_compiling() and not axes and not (has_sizes(x, None, self.in_channels)
                                                       and (z is None or leads_fit(x, z))))):
            check_inputs(self, x, z, structure, axes)
        return call_of(mechanism, theta, bias, x, z, structure, axes,
                       None if relative is None else private.called(relative), positions, cache, reads)

    def _of_prepared(self, cache: Cache, structure: Any, axes: int) -> tuple[Tensor, Any]:
        """The prepared x, and the structure of the call, by default that for which x was prepared."""
        if cache.layer.__dict__ is not self.__dict__ or axes:  # torch.export has several proxies of one module
            name = self.call_names.x
            raise ConfigError(type(self).__name__, f"{name} must be prepared by this layer, as entries", repr(cache),
                              f"Prepare it by layer.prepare({name}).")
        cache.check()
        return cache.x, cache.structure if structure is None else structure

    #: (Theta, b) -> Theta and the sum that is added to each output; `None` if they are Theta and b.
    _added: ClassVar[Callable[[Any, Weight, Tensor | None], tuple[Weight, Tensor | None]] | None] = None

    def _constants(self) -> tuple[Weight, Tensor | None]:
        """Theta, and the sum that is added to each output: both depend on no input."""
        theta: Weight = private.called(self._modules["weight"])  # type: ignore[arg-type]
        return (theta, self.bias) if self._added is None else self._added(theta, self.bias)

    def _heads(self, x: Tensor, start: int = 0) -> Tensor | Shared:
        """x Theta_k, or x V_k where Theta_k = V_k O_k, (..., K, M, D), as a cache stores them."""
        theta: Weight = private.called(self._modules["weight"])  # type: ignore[arg-type]
        return cast(theta, autocast_dtype(x)).stored_heads(x)

    def _fit(self, x: Tensor, z: Tensor) -> bool:
        """Return True if x and z are plain tensors whose shapes, dtype and device match the layer. Runs in each call.
        """
        return (isinstance(z, Tensor) and not z.is_nested and z.dtype is x.dtype and z.device == x.device
                and has_sizes(x, None, self.in_channels) and has_sizes(z, None, self.other_channels))

    def basis(self, x: Several | Cache, structure: AnyStructure = None, *, z: Tensor | None = None, axes: int = 0,
              positions: int | Tensor | None = None) -> Basis:
        """The basis that the layer would apply; the arguments are those of a call."""
        return self._with_call(lambda call, _: call.materialized(), x, z, structure, axes, positions)

    def plan(self, x: Several | Cache, structure: AnyStructure = None, *, z: Tensor | None = None, axes: int = 0,
             positions: int | Tensor | None = None) -> Plan:
        """The plan that computes such a call: in which order, by which kernel; `print` it. Random numbers stay."""
        with torch.random.fork_rng([]):
            return self._planned(x, z, structure, axes, positions)[1]

    def prepare(self, x: Tensor, structure: Any = None) -> Cache:
        """Compute the part of the layer that depends only on x (..., M, P), for calls `layer(prepared, z=z)` that
        equal `layer(x, z=z)`.

        The result stores keys, values and all other results that `Mechanism.sources` names, and the structure as the
        default of later calls. `cache.append` and `step` add entries at the end. An entry that no later output reads
        (`Window`, with or without `Causal`) is dropped, unless a part counts positions from the first input.

        O(M) memory: x, and K D numbers of keys and values for each entry. It is valid for the current parameters: a
        call after they change raises an error. Gradients reach x and the parameters through each call, if gradients are
        enabled in `prepare`.
        """
        check_mechanism(type(self).__name__, self.mechanism)
        if self.mechanism._reads_by_name or "_reads" in self.mechanism.__dict__:
            raise ConfigError("Conv", "one x must be prepared, of a layer whose parts all read it",
                              repr(self.mechanism), "Prepare it for a layer of the part that reads it, and add both.")
        structures = None if structure is None else structures_of(self.mechanism, structure, 0)
        no_z: Any = None
        if self.mechanism._may_mask_inputs(structures) & BY_INPUTS:
            check_tensor("Conv", "x", x)
            visible = visibility(self.mechanism, Inputs(x, no_z, structures))
            x = visible.outputs(x) if visible.values is visible.scores else x
        return Cache(self, x, structure, reach_of(self.mechanism, structure))

    def step(self, cache: Cache, x: Tensor, *, z: Tensor | None = None, **options: Any) -> Any:
        """Append entries x (..., m, P) to the prepared ones and compute the outputs at their positions, of z or x."""
        if not isinstance(cache, Cache):
            raise ConfigError(type(self).__name__, "step must be given what prepare made", type(cache).__name__,
                              "cache = layer.prepare(x), then layer.step(cache, x).")
        first = cache.length
        try:
            x = cache.reserve(x)
            if z is None and not options and (y := cache.run_bound()) is not None:
                return y
            args, by_name = self._arguments(cache, x if z is None else z)
            return private.called(self, *args, **by_name, positions=first, **options)
        except BaseException:
            cache._cut(first)
            raise

    @torch.no_grad()
    def calibrate(self, x: Several, structure: AnyStructure = None, *, z: Tensor | None = None) -> Conv:
        """Scale Theta so that the output's variance equals that of x, for this x and structure: one forward pass.

        The variance is computed without the bias. A weight without numbers (`Eye`) does not change.
        """
        if is_nested(x, z):
            x, z, structure = unpacked(self, x, z, structure)
        call, plan = self._planned(x, z, structure, 0, None)
        variance = plan.run(call._replace(bias=None)).var()
        if variance > 0:
            numbers = x if isinstance(x, Tensor) else torch.cat([t.flatten() for t in x.values()])
            self.weight.scale_(float((numbers.var() / variance).sqrt()))
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, in place, as those of a new layer. Numbers given in the expression stay.

        Raises:
            ConfigError: a parameter that the mechanism did not make, for example that of a replaced projection.
        """
        self.weight.reset_parameters()
        if self.bias is not None:
            self.bias.zero_()
        drawn = copy.deepcopy(self.mechanism)
        for part in drawn.modules():
            reset: Any = None if isinstance(part, Mechanism) else getattr(part, "reset_parameters", None)
            if reset is not None:
                reset()
        drawn = drawn.bound(self.in_channels, self.weight().head_channels, self.other_channels)
        copy_parameters(drawn, self.mechanism)
        if self.relative_value is not None:
            copy_parameters(self.relative_value.bound(self.weight()), self.relative_value)

    def _nested(self, x: Any, z: Tensor | None, structure: Any, **options: Any) -> Any:
        """Run the layer on nested tensors: each sequence is one sample."""
        entries, others, structure = unpacked(self, x, z, structure)
        structures = structures_of(self.mechanism, structure, 0)
        if type(structure) is dict:
            check_named(type(self).__name__, x, structures)
        args, by_name = self._arguments(entries, others)
        y = self.forward(*args, **{**by_name, "structure": structure, **options})
        own, *weights = y if isinstance(y, tuple) else (y,)
        outputs = packed(own, x if z is None else z, self.mechanism._samples_of_outputs(structures))
        return (outputs, *weights) if weights else outputs

    def _arguments(self, x: Any, z: Tensor | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """x and z, if there is one, as `forward` takes them."""
        return (x,), {} if z is None else {"z": z}

    def _names(self, z: Any) -> CallNames:
        """The names of the arguments in errors, for calls with z or without."""
        return self.call_names

    def _planned(self, x: Any, z: Tensor | None, structure: Any, axes: int, positions: Any) -> tuple[Call, Plan]:
        return self._with_call(lambda call, image: (call, plan_for(call, self.path, self.max_bytes, image)),
                               x, z, structure, axes, positions)

    def _with_call(self, use: Callable[[Call, Image | None], T], x: Any, z: Tensor | None, structure: Any, axes: int,
                   positions: Any) -> T:
        """Return `use(call)`, with nested tensors unpacked and errors explained."""
        try:
            if is_nested(x, z):
                x, z, structure = unpacked(self, x, z, structure)
            return use(*self._call(x, z, structure, axes, positions))
        except ERRORS:
            self._explain(x, z, structure, axes)
            raise

    @named
    def _explain(self, x: Any, z: Tensor | None, structure: Any, axes: int) -> None:
        """Say what was wrong in a call that failed."""
        if type(x) is Cache:
            x, structure = self._of_prepared(x, structure, axes)
        check_mechanism(type(self).__name__, self.mechanism)
        x = x if is_nested(x, z) else x_by_name(self, x)
        check_inputs(self, x, z, structures_of(self.mechanism, structure, axes), axes)
        check_bound(type(self).__name__, self.mechanism)
        owner, of_x, of_z, *_ = self._names(z)
        if z is None and self.other_channels != self.in_channels:
            raise ShapeError(owner, f"{of_z} must be given, with shape (..., N, P'={self.other_channels})", "none",
                             f"{of_x} has P={self.in_channels} channels and cannot stand for it.")

    def extra_repr(self) -> str:
        return ", ".join([f"{self.in_channels}, {self.out_channels}", *filter(None, [super().extra_repr()])])


def call_of(mechanism: Mechanism, theta: Weight, bias: Tensor | None, x: Any, z: Tensor | None = None,
            structure: Any = None, axes: int = 0, relative: Tensor | None = None, positions: Any = None,
            cache: Cache | None = None, reads: Collection[str] | None = None) -> tuple[Call, Image | None]:
    """The arguments of a plan, with the basis of this x, z and structure; and the image that x is, if `axes`.

    Under autocast all are cast (`planning.precision`), unless only fixed numbers are multiplied, as in torch's pooling.
    """
    if type(x) is dict:
        if positions is not None:
            raise ConfigError("positions", "positions must be left out where parts read an x of their own",
                              ", ".join(map(repr, x)))
        return _call_by_name(mechanism, theta, bias, x, z, structure), None
    dtype = _autocast(mechanism, theta, x) if private.any_autocast() else None
    if dtype is not None:
        x, z, theta = cast(x, dtype), cast(z, dtype), cast(theta, dtype)
    entries, image, projected, visible_values, output_positions = x, None, None, None, None
    if axes:
        structure = grid_of(x, axes, structure)
        image = Image(axes, mechanism, structure)
        entries = x.flatten(-axes).mT if mechanism._reads_sizes else x
    values, masking = entries, mechanism._may_mask_inputs(structure, z is not None or positions is not None)
    if masking & BY_INPUTS:
        visible = visibility(mechanism, Inputs(entries, entries if z is None else z, structure))
        visible_values = visible.values
        if cache is None:
            z = visible.outputs(entries) if z is None else z
            values, entries = visible.cleared(entries)
            x = x if axes else values
    if positions is not None or (cache is not None and cache.dropped):
        output_positions = _output_positions(positions, cache, entries if z is None else z, structure)
    if masking & BY_PAIRS and cache is None:
        of_call = Inputs(entries, entries if z is None else z, structure, output_positions=output_positions)
        values, read = cleared_by_pairs(mechanism, of_call, values)
        entries, z, x = read, z if read is entries else of_call.z, x if axes else values
    heads = None if cache is None else cache.heads("projected" not in mechanism.reads and cache.pending is not None)
    if "projected" in (mechanism.reads if reads is None else reads):
        heads = theta.heads(values) if heads is None else heads
        scored = heads if values is entries else theta.heads(entries)
        projected = scored, scored if z is None else theta.heads(z)
    inputs = Inputs(entries, entries if z is None else z, structure, projected, None, visible_values, output_positions,
                    cache)
    pending, reused = (None, None) if cache is None else (cache.pending, cache.reused)
    call = Call(x, mechanism.evaluate(inputs), theta, bias, heads, relative, output_positions, pending, reused)
    return call if dtype is None else cast_call(call, dtype), image


def _call_by_name(mixture: Any, theta: Weight, bias: Tensor | None, x: dict[str, Tensor], z: Tensor | None,
                  structure: Any) -> Call:
    """Build the call of a mixture, whose parts each read an x by name."""
    dtype = _autocast(mixture, theta, next(iter(x.values()))) if private.any_autocast() else None
    if dtype is not None:
        x, z, theta = {name: cast(t, dtype) for name, t in x.items()}, cast(z, dtype), cast(theta, dtype)
    inputs = mixture.inputs_of_parts(x, z, structure)
    own: Any = PartInputs(inputs.values)
    return cast_call(Call(own, mixture.evaluate(inputs), theta, bias), dtype)


def _output_positions(positions: Any, cache: Cache | None, z: Tensor, structure: Any) -> OutputPositions | None:
    """Return the positions of the outputs of a call among the existing inputs."""
    output_positions = OutputPositions.of(positions)
    if output_positions is not None:
        output_positions.check(z.shape[-2])
    if cache is None or not cache.dropped:
        return output_positions
    if output_positions is None:
        raise ConfigError("Conv", "positions must be given where inputs are gone that no later output reads",
                          repr(cache), "Outputs that stand at the last inputs: layer.step(prepared, x).")
    cache.check_reach(output_positions.least(), structure)
    return output_positions.moved(cache.dropped)


def _autocast(mechanism: Mechanism, theta: Weight, x: Tensor) -> torch.dtype | None:
    """The dtype to which a call is cast; `None` if only fixed numbers are multiplied."""
    learned = theta.tensors or "content" in mechanism.reads or next(mechanism.parameters(), None) is not None
    return autocast_dtype(x) if learned else None


def _weight(weight: Weight | Sequence[Weight] | None, mechanism: Mechanism, channels: Any,
            outputs: int) -> BoundWeight:
    """The weight for the parts of a mechanism."""
    weight, sizes = Full() if weight is None else weight, [part.size for part in mechanism._branches()]
    if mechanism._reads_by_name:
        own = [channels[name] for name in names_of_x(mechanism)]
        return MixtureWeights(weight, own).bound(sizes, sum(own), outputs)
    if not isinstance(weight, (Weight, list, tuple)):
        raise ConfigError("Conv", "weight must be a Weight, or a list with one for each part of the mechanism",
                          repr(weight), class_remedy(weight))
    return (weight if isinstance(weight, Weight) else WeightList(weight)).bound(sizes, channels, outputs)
