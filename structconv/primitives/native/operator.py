"""`differentiable_operator`: a forward and a backward kernel, each an operator, with derivatives of any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from structconv.primitives.functions import variable
from structconv.primitives.layout import Csr
from structconv.primitives.native.registry import EDGES, define, register_gradient

__all__ = ["composed_gradients", "differentiable_operator", "gradients"]


def differentiable_operator(name: str, inputs: str, options: str, results: str, *, forward: Callable[..., Any],
                            fake: Callable[..., Any], composed: Callable[..., Any],
                            backward: Callable[..., Any] | None = None,
                            edges: bool = True, flags: str = "", grads: int = 1, needs: str = "") -> Callable[..., Any]:
    """Define structconv::name and structconv::name_backward, and the gradients of both.

        name(layouts, inputs, options, flags) -> results
        name_backward(layouts, inputs, results, gradients of the first `grads` results, options, needs_*) -> inputs

    A first derivative is one call of `backward`. That of name_backward is taken of `composed`, by graphs that can be
    differentiated again; without a `backward` there is no such operator, and the first is taken so too.

    Args:
        inputs: the tensors that have gradients, as in a schema: "Tensor x, Tensor? bias".
        options: the other arguments that both passes take, and `flags` those of the forward alone.
        results: the names of what the forward returns, all tensors: "y, lse".
        forward, fake: of the first operator, on its arguments.
        backward: of the second. It returns None for an input that is None or, told so, not needed; gradients but
            the first may be None.
        composed: (Csr, Csr, inputs, options) -> the first `grads` results, by differentiable operators.
        edges: whether the two layouts, six tensors, come first.
        needs: inputs of which the backward is told whether their gradient is wanted: "bias".

    Returns:
        As `register_gradient`.
    """
    formulas = _Formulas(EDGES if edges else "", inputs, options, flags, results, grads, needs, composed)
    define(name, formulas.schema, forward, fake, _tensors(formulas.results))
    if backward is None:
        return register_gradient(name, formulas.differentiate_composed, formulas.save_inputs)
    define(f"{name}_backward", formulas.schema_backward, formulas.filled(backward), formulas.fake_backward,
           _tensors(formulas.inputs))
    formulas.backward = register_gradient(f"{name}_backward", formulas.differentiate_again, formulas.save_again)
    return register_gradient(name, formulas.differentiate, formulas.save)


def _tensors(names: Sequence[str]) -> str:
    return f"({', '.join(['Tensor'] * len(names))})"


def _names(schema: str) -> list[str]:
    return [argument.split()[-1] for argument in schema.split(", ") if argument]


def _pick(wanted: Sequence[str], given: Sequence[str]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes the wanted out of a sequence of the given, and its last entry for those that are not among them."""
    at = [given.index(name) if name in given else -1 for name in wanted]
    return itemgetter(*at) if len(at) > 1 else lambda values: tuple(values[i] for i in at)


