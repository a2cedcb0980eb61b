"""How an operator is registered: its checks, its derivatives in both modes, its batches, and calls past the dispatcher.

`define` and `register_gradient` make an operator whose derivatives are made of operators by hand.
`differentiable_operator` makes one with a backward kernel; its further derivatives, and those in forward mode, are the
ones of a composed form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.compiler import is_compiling
from torch.nn import Parameter

from structconv import torch_compat as private
from structconv.errors import ShapeError
from structconv.primitives.functions import pulled_back
from structconv.primitives.native.checks import check_edges, check_like, check_numbers
from structconv.primitives.native.indices import Csr

__all__ = ["COMPOSED", "EDGES", "OPERATORS", "define", "differentiable_operator", "multilinear",
           "register_gradient", "trains"]

#: The schema of the two layouts, with which an operator along edges begins.
EDGES = ", ".join(f"Tensor {name}{end}" for end in ("", "_T") for name in ("indptr", "indices", "order"))
#: The kernel of every operator.
OPERATORS: dict[str, Callable[..., Any]] = {}
#: The composed form of each operator that has one, on the operator's arguments and with all of its results.
COMPOSED: dict[str, Callable[..., Any]] = {}

_LIBRARY = torch.library.Library("structconv", "FRAGMENT")
_OWN = frozenset((Tensor, Parameter, int, float, bool, str, type(None), list, tuple))


class _Seen:
    """A flag, true once a functional transform has met an operator: from then on tensors may be remnants of one."""

    transforms = False


def define(name: str, arguments: str, kernel: Callable[..., Any], fake: Callable[..., Any],
           check: Callable[..., None], results: str = "Tensor") -> None:
    """Define structconv::name(arguments) -> results with one body for every device, and what its results look like.

    Args:
        kernel: the body. It reads memory by the sizes that its arguments should have.
        fake: results without numbers, of the shapes, strides and dtypes of the kernel's.
        check: raises an error for arguments that the kernel must not see. The dispatcher's calls go through it; the
            library's own functions have checked what they pass on.

    A batch (`torch.vmap`) is computed one member after the other.
    """
    def checked(*inputs: Any) -> Any:
        check(*inputs)
        return kernel(*inputs)

    _LIBRARY.define(f"{name}({arguments}) -> {results}")
    _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"structconv::{name}", _on_one_device(name, fake), lib=_LIBRARY)
    operator = getattr(torch.ops.structconv, name).default
    torch.library.register_vmap(operator, _batched(operator), lib=_LIBRARY)
    OPERATORS[name] = kernel


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Tensors without numbers among others would make a result of numbers that nobody computed."""
    def shapes(*inputs: Any) -> Any:
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        devices = {t.device.type for t in tensors if t.dim() or t.is_meta}
        if len(devices) > 1:
            raise ShapeError(name, "tensors must be on one device", sorted(devices))
        return fake(*inputs)

    return shapes


