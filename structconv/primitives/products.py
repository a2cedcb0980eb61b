"""Products of tall matrices with small ones, by the fastest of three kernels, as registered operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from structconv import torch_compat as private
from structconv.errors import ShapeError, text_of
from structconv.machine import processor
from structconv.primitives.memory import new_empty
from structconv.primitives.native import dispatch
from structconv.primitives.native.checks import check_numbers
from structconv.primitives.native.loader import CALLED
from structconv.primitives.native.node import Gradients, as_node, is_direct
from structconv.primitives.operator import define

__all__ = ["contract_heads", "expand_heads", "linear", "outer", "product", "product_for", "small_product",
           "split_heads"]

Kernel = Literal["native", "library", "torch"]

#: Columns from which MKL runs at its rate; below, others are several times faster from `LEAST_NUMBERS` of x on.
FULL_WIDTH, LEAST_NUMBERS = 16, 1 << 14
#: Multiplications from which others win enough over MKL at full width to pay for the operator's overhead.
LEAST_PRODUCTS = 1 << 24
#: On Intel's processors nothing is faster than MKL at full width, for more columns of x than `SHALLOW` or without a
#: bias, which it copies first, as long as x and the result have fewer bytes than `MKL_BYTES`, or without a bias x
#: alone, and the result than `FRESH_BYTES`; on others, oneDNN is.
ON_INTEL, SHALLOW, MKL_BYTES = "Intel" in processor(), 64, 10 << 20
#: Columns up to which the native kernel is the fastest of all. Beyond, it prefetches, and is faster than oneDNN if x
#: and the product exceed the caches, which is from `LEAST_BYTES` on, unless rows of x have `LONG_ROW` numbers or more.
FEW_COLUMNS, LEAST_BYTES, LONG_ROW = 16, 20 << 20, 1024
#: x^T y: multiplications from which the native kernel pays for few columns; rows from which it does for more, unless x
#: exceeds the caches, and numbers of the result beyond which twice as many are needed; and numbers from which MKL wins.
LEAST_NARROW, LEAST_ROWS, WIDE_OUTER, LARGE_OUTER = 1 << 18, 1 << 13, 1 << 16, 1 << 19
#: Bytes beyond which the C library gives memory back at once, so that every result costs its page faults again; there
#: a product into memory that is kept is faster by either library, up to this number of channels.
FRESH_BYTES, FRESH_CHANNELS = 32 << 20, 256
#: Rows for which a copy of K matrices side by side would cost more than their product.
FEW_ROWS = 16
#: x^T y: y so narrow against so wide an x that it goes to oneDNN, and rows from which it is cut into `CUT` parts.
NARROW, WIDE, TALL, CUT = 8, 64, 1 << 14, 8


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x w + bias: (..., M, P), (P, Q) and (Q,) or none -> (..., M, Q).

    In float32 on a CPU a tall x meets a small w at different rates in MKL, in oneDNN and in the native kernel; the
    operator `structconv::project` takes the fastest by a rule from the sizes (`project_kernel`), large results on huge
    pages. It has derivatives of any order. Small products, other dtypes and devices, autocast, and transforms of
    functions are `x @ w + bias` as torch has it, without overhead.
    """
    columns = w.shape[-1]
    small = not is_compiling() and not (
        x.numel() >= LEAST_NUMBERS if columns < FULL_WIDTH else x.numel() * columns >= LEAST_PRODUCTS)  # `_pays`
    if small or not _large(x, w, columns, _is_copied(bias)):
        return x @ w if bias is None else small_product(x, w, bias)
    return _large_product(x, w, bias, False)


def small_product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """`product` where it is known that torch's own is the fastest."""
    if bias is None:
        return x @ w
    return torch.addmm(bias, x, w) if x.dim() == 2 else functional.linear(x, w.mT, bias)


