"""Count the floating-point operations that a model runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import structconv.nn  # noqa: F401 - registers the operators that are counted
from structconv import torch_compat as private

__all__ = ["FORMULAS", "counted", "forward_flops"]

_Arguments = SimpleNamespace
_Formula = Callable[[_Arguments], int]


def forward_flops(fn: Callable[[Tensor], Any], x: Tensor) -> int:
    """Flops of the products in ``fn(x)``: matrix products, convolutions, attention and sparse products, a
    multiplication and an addition being two. Element-wise work is not counted. The function is run once, without
    gradients."""
    counter = FlopCounterMode(display=False, custom_mapping=counted())
    with torch.no_grad(), counter:
        fn(x)
    return int(counter.get_total_flops())


def counted() -> dict[Any, Callable[..., int]]:
    """The flops of the package's operators, for torch's `FlopCounterMode`."""
    formulas = {getattr(torch.ops.structconv, name): formula for name, formula in FORMULAS.items()}
    if private.flash_attention is not None:
        formulas[private.flash_attention] = _FLASH
    return {operator: _by_name(operator, formula) for operator, formula in formulas.items()}


def _by_name(operator: Any, formula: _Formula) -> Callable[..., int]:
    """The formula of an operator, whose arguments it reads by name; of a tensor there is its shape."""
    names = [argument.name for argument in operator.default._schema.arguments]

    def flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(formula(SimpleNamespace(**dict(zip(names, args, strict=False)), **kwargs)))

    return flops


def _product(a: _Arguments) -> int:
    """Count the sums along edges, for each row of values or each table, one degree of a polynomial at a time."""
    rows, x = a.values[:-1] if a.values else (), a.r if hasattr(a, "r") else a.x
    tables = x[:1] if len(x) > 2 else ()
    return 2 * max(math.prod(rows), math.prod(tables)) * getattr(a, "highest", 1) * a.indices[0] * x[-1]


def _shifted(a: _Arguments) -> int:
    read, (batch, inputs, channels) = getattr(a, "g", None), a.x
    rows, columns = (a.rows, a.theta[2]) if read is None else read[1:]
    hit = sum(max(0, min(rows, inputs - shift) - max(0, -shift)) for shift in a.shifts)
    return 2 * batch * hit * channels * columns


def _conditioned(a: _Arguments) -> int:
    """Sums along edges for each head, and one product for each."""
    heads, channels, columns = a.theta
    return 2 * heads * channels * (a.indices[0] + (a.indptr[0] - 1) * columns)


def _projected(a: _Arguments) -> int:
    rows = a.x[0] + (a.x if a.z is None else a.z)[0]
    return 2 * a.x[1] * a.x[2] * (a.indices[0] + rows)


def _window(a: _Arguments) -> int:
    """The pairs of entries and offsets that are on the grid."""
    axes = zip(a.shape, a.below, a.above, a.dilation, strict=True)
    return math.prod(sum(max(0, size - abs(offset) * step) for offset in range(-below, above + 1))
                     for size, below, above, step in axes)


def _attention(pairs: Callable[[_Arguments], int], depth: Callable[[_Arguments], int],
               channels: Callable[[_Arguments], int]) -> dict[str, _Formula]:
    """Count a product for scores and one for values forward, and the scores again and two gradients of each product
    backward."""
    return {"": lambda a: 2 * pairs(a) * (depth(a) + channels(a)),
            "_backward": lambda a: 2 * pairs(a) * (3 * depth(a) + 2 * channels(a))}


def _along_edges(a: _Arguments) -> int:
    return a.indices[0] * a.q[1]


def _packed_channels(a: _Arguments) -> int:
    return a.table[1] // a.heads - a.depth * (2 if a.q is None else 1)


_ATTENTION = {
    "affine_attention": _attention(lambda a: a.indices[0] * a.x[1], lambda a: 0, lambda a: a.x[2]),
    "additive_attention": _attention(_along_edges, lambda a: a.q[2], lambda a: a.x[2]),
    "bilinear_attention": _attention(_along_edges, lambda a: a.q[2], lambda a: a.v[2]),
    "packed_attention": _attention(lambda a: a.indices[0] * a.heads, lambda a: a.depth, _packed_channels),
    "dense_additive_attention": _attention(lambda a: a.q[0] * a.k[0] * a.q[1], lambda a: a.q[2], lambda a: a.x[2]),
    "blocked_attention": _attention(lambda a: math.prod(a.q[:2]) * a.k[1], lambda a: a.q[2], lambda a: a.v[2]),
    "window_attention": _attention(lambda a: _window(a) * a.q[1], lambda a: a.q[2], lambda a: a.v[2]),
}
#: The multiplications and additions of each operator of the package, by name.
FORMULAS: dict[str, _Formula] = {
    "layouts": lambda a: 0, "affine_weights": lambda a: 0,
    "spmm": _product, "spmm_add": _product, "polynomial_analysis": _product, "polynomial_synthesis": _product,
    "sddmm": lambda a: 2 * a.rows * a.indices[0] * a.q[-1],
    "additive_weights": lambda a: 2 * _along_edges(a) * a.q[2],
    "bilinear_weights": lambda a: 2 * _along_edges(a) * a.q[2],
    **dict.fromkeys(("project", "project_relu"), lambda a: 2 * a.x[0] * math.prod(a.w)),
    "outer": lambda a: 2 * math.prod(a.x) * a.y[1],
    "group_products": lambda a: 2 * a.x[0] * math.prod(a.theta[1:]),
    "group_outer": lambda a: 2 * math.prod(a.x) * a.y[1] // a.blocks,
    "shift_products": _shifted, "shift_correlation": _shifted,
    "conditioned_product": _conditioned, "conditioned_product_backward": lambda a: 2 * _conditioned(a),
    "projected_attention": _projected, "projected_attention_backward": lambda a: 2 * _projected(a),
    **{name + end: formula for name, both in _ATTENTION.items() for end, formula in both.items()},
}
#: torch's own operator on a CPU, which its counter does not know.
_FLASH = _attention(lambda a: math.prod(a.query[:-1]) * a.key[-2], lambda a: a.query[-1], lambda a: a.value[-1])[""]