def register_gradient(name: str, backward: Callable[..., Any], save: Callable[..., None], *,
                      tangent: Callable[..., Any] | None = None,
                      composed: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Give an operator of `define` its derivatives, by an `autograd.Function` of its own.

    `torch.library.register_autograd` does the backward with several times the overhead, which counts on small graphs:
    it completes the arguments from the schema at every call. Nor do its gradients pass through `torch.func.grad` and
    `vjp`, as these do, and it has no forward derivatives. It is used where torch lacks what this one needs.

    Args:
        backward: (ctx, gradients of the results) -> those of the arguments, by differentiable operators.
        save: (ctx, arguments, results), what the backward needs.
        tangent: (arguments, their tangents or None) -> tangents of the results, by differentiable operators.
        composed: (what computes the results without derivatives, arguments) -> the results by differentiable
            operators: what runs where there are forward derivatives, instead of `tangent`. None where that is for
            the `backward`.

    Returns:
        The operator without the dispatcher, which takes longer than a kernel on few entries: the kernel, or the
        `autograd.Function`, where the inputs are tensors of torch's own and nothing is to see or to transform the
        operator (a tracer, a mode, a functional transform, a forward derivative, a profiler), and else the operator.
    """
    operator, compute = getattr(torch.ops.structconv, name).default, OPERATORS[name]

    def direct(ctx: Any, *inputs: Any) -> Any:
        output = compute(*inputs)
        save(ctx, inputs, output)
        return output

    apply = private.bound_apply(_function(name, direct, backward))

    def call(*inputs: Any) -> Any:
        if (is_compiling() or private.watched() or not _OWN.issuperset(map(type, inputs))
                or (_Seen.transforms and _wrapped(inputs)) or inputs[0].is_meta):
            return operator(*inputs)
        if torch.is_grad_enabled() and private.any_requires_grad(*inputs):
            return apply(*inputs)
        return compute(*inputs)

    if not private.follows_transforms:
        torch.library.register_autograd(operator, backward, setup_context=lambda ctx, inputs, output: save(
            ctx, inputs, output), lib=_LIBRARY)
        return _without_tangents(name, call)
    _LIBRARY.impl(name, _dispatched(name, operator, backward, save, tangent, composed), "Autograd")
    return call


def _without_tangents(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, but an error where `torch.library.register_autograd` would lose a tangent."""
    def checked(*inputs: Any) -> Any:
        if any(map(_moves, inputs)):
            raise NotImplementedError(f"structconv::{name} has no forward derivative with this version of torch")
        return call(*inputs)

    return checked


def multilinear(name: str, *factors: int) -> Callable[..., Tensor]:
    """The rule for the tangent of an operator that is linear in each of these arguments: the operator itself."""
    operator = getattr(torch.ops.structconv, name)

    def tangent(arguments: Sequence[Any], tangents: Sequence[Any]) -> Tensor:
        parts = [operator(*arguments[:i], tangents[i], *arguments[i + 1:]) for i in factors if tangents[i] is not None]
        if not parts:
            raise NotImplementedError(f"structconv::{name} has derivatives in its arguments {factors} alone")
        return sum(parts[1:], parts[0])

    return tangent


def trains(*tensors: Tensor | None) -> bool:
    """Return True if autograd or a functional transform may require a gradient through these."""
    return torch.is_grad_enabled() and (private.transforms_active()
                                        or any(t is not None and t.requires_grad for t in tensors))


def _wrapped(inputs: Sequence[Any]) -> bool:
    return any(isinstance(value, Tensor) and private.is_wrapped(value) for value in inputs)


# -- at the dispatcher's level of autograd ------------------------------------------------------------------------

def _dispatched(name: str, operator: Any, backward: Callable[..., Any], save: Callable[..., None],
                tangent: Callable[..., Any] | None, composed: Callable[..., Any] | None) -> Callable[..., Any]:
    """The function that runs if autograd, or one level of a functional transform, meets the operator."""
    def below(*inputs: Any) -> Any:
        # autograd.Function turns both modes off, which the levels below this one still have to follow
        with torch.enable_grad(), private.forward_mode(True), private.below_autograd():
            return operator(*inputs)

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = below(*inputs)
        save(ctx, inputs, output)
        if private.forward_level() >= 0:
            ctx.inputs = inputs
        return output

    def jvp(ctx: Any, *tangents: Any) -> Any:
        primals = [unpack_dual(t).primal if isinstance(t, Tensor) else t for t in ctx.inputs]
        del ctx.inputs
        if tangent is None:
            raise NotImplementedError(f"structconv::{name} has no derivative in forward mode")
        with private.forward_mode(True):
            return tangent(primals, tangents)

    def plain(*inputs: Any) -> Any:
        with private.below_autograd():
            return operator(*inputs)

    apply = private.bound_apply(_function(name, forward, backward, jvp))

    def differentiable(*inputs: Any) -> Any:
        ahead, wanted = private.forward_level() >= 0, torch.is_grad_enabled() and private.any_requires_grad(*inputs)
        if not wanted and not (ahead and any(map(_moves, inputs))):
            return plain(*inputs)
        if ahead and composed is not None and (results := composed(plain, inputs)) is not None:
            return results
        if not private.transforms_active():
            return apply(*inputs)
        _Seen.transforms = True
        with private.single_level():
            return apply(*inputs)

    return differentiable


def _moves(value: Any) -> bool:
    """Return True if a value has a tangent."""
    return isinstance(value, Tensor) and unpack_dual(value).tangent is not None


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any],
              jvp: Callable[..., Any] | None = None) -> Any:
    def pulled(ctx: Any, *grads: Any) -> Any:
        _Seen.transforms = _Seen.transforms or any(grad is not None and private.is_batched(grad) for grad in grads)
        return backward(ctx, *grads)

    members = {"forward": staticmethod(forward), "backward": staticmethod(pulled)}
    return type(name, (torch.autograd.Function,), members if jvp is None else {**members, "jvp": staticmethod(jvp)})


# -- batches ------------------------------------------------------------------------------------------------------

def _batched(operator: Any) -> Callable[..., Any]:
    """The rule of `torch.vmap`: the members one after the other."""
    def members(info: Any, in_dims: Sequence[Any], *inputs: Any) -> Any:
        found = [operator(*(_member(x, dim, i) for x, dim in zip(inputs, in_dims, strict=True)))
                 for i in range(info.batch_size)]
        if isinstance(found[0], Tensor):
            return torch.stack(found), 0
        return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])

    return members


def _member(x: Any, dim: Any, i: int) -> Any:
    return x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x


