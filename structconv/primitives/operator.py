"""How an operator is registered: its checks, its derivatives in both modes, its batches, and calls past the dispatcher.

`define` makes an operator whose derivatives are made of operators by hand. `differentiable_operator` makes one with a
backward kernel; its further derivatives, and those in forward mode, are the ones of a composed form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.compiler import is_compiling
from torch.nn import Parameter

from structconv import torch_compat as private
from structconv.errors import ShapeError
from structconv.primitives import triton
from structconv.primitives.functions import Result, pulled_back, sum_dtype
from structconv.primitives.hashing import Drop
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_dropout, check_edges, check_like, check_numbers
from structconv.primitives.native.dispatch import drop_of, edges_of
from structconv.primitives.native.indices import Csr

__all__ = ["COMPOSED", "DROPOUT", "EDGES", "OPERATORS", "by_layouts", "define", "differentiable_operator", "trains"]

#: The schema of the two layouts, with which an operator along edges begins.
EDGES = ", ".join(f"Tensor {name}{end}" for end in ("", "_T") for name in ("indptr", "indices", "order"))
#: The kernel of every operator.
OPERATORS: dict[str, Callable[..., Any]] = {}
#: The composed form of each operator that has one, on the operator's arguments and with all of its results.
COMPOSED: dict[str, Callable[..., Any]] = {}

_LIBRARY = torch.library.Library("structconv", "FRAGMENT")
_OWN = frozenset((Tensor, Parameter, int, float, bool, str, type(None), list, tuple))


class _State:
    """`transforms` is true once a functional transform has met an operator: from then on tensors may be left of one."""

    transforms = False


def define(name: str, arguments: str, kernel: Callable[..., Any], fake: Callable[..., Any],
           check: Callable[..., None], results: str = "Tensor", *, backward: Callable[..., Any] | None = None,
           save: Callable[..., None] | None = None, tangent: Callable[..., Any] | None = None,
           linear_in: Sequence[int] = (), composed: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Define structconv::name(arguments) -> results with one body for every device, and its derivatives.

    A batch (`torch.vmap`) is computed one member after the other.

    Args:
        kernel: the body. It reads memory by the sizes that its arguments should have.
        fake: results without numbers, of the shapes, strides and dtypes of the kernel's.
        check: raises an error for arguments that the kernel must not see. The dispatcher's calls go through it; the
            library's own functions have checked what they pass on.
        backward: (ctx, gradients of the results) -> those of the arguments, by differentiable operators. None: there
            are no derivatives.
        save: (ctx, arguments, results), what the backward needs. By default `ctx.saved_tensors` are the tensors, which
            come first, and `ctx.options` the arguments after them.
        tangent: (arguments, their tangents or None) -> tangents of the results, by differentiable operators.
        linear_in: instead of `tangent`, the positions of arguments in each of which the operator is linear.
        composed: instead of `tangent`, (a function that computes the results without derivatives, arguments) -> the
            results by differentiable functions. It runs in forward mode, and may return None to leave the call to
            `backward`.

    Returns:
        The operator without the dispatcher, which takes longer than a kernel on few entries. If the inputs are plain
        tensors, and no tracer, mode, functional transform, forward derivative or profiler is active, it calls the
        kernel, or an `autograd.Function` of it; else the operator.

    `torch.library.register_autograd` has several times the overhead in a backward pass, which counts on small graphs:
    it completes the arguments from the schema at every call. Its gradients do not pass through `torch.func.grad` and
    `vjp`, and it has no forward derivatives. It is used only if torch lacks the private names that this needs.
    """
    def checked(*inputs: Any) -> Any:
        check(*inputs)
        return _no_view(kernel(*inputs))

    _LIBRARY.define(f"{name}({arguments}) -> {results}")
    _LIBRARY.impl(name, checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"structconv::{name}", _on_one_device(name, fake), lib=_LIBRARY)
    operator = getattr(torch.ops.structconv, name).default
    torch.library.register_vmap(operator, _batched(operator), lib=_LIBRARY)
    OPERATORS[name] = kernel
    if backward is None:
        return cast(Callable[..., Any], operator)
    save = save or _save_tensors(arguments.count("Tensor"))
    call = _past_dispatcher(name, operator, kernel, backward, save)
    if not private.follows_transforms:
        torch.library.register_autograd(operator, backward, setup_context=lambda ctx, inputs, output: save(
            ctx, inputs, output), lib=_LIBRARY)
        return _without_tangents(name, call)
    tangent = _multilinear(operator, linear_in) if linear_in else tangent
    _LIBRARY.impl(name, _dispatched(name, operator, backward, save, tangent, composed), "Autograd")
    return call


