"""Expressions of mechanisms: `a | b`, `a @ b`, `a + b`, `a.softmax()`, ... as modules.

The `forward` of an expression evaluates its operands, which gives bases, and applies the same operator of the algebra
to these bases. So the basis of a call is a tree with the shape of the expression: one node for each operator. An
operator on one basis is a step; a node has a chain of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

from structconv import torch_compat as private
from structconv.bases.algebra import check_mask, check_normalization  # which registers the operators, too
from structconv.bases.base import OPERATORS, Basis
from structconv.bases.entrywise import LeakyReLU, Masked, Normalized, sized
from structconv.bases.linear import Concat, Scaled
from structconv.bases.scores import Bilinear
from structconv.bases.tree import Function, Projected
from structconv.errors import ConfigError, ShapeError, StructureError, class_remedy
from structconv.mechanisms.expression import Factor, Inputs, Mechanism, Mixing
from structconv.mechanisms.given import added
from structconv.mechanisms.masks import CalledWith, Mask, covers_inputs
from structconv.mechanisms.mixture import mixed
from structconv.mechanisms.naming import reads_of
from structconv.mechanisms.samples import NORMALIZING, ZERO_PRESERVING, separated, separations
from structconv.mechanisms.visibility import EVERY_INPUT, InputSet, Masks
from structconv.shapes import check_number
from structconv.structures.graph import Graph
from structconv.structures.masks import Support
from structconv.structures.named import NamedStructures, Place, agreed, behind
from structconv.structures.samples import Samples
from structconv.structures.supports import EdgeSupport
from structconv.written import text as as_text

__all__ = ["Operation"]


class Step(NamedTuple):
    """An operator on one basis: its name, its options, and whether it reads a module (a mask, a factor) in each call.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    reads: bool = False


#: Applies a step: (basis, the module that the step reads, the inputs, the samples of a batch) -> basis.
Build = Callable[[Basis, Any, Any, Any], Basis]


def builder(step: Step) -> Build:
    """The function that applies a step in each call."""
    options, operator = dict(step.options), OPERATORS[step.name]
    if step.name in _OWN:
        return _OWN[step.name](options, operator)
    if not step.reads:
        options = {"second": options["factor"]} if step.name == "multiply" else options
        return lambda basis, *_: cast(Basis, operator(basis, **options))
    if step.name == "map":
        return lambda basis, module, *_: cast(Basis, operator(basis, Function(module)))
    options.pop("heads", None)  # the matrix has them
    return lambda basis, module, *_: cast(Basis, operator(basis, module(), **options))


def node_of(step: Step) -> tuple[Callable[..., Basis] | None, tuple[Any, ...]]:
    """The class of the result of a step on a basis that is no `|`, and its arguments after the basis, which the
    expression has checked. `None` if each call applies the operator of the algebra."""
    options = dict(step.options)
    if step.name == "leaky_relu":
        return LeakyReLU, (float(options["negative_slope"]),)
    if step.name == "normalize" and options["kind"] in ("softmax", "count", "sigmoid"):
        return Normalized, (options["kind"], options["over"])
    if step.name == "multiply" and not step.reads:
        return Scaled, (options["factor"],)
    return None, ()


def _scaled(options: dict[str, Any], operator: Any) -> Build:
    scale = options["scale"]

    def scaled(basis: Basis, *_: Any) -> Basis:
        if scale is None and type(basis) is Bilinear:
            query: Any = basis.query  # a product that is not computed yet has D without its shape
            depth = query.weight.shape[0] // query.heads if type(query) is Projected else query.shape[-1]
            if type(depth) is int:
                return Scaled(basis, depth ** -0.5)
        return cast(Basis, operator(basis, scale))

    return scaled