# -- a forward and a backward kernel ------------------------------------------------------------------------------

def differentiable_operator(name: str, inputs: str, options: str, results: str, *, forward: Callable[..., Any],
                            fake: Callable[..., Any], composed: Callable[..., Any], check: Callable[..., None],
                            backward: Callable[..., Any] | None = None,
                            edges: bool = True, flags: str = "", grads: int = 1, needs: str = "") -> Callable[..., Any]:
    """Define structconv::name and structconv::name_backward, and the derivatives of both.

        name(layouts, inputs, options, flags) -> results
        name_backward(layouts, inputs, results, gradients of the first `grads` results, options, needs_*) -> inputs

    A first derivative is one call of `backward`. That of name_backward is taken of `composed`, and so are all of them
    in forward mode; without a `backward` there is no such operator, and the first is taken so too.

    Args:
        inputs: the tensors that have gradients, as in a schema: "Tensor x, Tensor? bias".
        options: the other arguments that both passes take, and `flags` those of the forward alone.
        results: the names of what the forward returns, all tensors: "y, lse".
        forward, fake: of the first operator, on its arguments.
        backward: of the second. It returns None for an input that is None or, told so, not needed; gradients but
            the first may be None.
        composed: (Csr, Csr, inputs, options) -> the first `grads` results, by differentiable operators.
        check: raises an error for (Csr, Csr, inputs, options) that do not fit; layouts that are none, and tensors that
            are not dense numbers, are refused before.
        edges: whether the two layouts, six tensors, come first.
        needs: inputs of which the backward is told whether their gradient is wanted: "bias".

    Returns:
        As `register_gradient`.
    """
    of = _Formulas(name, EDGES if edges else "", inputs, options, flags, results, grads, needs, composed, fake, check)
    define(name, of.schema, forward, fake, of.check_forward, _tensors(of.results))
    COMPOSED[name] = of.decomposed
    if backward is None:
        return register_gradient(name, of.differentiate_composed, of.save_inputs, composed=of.ahead)
    define(f"{name}_backward", of.schema_backward, of.filled(backward), of.fake_backward, of.check_backward,
           _tensors(of.inputs))
    of.backward = register_gradient(f"{name}_backward", of.differentiate_again, of.save_again, composed=of.ahead_again)
    return register_gradient(name, of.differentiate, of.save, composed=of.ahead)


def _tensors(names: Sequence[str]) -> str:
    return f"({', '.join(['Tensor'] * len(names))})" if len(names) > 1 else "Tensor"


def _names(schema: str) -> list[str]:
    return [argument.split()[-1] for argument in schema.split(", ") if argument]