class _Formulas:
    """What is saved, and what each gradient is handed and returns, by the names of the arguments."""

    backward: Callable[..., Any]

    def __init__(self, layouts: str, inputs: str, options: str, flags: str, results: str, grads: int, needs: str,
                 composed: Callable[..., Any]) -> None:
        self.composed, self.layouts = composed, _names(layouts)
        self.may_lack = "Tensor?" in inputs or bool(needs)
        self.inputs, self.results = _names(inputs), _names(results)
        first, *more = self.grads = [f"grad_{result}" for result in self.results[:grads]]
        told = [f"needs_{name}" for name in _names(needs)]
        self.schema = ", ".join(filter(None, (layouts, inputs, options, flags)))
        self.schema_backward = ", ".join(filter(None, (
            layouts, inputs, *(f"Tensor {result}" for result in self.results), f"Tensor {first}",
            *(f"Tensor? {grad}" for grad in more), options, *(f"bool {flag}" for flag in told))))
        ahead, back = _names(self.schema), _names(self.schema_backward)
        held = [argument.split()[-1] for argument in options.split(", ") if argument.startswith("Tensor")]
        plain = [name for name in _names(options) if name not in held]
        tensors = [*self.layouts, *self.inputs, *held]
        self.tensors, self.plain = _pick(tensors, ahead), _pick(plain, ahead)
        self.wanted, self.told = _pick(self.inputs, ahead), _pick(_names(needs), ahead)
        self.given = _pick(back, [*tensors, *self.results, *self.grads, *plain, *told])
        self.found = _pick(ahead, [*self.inputs, ""])
        self.tensors_again, self.plain_again = _pick([*tensors, *self.grads], back), _pick(plain, back)
        self.inputs_again = _pick(self.inputs, back)
        self.told_again = _pick([f"needs_{name}" for name in self.inputs], [*back, ""])
        self.wanted_again = _pick([*self.inputs, *self.grads], back)
        self.held, self.options = len(tensors), _pick(_names(options), [*tensors, *plain])
        self.found_again = _pick(back, [*self.inputs, *self.grads, ""])

    def filled(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """An operator returns tensors: an empty one where the kernel has None."""
        if not self.may_lack:
            return backward
        return lambda *arguments: tuple(arguments[len(self.layouts)].new_empty((0,)) if grad is None else grad
                                        for grad in backward(*arguments))

    def fake_backward(self, *arguments: Any) -> tuple[Tensor, ...]:
        inputs, told = self.inputs_again(arguments), self.told_again((*arguments, None))
        return tuple(inputs[0].new_empty((0,)) if t is None or needed is False else t.new_empty(t.shape)
                     for t, needed in zip(inputs, told, strict=True))

    def save(self, ctx: Any, arguments: tuple[Any, ...], results: tuple[Tensor, ...]) -> None:
        ctx.plain = self.plain(arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self.tensors(arguments), *results)

    def differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        given, needed = grads[:len(self.grads)], ctx.needs_input_grad
        if not any(grad is not None for grad in given):
            return (None,) * len(needed)
        saved = ctx.saved_tensors
        if given[0] is None:
            given = (torch.zeros_like(saved[-len(self.results)]), *given[1:])
        found = self.backward(*self.given((*saved, *given, *ctx.plain, *self.told(needed))))
        return self.found((*(g if need else None for g, need in zip(found, self.wanted(needed), strict=True)), None))

    def save_inputs(self, ctx: Any, arguments: tuple[Any, ...], _: Any) -> None:
        ctx.plain = self.plain(arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self.tensors(arguments))

    def differentiate_composed(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of the composed form, computed anew."""
        again, needed = torch.is_grad_enabled(), self.wanted(ctx.needs_input_grad)
        with torch.enable_grad():
            leaves, results = self.recomputed(ctx, needed)
        wanted = [leaf if need else None for leaf, need in zip(leaves, needed, strict=True)]
        return self.found((*gradients(results, grads[:len(self.grads)], wanted, graph=again), None))

    def recomputed(self, ctx: Any, used: Sequence[bool]) -> tuple[list[Tensor | None], Sequence[Tensor]]:
        """Variables for the inputs, of which those `used` require a gradient, and the results composed of them."""
        saved = ctx.saved_tensors
        ends = (Csr(*saved[:3]), Csr(*saved[3:6])) if self.layouts else ()
        leaves = [None if t is None else variable(t, need)
                  for t, need in zip(saved[len(self.layouts):], used, strict=False)]
        results = self.composed(*ends, *leaves, *self.options((*saved[:self.held], *ctx.plain)))
        return leaves, (results,) if isinstance(results, Tensor) else results

    def save_again(self, ctx: Any, arguments: tuple[Any, ...], _: tuple[Tensor, ...]) -> None:
        ctx.plain = self.plain_again(arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self.tensors_again(arguments))

    def differentiate_again(self, ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of the gradients that autograd finds of `composed`, in the inputs and in the gradients of the results."""
        count, again, needed = len(self.inputs), torch.is_grad_enabled(), self.wanted_again(ctx.needs_input_grad)
        used = [need or c is not None for need, c in zip(needed, cotangents, strict=False)]
        with torch.enable_grad():
            leaves, results = self.recomputed(ctx, used)
            grads = [None if t is None else variable(t, need)
                     for t, need in zip(ctx.saved_tensors[self.held:], needed[count:], strict=True)]
            first = gradients(results, grads, leaves, graph=True)
        leaves += grads
        wanted = [leaf if need else None for leaf, need in zip(leaves, needed, strict=True)]
        return self.found_again((*gradients(first, cotangents, wanted, graph=again), None))


def composed_gradients(composed: Callable[..., Tensor], tensors: Sequence[Tensor | None], needed: Sequence[bool],
                       grad: Tensor) -> list[Tensor | None]:
    """Those of composed(*tensors), by differentiable operators, with a graph where one is being drawn."""
    again = torch.is_grad_enabled()
    leaves = [None if t is None else variable(t, need) for t, need in zip(tensors, needed, strict=True)]
    with torch.enable_grad():
        y = composed(*leaves)
    wanted = [leaf if need else None for leaf, need in zip(leaves, needed, strict=True)]
    return gradients([y], [grad], wanted, graph=again)


def gradients(results: Sequence[Tensor | None], grads: Sequence[Tensor | None], leaves: Sequence[Tensor | None],
              graph: bool) -> list[Tensor | None]:
    """Those of the leaves, from the results that have one; None where there is none."""
    pairs = [(y, g) for y, g in zip(results, grads, strict=True) if y is not None and y.requires_grad and g is not None]
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    if not pairs or not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad([y for y, _ in pairs], wanted, [g for _, g in pairs], create_graph=graph,
                                     allow_unused=True))
    return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]