def product_for(numbers: int, columns: int) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the function that computes `product` for this number of numbers in x, within a factor of four, and
    columns.
    """
    return product if _pays(4 * numbers, columns) else small_product


def linear(x: Tensor, w_QP: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Tensor:
    """x w^T + bias: `product` for a w that lies as in torch's linear layers; the positive part of it with `relu`. In
    traced programs it is torch's own.

    Raises:
        ShapeError: a last axis of x or a bias's dtype that w does not go with; RuntimeError, torch's own, where that
            computes.
    """
    columns = w_QP.shape[0]
    small = is_compiling() or not (
        x.numel() >= LEAST_NUMBERS if columns < FULL_WIDTH else x.numel() * columns >= LEAST_PRODUCTS)  # `_pays`
    if small or (bias is not None and bias.shape != w_QP.shape[:1]) or not _large(x, w_QP, columns, _is_copied(bias)):
        y = functional.linear(x, w_QP, bias)
        return y.relu_() if relu else y
    if not relu:
        return _large_product(x, w_QP, bias, True)
    rows = x.reshape(-1, x.shape[-1])
    _check_project(rows, w_QP.mT, bias)
    return _project_relu(rows, w_QP.mT, bias).reshape(*x.shape[:-1], w_QP.shape[0])


def _large_product(x: Tensor, w: Tensor, bias: Tensor | None, by_outputs: bool) -> Tensor:
    """`product`, or `linear` for a w (Q, P): one node where it may be, else the registered operator."""
    columns = w.shape[0 if by_outputs else 1]
    if is_direct(x, w, bias) and x.shape[-1] * columns == w.numel() and (bias is None or bias.shape == (columns,)):
        by_rows = not (w.t() if by_outputs else w).is_contiguous()
        return _node(None, partial(_by_torch, by_outputs), x, w, bias, by_outputs, by_rows)
    rows, w = x.reshape(-1, x.shape[-1]), w.mT if by_outputs else w
    _check_project(rows, w, bias)
    return _project(rows, w, bias).reshape(*x.shape[:-1], w.shape[1])


def _by_torch(by_outputs: bool, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, w if by_outputs else w.mT, bias)


def _node_forward(_: Any, x: Tensor, w: Tensor, bias: Tensor | None, by_outputs: bool, _by_rows: bool) -> Tensor:
    y = _project_kernel(x.reshape(-1, x.shape[-1]), w.t() if by_outputs else w, bias)
    return y if x.dim() == 2 else private.unsafe_view(y, [*x.shape[:-1], y.shape[1]])  # no view, as torch's


def _node_backward(_: Any, x: Tensor, w: Tensor, bias: Tensor | None, grad: Tensor, needed: Sequence[bool],
                   by_outputs: bool, by_rows: bool) -> Gradients:
    rows, grads, w = x.reshape(-1, x.shape[-1]), grad.reshape(-1, grad.shape[-1]), w.t() if by_outputs else w
    of_x = _project_kernel(grads, w.t(), None).view(x.shape) if needed[0] else None
    of_w = (_outer_kernel(grads, rows) if by_rows else _outer_kernel(rows, grads)) if needed[1] else None
    # As w lies: where gradients are added up, another layout is copied.
    of_w = of_w.t() if of_w is not None and by_rows is not by_outputs else of_w
    return of_x, of_w, grads.sum(0) if needed[2] else None


_node = as_node("_Product", 3, _node_forward, _node_backward, readers={0: (1,), 1: (0,), 2: ()})


def outer(x: Tensor, y: Tensor) -> Tensor:
    """x^T y: (M, P), (M, Q) -> (P, Q), the adjoint of `product` in w, by the fastest kernel. Any order of derivatives.

    Holds nothing beyond the result but, where the rows are cut into parts, as many results: up to 16.
    """
    columns = y.shape[-1]
    pays = is_compiling() or _pays(x.numel(), columns)
    return _outer(x, y) if pays and _large(x, y, columns, True) else x.mT @ y


def split_heads(x: Tensor, size: int, channels: int) -> Tensor:
    """The columns of a product by heads: (..., M, K C) -> (..., K, M, C), a view."""
    return x.view(*x.shape[:-1], size, channels).transpose(-2, -3)


def expand_heads(x: Tensor, theta: Tensor) -> Tensor:
    """(..., M, P) and (K, P, Q) -> (..., K, M, Q), as one product of matrices."""
    size, _, out = theta.shape
    if size == 1:
        return product(x, theta.squeeze(0)).unsqueeze(-3)
    side_by_side = theta.stride(0) == out * theta.stride(2)
    if not side_by_side and not torch.compiler.is_compiling() and x.numel() <= FEW_ROWS * x.shape[-1]:
        rows = x.reshape(-1, x.shape[-1])
        y = torch.bmm(rows.expand(size, *rows.shape), theta)
        return y.unflatten(1, x.shape[:-1]).movedim(0, -3)
    y = product(x, theta.transpose(0, 1).flatten(1))
    return y.view(*y.shape[:-1], size, out).transpose(-2, -3)


def contract_heads(r: Tensor, theta: Tensor, bias: Tensor | None = None) -> Tensor:
    """(..., K, N, P) and (K, P, Q) -> (..., N, Q), as one product of matrices; b (Q) is added where it is given."""
    if theta.shape[0] == 1:
        return product(r.squeeze(-3), theta.squeeze(0), bias)
    rows, whole = r.transpose(-3, -2), theta.flatten(0, 1)
    y = product(rows.reshape(-1, whole.shape[0]), whole, bias)
    return y.reshape(*rows.shape[:-2], theta.shape[-1]) if rows.dim() > 3 else y


def _large(x: Tensor, w: Tensor, columns: int, added: bool) -> bool:
    """Return True if another kernel than MKL's takes a product that is traced, or that `_pays`, of a result with this
    number of columns, to which something may be `added`."""
    tracing = is_compiling()
    if ON_INTEL and not tracing and _suits_mkl(x.numel(), x.shape[-1], columns, added):
        return False
    if private.linear_pointwise is None or columns < 2 or w.dim() != 2:
        return False
    if w.dtype is not torch.float32 or x.dtype is not torch.float32:
        return False
    if tracing and (columns >= FULL_WIDTH or not x.shape[-1]):  # a traced program shall hold for any number of entries
        return False
    return (x.device.type == "cpu" and not torch.is_autocast_enabled("cpu") and x.dim() > 1
            and not private.transforms_active() and private.forward_level() < 0)


def _is_copied(bias: Tensor | None) -> bool:
    """Return True if the copy of a bias that MKL makes counts: where gradients follow, by MKL, another library ahead of
    it costs more."""
    return bias is not None and not torch.is_grad_enabled()


def _pays(numbers: int, columns: int) -> bool:
    """Return True if x with this number of numbers, times w with this number of columns, uses a kernel other than
    MKL's.
    """
    return numbers >= LEAST_NUMBERS if columns < FULL_WIDTH else numbers * columns >= LEAST_PRODUCTS


def _suits_mkl(numbers: int, inputs: int, columns: int, added: bool) -> bool:
    """Return True if MKL is the fastest on Intel's processors, for x of this size and w with this number of columns."""
    wide = columns >= FULL_WIDTH if inputs > SHALLOW else columns > FEW_COLUMNS and not added
    return wide and 4 * (numbers + numbers // inputs * columns) < MKL_BYTES


def project_kernel(rows: int, inputs: int, columns: int, added: bool = False) -> Kernel:
    """Return the kernel for x w of these sizes, to which a bias may be `added`: the native one for few columns and for
    results larger than the caches.
    """
    if columns < 2 or not _pays(rows * inputs, columns):
        return "torch"
    wide = columns > FEW_COLUMNS and 4 * rows * inputs < MKL_BYTES and 4 * rows * columns < FRESH_BYTES
    if ON_INTEL and (_suits_mkl(rows * inputs, inputs, columns, added) or (wide and not added)):
        return "torch"
    exceeds = 4 * rows * (inputs + columns) >= LEAST_BYTES and inputs < LONG_ROW
    return "native" if columns <= FEW_COLUMNS or exceeds else "library"


def outer_kernel(rows: int, wide: int, narrow: int) -> Kernel:
    """Return the kernel for x^T y of these sizes: the native one for few columns and for results larger than the
    caches.
    """
    numbers = wide * narrow
    least = LEAST_ROWS if numbers <= WIDE_OUTER else 2 * LEAST_ROWS
    few = rows < least and 4 * rows * wide < LEAST_BYTES
    if narrow < 2 or (rows * numbers < LEAST_NARROW if narrow <= FEW_COLUMNS else few):
        return "torch"
    return "native" if numbers < LARGE_OUTER else "library"


def _native(x: Tensor) -> bool:
    return private.linear_pointwise is not None and x.dtype is torch.float32 and x.device.type == "cpu"


def _linear(x: Tensor, w_QP: Tensor, bias: Tensor | None) -> Tensor:
    """x w^T + bias by oneDNN, which refuses rows of w that overlap and reads any bias as a contiguous one."""
    w_QP = w_QP if w_QP.is_contiguous() or w_QP.t().is_contiguous() else w_QP.contiguous()
    return private.linear_pointwise(x, w_QP, None if bias is None else bias.contiguous(), "none", [], "")


def _project_kernel(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    (rows, inputs), columns = x.shape, w.shape[1]
    chosen = project_kernel(rows, inputs, columns, bias is not None) if _native(x) else "torch"
    if chosen == "native" and (core := dispatch.usable_rows(x)) is not None:
        y: Tensor = core.project(x, w, bias)
        return y
    if chosen == "torch":
        return x @ w if bias is None else torch.addmm(bias, x, w)
    if columns < FULL_WIDTH or inputs >= FRESH_CHANNELS or 4 * rows * columns <= FRESH_BYTES:
        return _linear(x.contiguous(), w.t(), bias)
    y = new_empty(x, (rows, columns))
    return torch.mm(x, w, out=y) if bias is None else torch.addmm(bias, x, w, out=y)


def _project_relu_kernel(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """In place by torch: what oneDNN joins to its product makes 0 of NaN."""
    return _project_kernel(x, w, bias).relu_()


def _outer_kernel(x: Tensor, y: Tensor) -> Tensor:
    rows, narrow, wide = x.shape[0], *sorted((x.shape[1], y.shape[1]))
    chosen = outer_kernel(rows, wide, narrow) if _native(x) else "torch"
    if chosen == "native" and (core := dispatch.usable_rows(x, y)) is not None:
        result: Tensor = core.outer(x, y)
        return result
    if chosen == "torch":
        return x.t() @ y
    return _wide_outer(x, y) if wide == x.shape[1] else _wide_outer(y, x).t().contiguous()


def _wide_outer(x: Tensor, y: Tensor) -> Tensor:
    """x^T y by the faster library, for x at least as wide as y."""
    wide, narrow = x.shape[1], y.shape[1]
    if (narrow <= NARROW and wide >= WIDE) or (narrow <= 2 * NARROW and wide >= 8 * WIDE):
        return _linear(y.t(), x.t(), None).t().contiguous()
    padded = functional.pad(y, (0, FULL_WIDTH - narrow)) if narrow < FULL_WIDTH else y
    return _cut_outer(x, padded)[:, :narrow].contiguous()


def _cut_outer(x: Tensor, y: Tensor) -> Tensor:
    """x^T y as the sum over parts of the rows, which the two threads of a large product share better."""
    rows = x.shape[0] // CUT * CUT
    if x.shape[0] < TALL or not x.is_contiguous() or not y.is_contiguous():
        return x.t() @ y
    parts = torch.bmm(x[:rows].view(CUT, -1, x.shape[1]).mT, y[:rows].view(CUT, -1, y.shape[1]))
    return parts.sum(0).addmm_(x[rows:].t(), y[rows:])


def _for_kernels(x: Tensor, w: Tensor, bias: Tensor | None, turned: bool) -> Tensor:
    """The products of layers of many numbers."""
    return outer(x, w) if turned else product(x, w, bias)


def _check_project(x: Tensor, w: Tensor, bias: Tensor | None) -> None:
    check_numbers("project", x, w, bias)
    if x.dim() != 2 or w.dim() != 2 or x.shape[1] != w.shape[0] or w.dtype != x.dtype:
        raise ShapeError("project", "x and w must have shapes (M, P) and (P, Q), of one dtype",
                         f"{text_of(x.shape)} of {x.dtype}, {text_of(w.shape)} of {w.dtype}")
    if bias is not None and (bias.shape != w.shape[1:] or bias.dtype != x.dtype):
        raise ShapeError("project", f"bias must have shape (Q={w.shape[1]},) and dtype {x.dtype}",
                         f"{text_of(bias.shape)} and {bias.dtype}")


def _check_outer(x: Tensor, y: Tensor) -> None:
    check_numbers("outer", x, y)
    if x.dim() != 2 or y.dim() != 2 or x.shape[0] != y.shape[0] or y.dtype != x.dtype:
        raise ShapeError("outer", "x and y must have shapes (M, P) and (M, Q), of one dtype",
                         f"{text_of(x.shape)} of {x.dtype}, {text_of(y.shape)} of {y.dtype}")


def _project_fake(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty((x.shape[0], w.shape[1]))


def _save(ctx: Any, inputs: tuple[Any, ...], y: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])


def _save_result(ctx: Any, inputs: tuple[Any, ...], y: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2], y)


def _project_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    return _project_gradients(ctx.needs_input_grad, x, w, grad)


def _project_relu_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, w, y = ctx.saved_tensors  # read once: what recomputes them gives them once
    return _project_gradients(ctx.needs_input_grad, x, w, torch.ops.aten.threshold_backward(grad, y, 0))


def _project_gradients(needed: Sequence[bool], x: Tensor, w: Tensor, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (_project(grad, w.t(), None) if needed[0] else None, _outer_like(w, x, grad) if needed[1] else None,
            grad.sum(0) if needed[2] else None)


def _outer_like(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """x^T y, in memory by rows or by columns as w is: where gradients are added up, another layout is copied."""
    return _outer(x, y) if w.is_contiguous() else _outer(y, x).t()


def _project_tangent(arguments: Sequence[Any], tangents: Sequence[Any]) -> Tensor:
    (x, w, _), (x_t, w_t, tangent) = arguments, tangents
    for a, b in ((x_t, w), (x, w_t)):
        if a is not None and b is not None:
            part = torch.ops.structconv.project(a, b, None)
            tangent = part if tangent is None else tangent + part
    return tangent if tangent.dim() == 2 else tangent.expand(x.shape[0], -1)


def _project_relu_tangent(arguments: Sequence[Any], tangents: Sequence[Any]) -> Tensor:
    return _project_tangent(arguments, tangents) * (torch.ops.structconv.project(*arguments) > 0)


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y = ctx.saved_tensors
    return (_project(y, grad.t(), None) if ctx.needs_input_grad[0] else None,
            _project(x, grad, None) if ctx.needs_input_grad[1] else None)


CALLED.impl("product", _for_kernels, "CompositeExplicitAutograd")
_project = define("project", "Tensor x, Tensor w, Tensor? bias", _project_kernel, _project_fake, _check_project,
                  backward=_project_backward, save=_save, tangent=_project_tangent)
_project_relu = define("project_relu", "Tensor x, Tensor w, Tensor? bias", _project_relu_kernel, _project_fake,
                       _check_project, backward=_project_relu_backward, save=_save_result,
                       tangent=_project_relu_tangent)
_outer = define("outer", "Tensor x, Tensor y", _outer_kernel, lambda x, y: x.new_empty((x.shape[1], y.shape[1])),
                _check_outer, backward=_outer_backward, linear_in=(0, 1))