def _masked(options: dict[str, Any], operator: Any) -> Build:
    name = "keep" if options["kept"] else "drop"

    def masked(basis: Basis, own: Any, inputs: Any, samples: Any) -> Basis:
        mask = private.called(own, inputs) if samples is None else private.called(own, inputs, samples)
        if mask is None:
            return basis
        if type(mask) is Graph and name == "keep" and type(basis) is not Concat:
            inner = sized(basis)
            if mask.num_inputs == inner.num_inputs and mask.num_outputs == inner.num_outputs:
                edges = object.__new__(EdgeSupport)  # of a graph: nothing to check in each call
                edges.__dict__["graph"] = mask
                return Masked(basis, edges)
        if name == "keep" and isinstance(mask, Support) and type(basis) is not Concat:
            mask.check("masked", basis.num_inputs, basis.num_outputs)
            return Masked(basis, mask)
        return cast(Basis, operator(basis, **{name: mask}))

    return masked


def _dropout(options: dict[str, Any], operator: Any) -> Build:
    def dropout(basis: Basis, node: Any, *_: Any) -> Basis:
        if not (node.training and options["p"] > 0):
            return basis
        return cast(Basis, operator(basis, **options, seed=torch.randint(0, 2**62, (), dtype=torch.int64)))

    return dropout


_OWN: dict[str, Callable[[dict[str, Any], Any], Build]] = {
    "scaled": _scaled, "masked": _masked, "dropout": _dropout}


def shown(text: str, step: Step, module: Any) -> str:
    """The step in the text of an expression."""
    options = {key: option for key, option in step.options if option is not None}
    if step.name == "multiply":
        return f"({text} * {options.get('factor', 'factor')})"
    if step.name == "masked":
        return f"{text}.masked({'keep' if options['kept'] else 'drop'}={module!r})"
    if step.name == "map":
        return f"{text}.map({as_text(options.get('fn', module))})"
    if step.name == "mix":
        return f"{text}.mix({options['heads']})"
    if step.name == "softmax_with_sink":
        return f"{text}.softmax(over={options['over']!r}, sink={options.get('sink', 'sink')})"
    name = step.name if options.get("kind") != "softmax" else options.pop("kind")
    return f"{text}.{name}({', '.join(f'{key}={option!r}' for key, option in options.items())})"


#: Operators that join pair by pair.
_ENTRYWISE_JOINS = (None, "add", "multiply")
#: Operators that normalize, with the kind of those whose name says it.
_NORMALIZATION_KINDS = {"normalize": None, "softmax_with_sink": "softmax", "log_softmax": "log_softmax"}
#: The argument of an operator that is a number.
_NUMBERS = {"leaky_relu": "negative_slope", "softcap": "cap", "scaled": "scale"}
_SIGNS = {"concat": "|", "compose": "@", "add": "+", "multiply": "*"}


def operation(name: str, first: Mechanism, *others: Any, **options: Any) -> Mechanism:
    """An operator of the algebra over mechanisms: one that joins two of them, or one more step on one."""
    mixture = mixed(name, first, *others)
    if mixture is not None:
        return mixture
    if others and isinstance(others[0], Mechanism):
        return Operation(name, (first, others[0]))
    if name == "add":
        return added(first, others[0])
    if name in ("concat", "compose", "outer"):
        raise ConfigError(f"Mechanism.{name}", "both operands must be mechanisms", type(others[0]).__name__,
                          class_remedy(others[0]) or "A basis or a tensor (..., K, M, N) becomes one by Given(basis).")
    node = first if isinstance(first, Operation) else Operation(None, (first,))
    step, module = _step(name, first, others, options)
    modules = [*node.step_modules, *([] if module is None else [module])]
    return Operation(node.join, tuple(node.mechanisms()), (*node.steps, step), modules)