def _pick(wanted: Sequence[str], given: Sequence[str]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Return a function that selects the required entries of a sequence, and its last entry for absent ones."""
    at = [given.index(name) if name in given else -1 for name in wanted]
    return itemgetter(*at) if len(at) > 1 else lambda values: tuple(values[i] for i in at)


def _several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


class _Formulas:
    """The checked and saved arguments, and the inputs and results of each derivative, by name."""

    backward: Callable[..., Any]

    def __init__(self, name: str, layouts: str, inputs: str, options: str, flags: str, results: str, grads: int,
                 needs: str, composed: Callable[..., Any], fake: Callable[..., Any],
                 check: Callable[..., None]) -> None:
        self.name, self.composed, self.fake, self.check, self.layouts = name, composed, fake, check, _names(layouts)
        self.may_lack = "Tensor?" in inputs or bool(needs)
        self.inputs, self.results, self.flags = _names(inputs), _names(results), [True] * len(_names(flags))
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
        self.forward_again = _pick([*self.layouts, *self.inputs, *_names(options)], back)
        self.results_again, self.grads_again = _pick(self.results, back), _pick(self.grads, back)

    # -- what is refused --

    def check_forward(self, *arguments: Any) -> None:
        count = len(self.layouts)
        inputs = arguments[count:count + len(self.inputs)]
        options = arguments[count + len(self.inputs):len(arguments) - len(self.flags)]
        check_numbers(self.name, *inputs)
        ends = check_edges(self.name, arguments[:count], inputs[0]) if count else ()
        self.check(*ends, *inputs, *options)

    def check_backward(self, *arguments: Any) -> None:
        forward = (*self.forward_again(arguments), *self.flags)
        self.check_forward(*forward)
        results, grads = self.results_again(arguments), self.grads_again(arguments)
        expected = _several(self.fake(*forward))
        check_numbers(self.name, self.inputs_again(arguments)[0], *results, *grads)
        for name, given, like in zip((*self.results, *self.grads), (*results, *grads), (*expected, *expected),
                                     strict=False):
            if given is not None:
                check_like(f"{self.name}_backward", name, given, like)

    # -- backward mode --

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

    def save(self, ctx: Any, arguments: tuple[Any, ...], results: Tensor | tuple[Tensor, ...]) -> None:
        ctx.plain = self.plain(arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self.tensors(arguments), *_several(results))

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
        """Return the derivatives of the composed form, which is computed again."""
        formula, inputs = self.formula(ctx.saved_tensors, ctx.plain)
        found = pulled_back(formula, inputs, self.wanted(ctx.needs_input_grad), grads[:len(self.grads)])
        return self.found((*found, None))

    def formula(self, saved: Sequence[Any], plain: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The composed form as a function of the inputs, and these."""
        ends = (Csr(*saved[:3]), Csr(*saved[3:6])) if self.layouts else ()
        options = self.options((*saved[:self.held], *plain))
        count = len(self.layouts)
        return lambda *inputs: self.composed(*ends, *inputs, *options), saved[count:count + len(self.inputs)]

    def save_again(self, ctx: Any, arguments: tuple[Any, ...], _: Any) -> None:
        ctx.plain = self.plain_again(arguments)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*self.tensors_again(arguments))

    def differentiate_again(self, ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of the gradients of the composed form, in the inputs and in the gradients of the results."""
        saved, needed = ctx.saved_tensors, self.wanted_again(ctx.needs_input_grad)
        formula, inputs = self.formula(saved, ctx.plain)
        asked = [c is not None for c in cotangents]
        found = pulled_back(self._gradients(formula, asked), [*inputs, *saved[self.held:]], needed,
                            [c for c in cotangents if c is not None])
        return self.found_again((*found, None))

    def _gradients(self, formula: Callable[..., Any], asked: Sequence[bool]) -> Callable[..., Any]:
        """(inputs, gradients of the results) -> the gradients of the inputs that require one."""
        def of(*tensors: Tensor) -> tuple[Tensor, ...]:
            inputs, grads = tensors[:len(self.inputs)], tensors[len(self.inputs):]
            found = pulled_back(formula, inputs, asked, grads)
            return tuple(torch.zeros_like(t) if g is None else g
                         for t, g, ask in zip(inputs, found, asked, strict=True) if ask)

        return of

    def decomposed(self, *arguments: Any) -> Any:
        """The composed form; a result that only a backward pass reads is NaN."""
        formula, inputs = self.formula(self.tensors(arguments), self.plain(arguments))
        found, expected = _several(formula(*inputs)), _several(self.fake(*arguments))
        results = *found, *(torch.full_like(t, torch.nan) for t in expected[len(found):])
        return results if len(expected) > 1 else results[0]

    # -- forward mode --

    def ahead(self, plain: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The composed form of the results that have derivatives."""
        formula, inputs = self.formula(self.tensors(arguments), self.plain(arguments))
        results, found = plain(*arguments), formula(*inputs)
        if isinstance(results, Tensor):
            return found
        found = _several(found)
        return *found, *results[len(found):]

    def ahead_again(self, plain: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The gradients are linear in those of the results, by which alone they are differentiated as they are.

        That is the case of every graph that was drawn before forward mode was entered; within it, none has this
        operator.
        """
        inputs, grads = self.inputs_again(arguments), self.grads_again(arguments)
        if any(map(_moves, inputs)):
            return self._composed_again(arguments, inputs, grads)
        duals = [None if g is None else unpack_dual(g) for g in grads]
        if not any(d is not None and d.tangent is not None for d in duals):
            return None
        primals, tangents = ([None if d is None else d[part] for d in duals] for part in (0, 1))
        if tangents[0] is None:
            tangents[0] = torch.zeros_like(grads[0])
        results, moved = (self.backward(*self._replaced(arguments, given)) for given in (primals, tangents))
        return tuple(y if t is None else make_dual(y, d) for t, y, d in zip(inputs, results, moved, strict=True))

    def _replaced(self, arguments: Sequence[Any], grads: Sequence[Tensor | None]) -> list[Any]:
        """The arguments of name_backward with other gradients of the results."""
        at = len(self.layouts) + len(self.inputs) + len(self.results)
        return [*arguments[:at], *grads, *arguments[at + len(grads):]]

    def _composed_again(self, arguments: Sequence[Any], inputs: Sequence[Any], grads: Sequence[Any]) -> Any:
        if private.transforms_active():
            raise NotImplementedError(f"structconv::{self.name}_backward has no forward derivative in its inputs "
                                      f"within a functional transform; structconv::{self.name} has")
        formula, _ = self.formula([*self.tensors_again(arguments)], self.plain_again(arguments))
        found = pulled_back(formula, inputs, [t is not None for t in inputs], grads)
        return tuple(arguments[len(self.layouts)].new_empty((0,)) if g is None else g for g in found)
