"""`decompositions`: the library's operators in terms of torch's, for ONNX and programs without the library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from structconv import torch_compat as private
from structconv.primitives import (  # noqa: F401  (define operators)
    blocked_attention,
    conditioned,
    dense_additive,
    layout,
    polynomials,
    products,
    shifted,
    window,
)
from structconv.primitives.edge_attention import ends_of
from structconv.primitives.functions import sum_dtype
from structconv.primitives.native.indices import Csr
from structconv.primitives.operator import COMPOSED, EDGES
from structconv.primitives.segments import masked_softmax
from structconv.primitives.sorting import rows_of, stable_order

__all__ = ["decompositions", "enlist"]

_OPS = torch.ops.structconv
_LAYOUTS = EDGES.count(",") + 1


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The table for `torch.export.ExportedProgram.run_decompositions`: each operator of a forward pass by torch's.

    `torch.onnx.export` uses it by itself. A program with dynamic sizes stays so. Attention along edges and sparse
    products hold one row for each edge. Operators of a backward pass are not in it, nor is `group_products`, which an
    exported program does not hold unless you call `structconv.primitives` yourself.

    Example:

        >>> from structconv import GCNConv, Graph
        >>> from structconv.compat import decompositions
        >>> class Net(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.layer = GCNConv(8, 4)
        ...     def forward(self, x, edge_index):
        ...         return self.layer(x, Graph(edge_index, num_nodes=x.shape[0]))
        >>> program = torch.export.export(Net().eval(), (torch.randn(3, 8), torch.tensor([[0, 1], [1, 2]])))
        >>> program = program.run_decompositions(decompositions())
        >>> any("structconv" in str(node.target) for node in program.graph.nodes)
        False
    """
    table: dict[Any, Callable[..., Any]] = {getattr(_OPS, name).default: form for name, form in COMPOSED.items()}
    table |= {
        _OPS.layouts.default: _layouts, _OPS.spmm.default: _spmm, _OPS.sddmm.default: _sddmm,
        _OPS.spmm_add.default: _spmm_add, _OPS.project.default: _project, _OPS.outer.default: _outer,
        _OPS.shift_products.default: _shift_products,
        _OPS.window_attention.default: _window_attention,
        _OPS.project_relu.default: lambda x, w, bias: _project(x, w, bias).relu(),
    }
    return table


def enlist() -> None:
    """Put the table where `torch.onnx.export` reads it. Traces with dynamic sizes keep the operators' own shapes."""
    if None not in (private.decomposition_table, private.meta_table):
        forms = decompositions()
        private.decomposition_table.update(forms)
        private.meta_table.update(forms)


def _layouts(edge_index: Tensor, num_inputs: int, num_outputs: int) -> tuple[Tensor, ...]:
    source, target = edge_index[0].long(), edge_index[1].long()
    return *_layout(target, source, num_outputs), *_layout(source, target, num_inputs)


def _layout(row: Tensor, column: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    count = row.new_zeros((rows,)).index_add(0, row, torch.ones_like(row))
    indptr = torch.cat([row.new_zeros((1,)), count.cumsum(0)])
    order = stable_order(row)
    return indptr.int(), column[order].int(), order.int()


def _spmm(*arguments: Any) -> Tensor:
    """V products, of W rows of values and X of x, added up in groups to `rows` of them."""
    layouts, (values, x, rows) = arguments[:_LAYOUTS], arguments[_LAYOUTS:]
    if x.dim() == 2:
        return _spmm(*layouts, values, x.unsqueeze(0), rows).squeeze(0)
    source, target = ends_of(Csr(*layouts[:3]))
    values = None if values is None else torch.atleast_2d(values)
    count = max(rows, x.shape[0], 1 if values is None else values.shape[0])
    messages = _repeat(x.index_select(1, source), count)
    messages = messages if values is None else messages * _repeat(values, count).unsqueeze(-1)
    messages = messages if count == rows else messages.unflatten(0, (rows, count // rows)).sum(1)
    y = messages.new_zeros((rows, layouts[0].shape[0] - 1, x.shape[-1]))
    return y.index_add(1, target, messages).to(x.dtype)


def _sddmm(*arguments: Any) -> Tensor:
    layouts, (q, k, rows) = arguments[:_LAYOUTS], arguments[_LAYOUTS:]
    source, target = ends_of(Csr(*layouts[:3]))
    return (_repeat(q, rows).index_select(1, target) * _repeat(k, rows).index_select(1, source)).sum(-1)


def _spmm_add(*arguments: Any) -> Tensor:
    layouts, (values, x, z, alpha, beta) = arguments[:_LAYOUTS], arguments[_LAYOUTS:]
    y = alpha * _spmm(*layouts, values, x, x.shape[0])
    return y if z is None else y + beta * z


def _window_attention(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, *options: Any) -> tuple[Tensor, ...]:
    """Attention within sequences as a table of scores: the composed form has some operators for each offset."""
    (_, (below, *_), (above, *_), _, outputs, inputs, scale, p), dtype = options[:8], sum_dtype(v.dtype)
    if outputs is None or p > 0:
        result: tuple[Tensor, ...] = COMPOSED["window_attention"](q, k, v, table, *options)
        return result
    rows, columns = rows_of(outputs[1:], q.shape[0]), rows_of(inputs[1:], k.shape[0])
    n, m = torch.arange(q.shape[0]) - outputs[rows], torch.arange(k.shape[0]) - inputs[columns]
    offset = (m - n.unsqueeze(-1)).to(q.device)
    table = q.new_zeros((1, below + above + 1)) if table is None else table
    bias = table[:, (offset + below).clamp(0, below + above)].to(dtype)
    keep = (rows.unsqueeze(-1) == columns).to(q.device) & (-below <= offset) & (offset <= above) & (bias != -torch.inf)
    scores = scale * (q.transpose(0, 1).to(dtype) @ k.permute(1, 2, 0).to(dtype)) + bias
    weights = masked_softmax(scores, keep, -1)
    values = v.transpose(0, 1).to(dtype)
    finite = values.isfinite()  # what is not finite reaches outputs of its own sequence only
    reached = keep.to(dtype) @ (~finite).to(dtype) > 0
    y = torch.where(reached, torch.nan, weights @ torch.where(finite, values, 0))
    return y.transpose(0, 1).to(v.dtype).contiguous(), q.new_full(q.shape[:2], torch.nan, dtype=sum_dtype(q.dtype))


def _shift_products(x: Tensor, theta: Tensor, shifts: Sequence[int], rows: int) -> Tensor:
    """Products of slices of x with zeros around it, summed over the shifts."""
    front = functools.reduce(torch.sym_max, [-shift for shift in shifts], 0)
    back = functools.reduce(torch.sym_max, [shift + rows - x.shape[1] for shift in shifts], 0)
    wide = F.pad(x, (0, 0, front, back)).to(sum_dtype(x.dtype))
    terms = [wide.narrow(1, front + shift, rows) @ theta[k].to(wide.dtype) for k, shift in enumerate(shifts)]
    return functools.reduce(torch.add, terms).to(x.dtype) if terms else x.new_zeros((x.shape[0], rows, theta.shape[2]))


def _repeat(t: Tensor, rows: Any) -> Tensor:
    """(V, ...) -> (rows, ...), each entry for rows / V consecutive products."""
    return t if t.shape[0] == rows else t.unsqueeze(1).expand(-1, rows // t.shape[0], *t.shape[1:]).flatten(0, 1)


def _project(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return x @ w if bias is None else torch.addmm(bias, x, w)


def _outer(x: Tensor, y: Tensor) -> Tensor:
    return x.mT @ y