def _step(name: str, operand: Mechanism, others: tuple[Any, ...], options: dict[str, Any]
          ) -> tuple[Step, nn.Module | None]:
    """A step, and the module that it reads in each call."""
    if name == "masked":
        mask, kept = check_mask(options["keep"], options["drop"], str, CalledWith), options["drop"] is None
        return Step("masked", (("kept", kept),), True), Mask(mask, kept)
    if name in _NORMALIZATION_KINDS:
        check_normalization(options.get("kind", _NORMALIZATION_KINDS[name]), options["over"], operand)
    if name == "softmax_with_sink" and isinstance(others[0], Tensor):
        return Step(name, tuple(options.items()), True), Factor(others[0], "sink")
    if name == "softmax_with_sink":
        return Step(name, (("sink", check_number("softmax", "sink", others[0])), *options.items())), None
    if name == "mix":
        mixing = Mixing(others[0], operand.size)
        return Step(name, (("heads", mixing.shape[1]),), True), mixing
    if name == "multiply" and isinstance(others[0], Tensor):
        return Step("multiply", (), True), Factor(others[0])
    if name == "multiply":
        return Step("multiply", (("factor", check_number("c * a", "c", others[0])),)), None
    number = options.get(_NUMBERS.get(name, ""))
    if number is not None and not isinstance(number, Tensor):
        check_number(name, _NUMBERS[name], number)
    if name == "dropout":
        p = options["p"]
        if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
            raise ConfigError("dropout", "p must be in [0, 1)", repr(p))
        return Step("dropout", tuple(options.items())), None
    if name == "map" and isinstance(options["fn"], nn.Module):
        return Step("map", (), True), options["fn"]
    return Step(name, tuple(options.items())), None


def _size(join: str | None, sizes: list[int]) -> int:
    if join == "concat":
        return sum(sizes)
    if join in (None, "compose", "outer"):
        return math.prod(sizes)
    if sizes[0] != sizes[1] and 1 not in sizes:
        raise ShapeError(f"a {'+' if join == 'add' else '*'} b",
                         "the sizes K of both mechanisms must be equal, or one of them 1",
                         f"{sizes[0]} and {sizes[1]}", "Use a.outer(b) for every pair of heads.")
    return max(sizes)


def _check_own_heads(operands: list[Mechanism], size: int) -> None:
    """Raise `ConfigError` if an operand scores x Theta_k and the number of Theta_k is not its number of heads."""
    for operand in operands:
        if "projected" in operand.reads and operand.size != size:
            raise ConfigError("on='projected'", "each head must have a Theta_k of its own, so that the other operand "
                              "of @ or outer has one matrix", f"K={operand.size} of {size}", "Join them by |.")


def _inputs_of_second(first: Mechanism, second: Mechanism, basis: Basis, inputs: Inputs) -> Inputs:
    """The inputs of the second of two composed mechanisms: its x are the outputs of the first.

    Outputs that are entries of x or of z have their content. Others have no content, so that a second mechanism that
    reads it raises a `StructureError`.
    """
    x, z, structure, projected, *_ = inputs
    own = first._own(structure)
    outputs = first._outputs_are(own, x.shape[-2])
    if outputs == "x":
        return inputs
    expected = first._output_entries(own)
    count = basis.num_outputs if expected is None else expected
    reads_z = outputs == "z" and count == inputs.num_outputs
    if reads_z and z is x:
        return inputs
    structure = _structure_of_second(first, second, structure, reads_z)
    if reads_z:
        return type(inputs)(z, z, structure, projected and (projected[1], projected[1]))
    if "content" in second.reads:
        raise StructureError("a @ b", "the outputs of a must be entries of x or of z, of which b reads the content",
                             f"{first!r} @ {second!r}", "Make two layers: the second reads what the first gives.")
    x = x.new_zeros(()).expand(*x.shape[:-2], count, x.shape[-1])
    return type(inputs)(x, x, structure)


def _structure_of_second(first: Mechanism, second: Mechanism, structure: Any, reads_z: bool) -> Any:
    """The structure, or structures, that the second of two composed mechanisms reads. `reads_z`: its x is z."""
    samples = getattr(structure, "samples", None)
    named = type(structure) is NamedStructures
    result = first._leads(structure)
    if result is structure and samples is not None and (isinstance(result, Samples) or reads_z):
        if named:
            result = result._replace(samples=samples.of_outputs())
        elif result is samples or "structure" not in second.reads:
            result = samples.of_outputs()
    return result.at(second._samples_of(result)) if named else result