def _no_view(results: Any) -> Any:
    """The results; a single one that is a view is detached, since torch refuses to change in place a view that a
    Function returns."""
    return results.detach() if isinstance(results, Tensor) and results._is_view() else results


def by_layouts(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of two layouts, and others, as one of their six tensors."""
    return lambda *arguments: function(Csr(*arguments[:3]), Csr(*arguments[3:6]), *arguments[6:])


def _on_one_device(name: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """`fake`, which refuses tensors without numbers among others: nobody would compute the result's numbers."""
    def shapes(*inputs: Any) -> Any:
        tensors = [t for t in inputs if isinstance(t, Tensor)]
        devices = {t.device.type for t in tensors if t.dim() or t.is_meta}
        if len(devices) > 1:
            raise ShapeError(name, "tensors must be on one device", sorted(devices))
        return fake(*inputs)

    return shapes


def _save_tensors(count: int) -> Callable[..., None]:
    def save(ctx: Any, inputs: tuple[Any, ...], _: Any) -> None:
        ctx.options = inputs[count:]
        ctx.save_for_backward(*inputs[:count])

    return save


def _past_dispatcher(name: str, operator: Any, compute: Callable[..., Any], backward: Callable[..., Any],
                     save: Callable[..., None]) -> Callable[..., Any]:
    def direct(ctx: Any, *inputs: Any) -> Any:
        output = _no_view(compute(*inputs))
        save(ctx, inputs, output)
        return output

    apply = private.bound_apply(_function(name, direct, backward))

    def call(*inputs: Any) -> Any:
        if (is_compiling() or private.watched() or not _OWN.issuperset(map(type, inputs))
                or (_State.transforms and _wrapped(inputs)) or inputs[0].is_meta):
            return operator(*inputs)
        if torch.is_grad_enabled() and private.any_requires_grad(*inputs):
            return apply(*inputs)
        return compute(*inputs)

    return call


def _without_tangents(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, but an error where `torch.library.register_autograd` would lose a tangent."""
    def checked(*inputs: Any) -> Any:
        if any(map(_has_tangent, inputs)):
            raise NotImplementedError(f"structconv::{name} has no forward derivative with this version of torch")
        return call(*inputs)

    return checked


def _multilinear(operator: Any, factors: Sequence[int]) -> Callable[..., Tensor]:
    """The rule for the tangent of an operator that is linear in each of these arguments: the operator itself."""
    def tangent(arguments: Sequence[Any], tangents: Sequence[Any]) -> Tensor:
        parts = [operator(*arguments[:i], tangents[i], *arguments[i + 1:]) for i in factors if tangents[i] is not None]
        if not parts:
            raise NotImplementedError(f"{operator.name()} has derivatives in its arguments {factors} alone")
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
        needs_grad = torch.is_grad_enabled() and private.any_requires_grad(*inputs)
        forward_mode = private.forward_level() >= 0
        if not needs_grad and not (forward_mode and any(map(_has_tangent, inputs))):
            return plain(*inputs)
        if forward_mode and composed is not None and (results := composed(plain, inputs)) is not None:
            return results
        if not private.transforms_active():
            return apply(*inputs)
        _State.transforms = True
        with private.single_level():
            return apply(*inputs)

    return differentiable


def _has_tangent(value: Any) -> bool:
    return isinstance(value, Tensor) and unpack_dual(value).tangent is not None


def _function(name: str, forward: Callable[..., Any], backward: Callable[..., Any],
              jvp: Callable[..., Any] | None = None) -> Any:
    def pulled(ctx: Any, *grads: Any) -> Any:
        _State.transforms = _State.transforms or any(grad is not None and private.is_batched(grad) for grad in grads)
        return backward(ctx, *grads)

    members = {"forward": staticmethod(forward), "backward": staticmethod(pulled)}
    return type(name, (torch.autograd.Function,), members if jvp is None else {**members, "jvp": staticmethod(jvp)})


# -- batches ------------------------------------------------------------------------------------------------------

def _batched(operator: Any) -> Callable[..., Any]:
    """Return the batching rule of `torch.vmap`: it computes one member after the other."""
    def members(info: Any, in_dims: Sequence[Any], *inputs: Any) -> Any:
        results = [operator(*(_member(x, dim, i) for x, dim in zip(inputs, in_dims, strict=True)))
                 for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(results[0])

    return members


def _member(x: Any, dim: Any, i: int) -> Any:
    return x.select(dim, i) if isinstance(x, Tensor) and dim is not None else x


# -- a forward and a backward kernel ------------------------------------------------------------------------------

def differentiable_operator(name: str, inputs: str, options: str, results: str, *, composed: Callable[..., Any],
                            kernel: str = "", forward: Callable[..., Any] | None = None,
                            backward: Callable[..., Any] | None = None, fake: Callable[..., Any] | None = None,
                            check: Callable[..., None] | None = None, edges: bool = True, flags: str = "",
                            grads: int = 1, reads_results: bool = True, needs: str = "", with_backward: bool = True,
                            takes: Callable[..., bool] | None = None) -> Callable[..., Any]:
    """Define structconv::name and structconv::name_backward, and the derivatives of both.

        name(layouts, inputs, options, flags) -> results
        name_backward(layouts, inputs, results, gradients of the first `grads` results, options, needs_*) -> inputs

    A first derivative is one call of the backward. That of name_backward is taken of `composed`, and so are all of them
    in forward mode; if not `with_backward` there is no such operator, and the first is taken so too.

    Args:
        inputs: the tensors that have gradients, with their sizes, "q N K D, any bias? K E": `any` dtype, where the
            others share one, and with `?` perhaps None. M, N and E are the inputs, outputs and edges of the layouts.
            Inputs without sizes are not checked.
        options: the other arguments that both passes take, as in a schema, and `flags` those of the forward alone.
            Options that end with `DROPOUT` are checked for that.
        results: the tensors that the forward returns, "y N K C, wide peaks N 2 K", `wide` of the dtype that sums well.
            The size T is N where the last flag is true, and else 0.
        composed: (Csr, Csr, inputs, options) -> the first `grads` results, by differentiable operators. It is what the
            operator computes where no kernel can, 16-bit inputs in float32.
        kernel: for options that end with `DROPOUT`, the name of kernels of the core and of `triton`:
            NAME_forward(by_target, inputs, options, flags) and NAME_backward(by_target, by_source, inputs, results,
            gradients, options, needs_*), for inputs that it `takes`. Or, instead:
        forward, backward: of both operators, on their arguments; None where no kernel can take them. The second returns
            None for an input that is None or flagged as not needed; gradients of results but the first may be None.
        fake: of the first operator, where the sizes do not say it.
        check: raises an error for (Csr, Csr, inputs, options) that do not fit in other ways than sizes.
        edges: whether the two layouts, six tensors, come first.
        reads_results: whether the backward takes the first `grads` results, too, and not only those after them. What it
            does not take is not kept for it.
        needs: inputs whose gradients the backward computes only if a flag says so: "bias".

    Returns:
        (Csr, Csr, inputs, options, flags) -> results: checked, and past the dispatcher as `define` says. The last of
        `DROPOUT` may be `None` for the size K.
    """
    op = _Operator(name, inputs, options, results, flags, grads, reads_results, needs, composed, check, takes, edges)
    op.shapes = fake = fake or op.fake
    if kernel:
        forward = op.by_kernel(f"{kernel}_forward", op.at_options)
        backward = op.by_kernel(f"{kernel}_backward", op.at_options_back, back=True)
    if with_backward:
        op.backward = define(f"{name}_backward", op.schema_back, op.back_with_fallback(backward), op.fake_back,
                             op.check_back, _returned(op.inputs), backward=op.differentiate_back, save=op.save_back,
                             composed=op.back_in_forward_mode)
    differentiate, save = (op.differentiate, op.save) if with_backward else (op.differentiate_composed, op.save_inputs)
    call = define(name, op.schema, op.with_fallback(forward), fake, op.check_raw, _returned(op.results),
                  backward=differentiate, save=save, composed=op.in_forward_mode)
    COMPOSED[name] = op.compute_composed

    def run(*arguments: Any) -> Any:
        flat = (*arguments[0], *arguments[1], *arguments[2:]) if edges else arguments
        return call(*op.checked(flat))

    return run


#: The options of dropout, see `affine_attention`: all kernels take them last.
DROPOUT = "float p, Tensor? seed, SymInt batch_heads"


class _Declaration(NamedTuple):
    """A tensor with letters for its sizes; its dtype is that of the others, unless it has one of its own."""

    name: str
    sizes: tuple[str, ...]
    optional: bool
    own_dtype: bool

    @classmethod
    def parse(cls, text: str) -> list[_Declaration]:
        tensors = []
        for declared in text.split(", "):
            first, *words = declared.split()
            own_dtype = first in ("any", "wide")
            name, *sizes = words if own_dtype else (first, *words)
            tensors.append(cls(name.rstrip("?"), tuple(sizes), name.endswith("?"), own_dtype))
        return tensors


def _returned(tensors: Sequence[Any]) -> str:
    return f"({', '.join(['Tensor'] * len(tensors))})" if len(tensors) > 1 else "Tensor"


def _several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


class _Operator:
    """The positions of the arguments of both operators, their checks, and every derivative.

    Forward: layouts, inputs, options, flags. Backward: layouts, inputs, the results that it reads, gradients, options,
    needs.
    """

    backward: Callable[..., Any]
    shapes: Callable[..., Any]

    def __init__(self, name: str, inputs: str, options: str, results: str, flags: str, grads: int, reads_results: bool,
                 needs: str, composed: Callable[..., Any], check: Callable[..., None] | None,
                 takes: Callable[..., bool] | None, edges: bool) -> None:
        self.name, self.composed, self.check, self.takes, self.grads = name, composed, check, takes, grads
        self.inputs, self.results = _Declaration.parse(inputs), _Declaration.parse(results)
        self.read = self.results if reads_results else self.results[grads:]
        self.reads_results, self.flags, self.dropout = reads_results, bool(flags), options.endswith(DROPOUT)
        count = len([option for option in options.split(", ") if option])
        self.start = EDGES.count(",") + 1 if edges else 0
        self.stop = self.start + len(self.inputs)
        self.at_inputs, self.at_options = slice(self.start, self.stop), slice(self.stop, self.stop + count)
        self.at_results = slice(self.stop, self.stop + len(self.read))
        self.at_grads = slice(self.at_results.stop, self.at_results.stop + grads)
        self.at_options_back = slice(self.at_grads.stop, self.at_grads.stop + count)
        names = [t.name for t in self.inputs]
        self.flag_of = {names.index(one): at for at, one in enumerate(needs.split(", "), self.at_options_back.stop)
                        if one}
        tables = [self.start + i for i, t in enumerate(self.inputs) if not t.own_dtype]
        first_of = {self.inputs[at - self.start].sizes[-1:]: at for at in reversed(tables)}
        self.like, self.tables = tables[0], list(first_of.values())
        layouts = [EDGES] if edges else []
        tensors = [f"Tensor{'?' * t.optional} {t.name}" for t in self.inputs]
        results_back = [f"Tensor {t.name}" for t in self.read]
        grads_back = [f"Tensor{'?' * (i > 0)} grad_{t.name}" for i, t in enumerate(self.results[:grads])]
        flags_back = [f"bool needs_{names[i]}" for i in self.flag_of]
        self.schema = ", ".join(filter(None, (*layouts, *tensors, options, flags)))
        self.schema_back = ", ".join(filter(None, (
            *layouts, *tensors, *results_back, *grads_back, options, *flags_back)))

    # -- checks --

    def checked(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Check sizes, dtypes and options of a forward call; return its arguments, with `batch_heads`."""
        inputs, sizes, first = arguments[self.at_inputs], self.sizes(arguments), arguments[self.like]
        for declared, t in zip(self.inputs, inputs, strict=True):
            if t is None or not declared.sizes:
                continue
            fits = t.dim() == len(declared.sizes)
            for letter, size in zip(declared.sizes, t.shape, strict=False):
                fits = fits and sizes.setdefault(letter, size) == size
            if not fits:
                shape = ", ".join(f"{one}={sizes[one]}" if one in sizes else one for one in declared.sizes)
                raise ShapeError(self.name, f"{declared.name} must have shape ({shape})", tuple(t.shape))
            if t.dtype != first.dtype and not declared.own_dtype:
                raise ShapeError(self.name, f"{declared.name} must have the dtype {first.dtype} of "
                                 f"{self.inputs[self.like - self.start].name}", t.dtype)
        if self.check is not None:
            ends = (Csr(*arguments[:3]), Csr(*arguments[3:6])) if self.start else ()
            self.check(*ends, *inputs, *arguments[self.at_options])
        if self.dropout:
            end = self.at_options.stop
            p, seed, batch_heads = arguments[end - 3:end]
            if p != 0 or (batch_heads is not None and batch_heads < 1):
                check_dropout(self.name, p, seed, batch_heads)
            if batch_heads is None:
                return *arguments[:end - 1], sizes["K"], *arguments[end:]
        return arguments

    def sizes(self, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """The sizes of the layouts."""
        if not self.start:
            return {}
        return {"N": arguments[0].shape[0] - 1, "M": arguments[3].shape[0] - 1, "E": arguments[1].shape[0]}

    def check_raw(self, *arguments: Any) -> None:
        inputs = arguments[self.at_inputs]
        check_numbers(self.name, *inputs)
        if self.start:
            check_edges(self.name, arguments[:self.start], inputs[0])
        self.checked(arguments)

    def check_back(self, *arguments: Any) -> None:
        forward = (*arguments[:self.stop], *arguments[self.at_options_back], *(True,) * self.flags)
        self.check_raw(*forward)
        results, grads, expected = arguments[self.at_results], arguments[self.at_grads], self.expected(forward)
        check_numbers(self.name, arguments[self.start], *results, *grads)
        read = expected[len(expected) - len(results):]
        for declared, t, like in (*zip(self.read, results, read, strict=True),
                                  *zip(self.results, grads, expected, strict=False)):
            if t is not None:
                check_like(f"{self.name}_backward", declared.name, t, like)

    # -- results --

    def fake(self, *arguments: Any) -> Any:
        """Results without numbers, by the sizes of the inputs."""
        sizes: dict[str, Any] = {"2": 2}
        for declared, t in zip(self.inputs, arguments[self.at_inputs], strict=True):
            if t is not None:
                sizes.update(zip(declared.sizes, t.shape, strict=False))
        sizes = {**self.sizes(arguments), **sizes}
        if self.flags:
            sizes["T"] = sizes["N"] if arguments[-1] else 0
        like = arguments[self.like]
        wide = sum_dtype(like.dtype)
        results = tuple(like.new_empty([sizes[letter] for letter in t.sizes], dtype=wide if t.own_dtype else like.dtype)
                        for t in self.results)
        return results if len(results) > 1 else results[0]

    def expected(self, arguments: tuple[Any, ...]) -> tuple[Tensor, ...]:
        """The results of the forward, without numbers."""
        return _several(self.shapes(*arguments))

    def by_kernel(self, name: str, options: slice, back: bool = False) -> Callable[..., Any]:
        """The forward or the backward by the kernel of this name; None where it is missing."""
        start, end = self.start, options.stop

        def compute(*arguments: Any) -> Any:
            if self.takes is not None and not self.takes(*arguments[self.at_inputs]):
                return None
            inputs, drop, flags = arguments[start:end - 3], arguments[end - 3:end], arguments[end:]
            if (core := self._usable(dispatch.usable, arguments)) is not None:
                edges = [edges_of(Csr(*arguments[:3]), arguments[3].shape[0] - 1)] if start else []
                if start and back:
                    edges.append(edges_of(Csr(*arguments[3:6]), arguments[0].shape[0] - 1))
                return getattr(core, name)(*edges, *inputs, *drop_of(*drop), *flags)
            if start and (gpu := getattr(self._usable(triton.usable, arguments), name, None)) is not None:
                layouts = (Csr(*arguments[:3]), Csr(*arguments[3:6])) if back else (Csr(*arguments[:3]),)
                return gpu(*layouts, *inputs, Drop(*drop), *flags)
            return None

        return compute

    def _usable(self, usable: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """The kernels, if they can take inputs of the common dtype, of all numbers of channels."""
        edges, kernels = arguments[1].shape[0] if self.start else 0, None
        for at in self.tables:
            if arguments[at] is not None and (kernels := usable(arguments[at], edges)) is None:
                return None
        return kernels

    def with_fallback(self, forward: Callable[..., Any] | None) -> Callable[..., Any]:
        """The forward, composed where it has no result."""
        def compute(*arguments: Any) -> Any:
            results = None if forward is None else forward(*arguments)
            return self.compute_composed(*arguments) if results is None else results

        return compute

    def back_with_fallback(self, backward: Callable[..., Any] | None) -> Callable[..., Any]:
        """The backward, that of the composed form where it has no result. An operator returns no None: empty ones."""
        def compute(*arguments: Any) -> Any:
            grads = None if backward is None else backward(*arguments)
            grads = self.differentiate_by_composed(*arguments) if grads is None else grads
            return tuple(arguments[self.start].new_empty((0,)) if g is None or t is None else g.to(t.dtype)
                         for g, t in zip(grads, arguments[self.at_inputs], strict=True))

        return compute

    def compute_composed(self, *arguments: Any) -> Any:
        """The composed form; a result that only a backward pass reads is NaN."""
        formula, inputs = self.formula(arguments, arguments[self.at_options])
        computed, expected = _several(formula(*inputs)), _several(self.shapes(*arguments))
        # a view made without gradients could not be changed in place
        computed = tuple(t.clone(memory_format=torch.contiguous_format) if t._is_view() else t.contiguous()
                         for t in computed)
        results = *computed, *(torch.full_like(t, torch.nan) for t in expected[len(computed):])
        return results if len(expected) > 1 else results[0]

    def needed(self, arguments: Sequence[Any]) -> list[bool]:
        """Which inputs the backward is to give a gradient."""
        return [t is not None and (i not in self.flag_of or arguments[self.flag_of[i]])
                for i, t in enumerate(arguments[self.at_inputs])]

    def differentiate_by_composed(self, *arguments: Any) -> list[Tensor | None]:
        """The backward of the composed form."""
        formula, inputs = self.formula(arguments, arguments[self.at_options_back])
        needed, grads = self.needed(arguments), arguments[self.at_grads]
        with torch.no_grad():  # no second derivative
            pulled = private.above_autograd(lambda: pulled_back(formula, inputs, needed, grads))
        return [None if not need else torch.zeros_like(t) if g is None else g.contiguous()
                for t, g, need in zip(inputs, pulled, needed, strict=True)]

    def fake_back(self, *arguments: Any) -> tuple[Tensor, ...]:
        return tuple(arguments[self.start].new_empty(t.shape if need else (0,), dtype=None if t is None else t.dtype)
                     for t, need in zip(arguments[self.at_inputs], self.needed(arguments), strict=True))

    def formula(self, tensors: Sequence[Any], options: Sequence[Any]) -> tuple[Callable[..., Any], Sequence[Any]]:
        """The composed form as a function of the inputs, and these; inputs of 16 bits are computed with in 32."""
        ends = (Csr(*tensors[:3]), Csr(*tensors[3:6])) if self.start else ()

        def compute(*inputs: Any) -> Any:
            dtype = inputs[self.like - self.start].dtype
            if not self.inputs[0].sizes or dtype == sum_dtype(dtype):
                return self.composed(*ends, *inputs, *options)
            y = self.composed(*ends, *(t if t is None else t.to(sum_dtype(dtype)) for t in inputs), *options)
            return y if self.results[0].own_dtype else y.to(dtype)

        return compute, tensors[self.at_inputs]

    # -- backward mode --

    def _store(self, ctx: Any, tensors: Sequence[Any], options: Sequence[Any]) -> None:
        ctx.options, kept = [*options], [*tensors]
        for i, option in enumerate(options):
            kept.append(option if isinstance(option, Tensor) else None)
            if kept[-1] is not None:
                ctx.options[i] = None
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*kept)

    def _load(self, ctx: Any) -> tuple[Sequence[Any], list[Any]]:
        """The tensors and the options of `_store`."""
        saved, options = ctx.saved_tensors, [*ctx.options]
        count = len(saved) - len(options)
        for i, t in enumerate(saved[count:]):
            options[i] = options[i] if t is None else t
        return saved[:count], options

    def _place(self, grads: Sequence[Tensor | None], needed: Sequence[bool]) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs among those of all arguments."""
        return (*(None,) * self.start, *(g if need else None for g, need in zip(grads, needed[self.at_inputs],
                strict=True)), *(None,) * (len(needed) - self.stop))

    def save(self, ctx: Any, arguments: tuple[Any, ...], results: Tensor | tuple[Tensor, ...]) -> None:
        kept: list[Tensor | None] = [*_several(results)[len(self.results) - len(self.read):]]
        ctx.result = None
        if self.reads_results and type(y := kept[0]) is Tensor and not is_compiling() and not private.watched(
                profilers=False):
            ctx.result, kept[0] = Result(y), None
        self._store(ctx, (*arguments[:self.stop], *kept), arguments[self.at_options])

    def differentiate(self, ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        cotangents, needed = grads[:self.grads], ctx.needs_input_grad
        if not any(grad is not None for grad in cotangents):
            return (None,) * len(needed)
        saved, options = self._load(ctx)
        inputs, results = saved[:self.stop], saved[self.stop:]
        if ctx.result is not None:
            if (y := ctx.result.take()) is None:
                with torch.no_grad():
                    y = _several(OPERATORS[self.name](*inputs, *options, *(True,) * self.flags))[0]
            results = y, *results[1:]
        if cotangents[0] is None:
            y = self.expected((*inputs, *options, *(True,) * self.flags))[0]
            cotangents = (torch.zeros_like(y), *cotangents[1:])
        gradients = self.backward(*inputs, *results, *cotangents, *options,
                                  *(needed[self.start + i] for i in self.flag_of))
        return self._place(gradients, needed)

    def save_inputs(self, ctx: Any, arguments: tuple[Any, ...], _: Any) -> None:
        self._store(ctx, arguments[:self.stop], arguments[self.at_options])

    def differentiate_composed(self, ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the derivatives of the composed form, which is computed again."""
        formula, inputs = self.formula(*self._load(ctx))
        needed = ctx.needs_input_grad
        return self._place(pulled_back(formula, inputs, needed[self.at_inputs], [grad]), needed)

    def save_back(self, ctx: Any, arguments: tuple[Any, ...], _: Any) -> None:
        self._store(ctx, (*arguments[:self.stop], *arguments[self.at_grads]), arguments[self.at_options_back])

    def differentiate_back(self, ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        """Differentiate the gradients of the composed form by the inputs and by the gradients of the results."""
        (saved, options), needed = self._load(ctx), ctx.needs_input_grad
        formula, inputs = self.formula(saved, options)
        nonzero = [c is not None for c in cotangents]
        pulled = pulled_back(self._gradients(formula, nonzero), [*inputs, *saved[self.stop:]],
                            [*needed[self.at_inputs], *needed[self.at_grads]],
                            [c for c in cotangents if c is not None])
        result: list[Tensor | None] = [None] * len(needed)
        result[self.at_inputs], result[self.at_grads] = pulled[:len(inputs)], pulled[len(inputs):]
        return tuple(result)

    def _gradients(self, formula: Callable[..., Any], nonzero: Sequence[bool]) -> Callable[..., Any]:
        """(inputs, gradients of the results) -> the gradients of the inputs that require one."""
        def gradients(*tensors: Tensor) -> tuple[Tensor, ...]:
            inputs, grads = tensors[:len(self.inputs)], tensors[len(self.inputs):]
            pulled = pulled_back(formula, inputs, nonzero, grads)
            return tuple(torch.zeros_like(t) if g is None else g
                         for t, g, ask in zip(inputs, pulled, nonzero, strict=True) if ask)

        return gradients

    # -- forward mode --

    def in_forward_mode(self, plain: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The composed form of the results that have derivatives."""
        formula, inputs = self.formula(arguments, arguments[self.at_options])
        results, computed = plain(*arguments), formula(*inputs)
        if isinstance(results, Tensor):
            return computed
        computed = _several(computed)
        return *computed, *results[len(computed):]

    def back_in_forward_mode(self, plain: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """The gradients are linear in those of the results, by which alone they are differentiated as they are.

        Graphs that were recorded before forward mode was entered contain this operator; those within it do not.
        """
        inputs, grads = arguments[self.at_inputs], arguments[self.at_grads]
        if any(map(_has_tangent, inputs)):
            return self._composed_back(arguments, inputs, grads)
        duals = [None if g is None else unpack_dual(g) for g in grads]
        if not any(d is not None and d.tangent is not None for d in duals):
            return None
        primals, tangents = ([None if d is None else d[part] for d in duals] for part in (0, 1))
        if tangents[0] is None:
            tangents[0] = torch.zeros_like(grads[0])
        results, moved = (self.backward(*arguments[:self.at_grads.start], *parts, *arguments[self.at_grads.stop:])
                          for parts in (primals, tangents))
        return tuple(y if t is None else make_dual(y, d) for t, y, d in zip(inputs, results, moved, strict=True))

    def _composed_back(self, arguments: Sequence[Any], inputs: Sequence[Any], grads: Sequence[Any]) -> Any:
        if private.transforms_active():
            raise NotImplementedError(f"structconv::{self.name}_backward has no forward derivative in its inputs "
                                      f"within a functional transform; structconv::{self.name} has")
        formula, _ = self.formula(arguments, arguments[self.at_options_back])
        pulled = pulled_back(formula, inputs, [t is not None for t in inputs], grads)
        return tuple(arguments[self.start].new_empty((0,)) if g is None else g for g in pulled)
