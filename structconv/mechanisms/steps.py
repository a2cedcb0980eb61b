"""Steps of an expression: operators on one basis, applied to the preceding part."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from structconv import torch_compat as private
from structconv.bases.base import OPERATORS, Basis
from structconv.bases.entrywise import LeakyReLU, Masked, Normalized
from structconv.bases.linear import Concat, Scaled
from structconv.bases.scores import Bilinear
from structconv.bases.sizes import sized
from structconv.bases.tree import Function, Projected
from structconv.structures.graph import Graph
from structconv.structures.masks import Support
from structconv.structures.supports import EdgeSupport
from structconv.written import text as as_text

__all__ = ["Build", "Step", "builder", "node_of", "shown"]


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
    """The class that a step makes of a single basis, and what follows the basis in its arguments: the expression has
    checked it once. `None` where the algebra is asked in each call, as for parts of `|`."""
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