class _Parts(NamedTuple):
    """The parts of a node as a call needs them.

    Args:
        program: for each step its function, the module that it reads or the node itself, and the result of `node_of`.
        masking: the masks and terms in the expression that may remove inputs from all pairs.
        masked: True if a step is a mask.
        separations: the result of `separations` for a batch whose outputs are not its inputs, and for one whose are.
    """

    operands: tuple[Mechanism, ...]
    program: tuple[tuple[Build, nn.Module, Callable[..., Basis] | None, tuple[Any, ...]], ...]
    reads: frozenset[str]
    masking: tuple[Any, ...]
    masked: bool
    separations: tuple[tuple[frozenset[int], bool], ...]


class Operation(Mechanism):
    """Operators of the algebra: at most one that joins two mechanisms, then a chain of steps on one basis.

    For example `(a + b).masked(keep=mask).softmax()` has the join "add" and the steps "masked" and "normalize".

    Args:
        join: "concat", "compose", "add", "multiply" or "outer" of two operands; `None` for one operand.
        steps: the operators on the joined basis, in order.
        step_modules: the modules that steps read (masks, factors, mixings, functions), in the order of their steps.

    Example:

        >>> from structconv import Causal, DotProduct
        >>> from structconv.mechanisms import Operation
        >>> expression = DotProduct(heads=2, dim=4).scaled().masked(keep=Causal()).softmax()
        >>> isinstance(expression, Operation), expression.size
        (True, 2)
    """

    _passes_structures = True

    def __init__(self, join: str | None, operands: tuple[Mechanism, ...], steps: tuple[Step, ...] = (),
                 step_modules: list[nn.Module] | None = None) -> None:
        super().__init__()
        if join in ("add", "multiply"):
            first, second = operands
            operands = first._adopted_beside(second), second._adopted_beside(first)
        self.operands = nn.ModuleList(operands)
        self.step_modules = nn.ModuleList(step_modules or [])
        self.join, self.steps = join, steps
        mechanisms = self.mechanisms()
        self._joined_size = _size(join, [operand.size for operand in mechanisms])
        mixed = [dict(step.options)["heads"] for step in steps if step.name == "mix"]
        self._size = mixed[-1] if mixed else self._joined_size
        if join in ("compose", "outer"):
            _check_own_heads(mechanisms, self._joined_size)
        if self._size != self._joined_size:
            _check_own_heads(mechanisms, self._size)
        #: True if inputs and outputs are exchanged.
        self._turned = [step.name for step in steps].count("transpose") % 2 == 1

    @property
    def size(self) -> int:
        return self._size

    @property
    def has_scores(self) -> bool:  # type: ignore[override]
        normalized = any(step.name in NORMALIZING for step in self.steps)
        return not normalized and self.join != "compose" and any(operand.has_scores for operand in self.mechanisms())

    @property
    def reads(self) -> Collection[str]:  # type: ignore[override]
        return (self.__dict__.get("_known_parts") or self._parts_now()).reads

    @property
    def _reads_sizes(self) -> bool:  # type: ignore[override]
        return bool(self.step_modules) or any(operand._reads_sizes for operand in self.mechanisms())

    def _parts_now(self) -> _Parts:
        """The parts of this node. They stay in the node of a layer, which makes new nodes when a part is replaced."""
        operands = self.mechanisms()
        program = [(builder(step), self if module is None else module, *node_of(step))
                   for step, module in self._modules_by_step()]
        masks = self._masks()
        masking: list[Any] = [part for part in masks if isinstance(part, Mask)]
        for part in operands:
            if isinstance(part, Operation):
                masking += part._parts_now().masking
            elif getattr(type(part), "_may_mask_inputs", None) is not Mechanism._may_mask_inputs:
                masking.append(part)
        reads = {fact for part in (*masks, *operands) for fact in reads_of(part)} - {"sibling"}
        parts = _Parts(tuple(operands), tuple(program), frozenset((*reads, "positions")), tuple(masking), bool(masks),
                       tuple([separations(self.steps, self._joined_crosses(square)) for square in (False, True)]))
        if "_known_in_layer" in self.__dict__ and not is_compiling():  # no side effects in a checkpoint
            self.__dict__["_known_parts"] = parts
        return parts

    def mechanisms(self) -> list[Mechanism]:
        """The operands."""
        return list(self._modules["operands"]._modules.values())  # type: ignore[union-attr, arg-type]

    def _step_modules(self) -> list[nn.Module]:
        return list(self._modules["step_modules"]._modules.values())  # type: ignore[union-attr, arg-type]

    def _masks(self) -> list[nn.Module]:
        """The masks, or the modules that replaced them."""
        return [cast(nn.Module, module) for step, module in self._modules_by_step() if step.name == "masked"]

    def forward(self, inputs: Inputs) -> Basis:
        if inputs.output_positions is not None:
            self._check_allows_positions()
        separate, samples = self.join not in _ENTRYWISE_JOINS, getattr(inputs[2], "samples", None)
        parts = self.__dict__.get("_known_parts") or self._parts_now()
        basis = (parts.operands[0].evaluate(inputs, separate) if self.join is None
                 else self._joined(parts.operands, inputs, separate))
        if samples is None:
            for build, module, node, options in parts.program:
                basis = (build(basis, module, inputs, None) if node is None or type(basis) is Concat
                         else node(basis, *options))
            return basis
        before = parts.separations[samples.square][0]
        pairs = self._joined_samples(inputs.structure) if before or parts.masked else None
        for i, (build, module, node, options) in enumerate(parts.program):
            if i in before:
                basis = separated(basis, cast(Any, pairs))
            basis = (build(basis, module, inputs, pairs) if node is None or type(basis) is Concat
                     else node(basis, *options))
            if pairs is not None and self.steps[i].name == "transpose":
                pairs = pairs.transpose()
        return basis

    def _check_allows_positions(self) -> None:
        """Raise `ConfigError` if a part of the outputs may differ from the same part of all outputs."""
        if self.join == "compose" or self._turned:
            raise ConfigError("positions", "positions must be left out where outputs do not stand among the inputs, "
                              "behind @ or a transpose", repr(self))
        if any(dict(step.options).get("over") == "outputs" for step in self.steps):
            raise ConfigError("positions", "positions must be left out where weights are normalized over all outputs",
                              repr(self))

    def _joined_crosses(self, square: bool) -> bool:
        """Return True if pairs of the joined operands may cross samples."""
        if self.join not in _ENTRYWISE_JOINS:
            return False
        crosses = [operand._in_batch(square)[1] for operand in self.mechanisms()]
        scores = any(operand.has_scores for operand in self.mechanisms())
        return any(crosses) and (scores or self.join != "multiply" or all(crosses))

    def _in_batch(self, square: bool) -> tuple[bool, bool]:
        return False, (self.__dict__.get("_known_parts") or self._parts_now()).separations[square][1]

    def _joined_samples(self, structure: Any) -> Any:
        """The samples within which the pairs of the joined operands exist."""
        if type(structure) is NamedStructures:
            return structure.samples
        first, *others = self.mechanisms()
        pairs = first._pairs_of(structure)
        if self.join != "compose":
            return pairs
        return pairs.leading_to(others[0]._pairs_of(first.output_structure(structure)).of_outputs())

    def _pairs_of(self, structure: Any) -> Any:
        pairs = self._joined_samples(structure)
        return pairs.transpose() if self._turned and type(structure) is not NamedStructures else pairs

    def _may_mask_inputs(self, structure: Any, others: bool = False) -> int:
        named, sides = type(structure) is NamedStructures, 0
        for part in (self.__dict__.get("_known_parts") or self._parts_now()).masking:
            if type(part) is Mask and not part._buffers and (structure is None or type(structure) is Graph):
                reflexive = part._reflexive
                if (structure is None or covers_inputs(structure)) if reflexive is None else (reflexive and not others):
                    continue  # edges and windows leave out pairs, and here no input: each is in a pair with itself
            sides |= part._may_mask_inputs(part._own(structure) if named else structure, others)
        return sides

    def _visible_inputs(self, inputs: Inputs, masks: Masks) -> tuple[InputSet, InputSet]:
        operands = self.mechanisms()[:1 if self.join == "compose" else None]
        visible = [operand._visible_inputs(operand._own_inputs(inputs), masks) for operand in operands]
        exist, reached = [existing for existing, _ in visible], [reaching for _, reaching in visible]
        scores = any(part.has_scores for part in operands)
        if self.join == "compose":
            existing, reaching = EVERY_INPUT, masks.for_any_output(reached[0])
        elif self.join == "concat":
            existing, reaching = masks.any(exist), masks.any(reached)
        elif self.join == "add":  # scores exist where both do; matrices are added as they are
            existing = EVERY_INPUT.union(*exist) if scores else EVERY_INPUT
            reaching = existing if scores else masks.any(reached)
        else:
            existing, reaching = EVERY_INPUT.union(*exist), EVERY_INPUT.union(*reached)
        for step, module in self._modules_by_step():
            if step.name == "transpose":  # masks of inputs become masks of outputs
                existing = reaching = EVERY_INPUT
            elif isinstance(module, Mask):
                kept = masks.keeps(module, inputs)
                existing, reaching = existing | kept, reaching | kept
            elif step.name in NORMALIZING:  # absent pairs become zeros; shares of zero are zero
                shares = dict(step.options).get("kind") in ("sum", "count")
                existing, reaching = EVERY_INPUT, existing | reaching if shares else existing
            elif not (step.name in ZERO_PRESERVING or dict(step.options).get("fn") in (torch.relu, torch.tanh)):
                reaching = existing
        return existing, reaching

    def _needed_inputs(self, inputs: Inputs, masks: Masks, needed: InputSet) -> list[InputSet]:
        for step, module in reversed(self._modules_by_step()):
            options = dict(step.options)
            mixes = step.name in ("softmax_with_sink", "log_softmax") or (
                step.name == "normalize" and options["kind"] not in ("count", "sigmoid", "none"))
            if step.name == "transpose" or (mixes and options["over"] == "inputs"):
                needed = EVERY_INPUT
            elif isinstance(module, Mask):
                needed = needed | masks.keeps(module, inputs)
        operands = self.mechanisms()
        if self.join == "compose":
            first, second = operands  # the masks of the second are of the entries between them
            between = [EVERY_INPUT] if "content" in second.reads else []
            return [*first._needed_inputs(first._own_inputs(inputs), masks, masks.for_any_output(needed)), *between]
        scores = self.join != "add" or any(part.has_scores for part in operands)
        sets: list[InputSet] = []
        for operand in operands:
            own = needed
            if self.join in ("add", "multiply", "outer") and scores:  # a pair exists where both do; 0 times a is 0
                beside, which = [part for part in operands if part is not operand], int(self.join != "add")
                own = own.union(*[part._visible_inputs(part._own_inputs(inputs), masks)[which] for part in beside])
            sets += operand._needed_inputs(operand._own_inputs(inputs), masks, own)
        return sets

    def _modules_by_step(self) -> list[tuple[Step, nn.Module | None]]:
        """The steps, each with the module that it reads."""
        own = iter(self._step_modules())
        return [(step, next(own) if step.reads else None) for step in self.steps]

    def _input_entries(self, structure: Any) -> int | None:
        if self._turned or type(structure) is NamedStructures:
            return self._entries(structure, self._turned)
        return (self.__dict__.get("_known_parts") or self._parts_now()).operands[0]._input_entries(structure)

    def _output_entries(self, structure: Any) -> int | None:
        return self._entries(structure, not self._turned)

    def _entries(self, structure: Any, outputs: bool) -> int | None:
        """M of the joined operands, or N; of several structures by the first part whose structure determines it."""
        first, *others = self.mechanisms()
        if type(structure) is NamedStructures:
            parts, after = [first, *others], structure
            if self.join == "compose":
                parts, after = (others, first._leads(structure)) if outputs else ([first], structure)
            counts = [(part._output_entries if outputs else part._input_entries)(part._own(after)) for part in parts]
            return next((count for count in counts if count is not None), None)
        if not outputs:
            return first._input_entries(structure)
        if self.join == "compose":
            return others[0]._output_entries(first.output_structure(structure))
        return first._output_entries(structure)

    def _outputs_are(self, structure: Any, num_inputs: int) -> str | None:
        first, *others = self.mechanisms()
        origins = [first._outputs_are(first._own(structure), num_inputs)]
        after = first._leads(structure) if self.join == "compose" else structure
        origins += [other._outputs_are(other._own(after), num_inputs) for other in others]
        if self.join == "compose":
            return origins[0] if origins[1] == "x" else origins[1]
        origin = next((origin for origin in ("z", "x") if origin in origins), None)
        return "x" if self._turned and origin is not None else origin

    def _samples_of_outputs(self, structure: Any) -> Any:
        first, *others = self.mechanisms()
        if self._turned:
            return structure.samples.turned().of_outputs()
        if self.join == "compose":
            return others[0]._samples_of_outputs(first._leads(structure))
        return first._samples_of_outputs(structure)

    def output_structure(self, structure: Any) -> Any:
        if self._turned:  # it is called with the finer grid, on which its outputs lie
            return structure
        named = type(structure) is NamedStructures
        if named and self.join != "compose":
            return structure.merged([operand._leads(structure) for operand in self.mechanisms()])
        for operand in self.mechanisms()[: 2 if self.join == "compose" else 1]:
            structure = operand._leads(structure) if named else operand.output_structure(structure)
        return structure

    def _samples_of(self, structures: NamedStructures) -> list[Place]:
        first, *others = self.mechanisms()
        places = first._samples_of(structures)
        if self.join == "compose":
            after = others[0]._samples_of(first._leads(structures))
            places = behind(places, after) if places or first._keeps_entries() else []
        else:
            places = [*places, *(place for other in others for place in other._samples_of(structures))]
        if self._turned:
            return [Place(name, samples.turned()) for name, samples in places[:1]]
        places += [place for mask in self._masks() if isinstance(mask, Mask) for place in mask._samples_of(structures)]
        return [Place(places[0].name, agreed(places))] if places else []

    def _keeps_entries(self) -> bool:
        return all(operand._keeps_entries() for operand in self.mechanisms())

    def _branches(self) -> list[Mechanism]:
        if self.join != "concat" or self.steps:
            return [self]
        return [part for operand in self.mechanisms() for part in operand._branches()]

    def _joined(self, operands: tuple[Mechanism, ...], inputs: Inputs, separate: bool) -> Basis:
        """Both operands, joined; each part of a `|` reads the projections of its own heads."""
        first, second = operands
        join = OPERATORS[cast(str, self.join)]
        if self.join == "compose":
            basis = first.evaluate(inputs)
            return cast(Basis, join(basis, second.evaluate(_inputs_of_second(first, second, basis, inputs))))
        if self.join != "concat" or inputs.projected is None:
            to_first = inputs._replace(sibling=second) if "sibling" in first.reads else inputs
            to_second = inputs._replace(sibling=first) if "sibling" in second.reads else inputs
            return cast(Basis, join(first.evaluate(to_first, separate), second.evaluate(to_second, separate)))
        heads = ((0, first.size), (first.size, self._joined_size))
        own = [inputs._replace(projected=(inputs.projected[0][..., start:stop, :, :],
                                          inputs.projected[1][..., start:stop, :, :])) for start, stop in heads]
        return cast(Basis, join(first.evaluate(own[0]), second.evaluate(own[1])))

    def __repr__(self) -> str:
        text, *others = map(repr, self.mechanisms())
        if others:
            text = (f"({text} {_SIGNS[self.join]} {others[0]})" if self.join in _SIGNS
                    else f"{text}.{self.join}({others[0]})")
        for step, module in self._modules_by_step():
            text = shown(text, step, module)
        return text


Mechanism._operation = operation
