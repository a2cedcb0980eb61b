"""Packs tensors into the structs of src/api.h and calls the kernels. Whoever calls here has checked the sizes."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.primitives.layout import Csr
from structconv.primitives.memory import new_empty
from structconv.primitives.native.layout import fits, in_slots, narrow, remembered
from structconv.primitives.native.loader import Core, core

_LAYOUT, _ROWS, _DROP = "PPPqq", "Pqq", "dqqqq"
_SPMM = struct.Struct(_LAYOUT + "PPPP" + "q" * 8 + "dd")
_SDDMM = struct.Struct(_LAYOUT + "PPP" + "q" * 7)
_VECTORS = "qPPP" + _ROWS * 2 + "PPPP"
_AFFINE = struct.Struct(_LAYOUT + "PP" + _ROWS * 3 + "PP" + "qqqqq" + "d" + _DROP + _VECTORS)
_AFFINE_BACKWARD = struct.Struct(_LAYOUT * 2 + "PPPP" + _ROWS * 5 + "PPP" + "qqqq" + "d" + _DROP + _VECTORS)
_BILINEAR = struct.Struct(_LAYOUT + _ROWS * 4 + "PP" + "qqqqq" + "d" + _DROP)
_BILINEAR_BACKWARD = struct.Struct(_LAYOUT * 2 + _ROWS * 8 + "PPPP" + "qqqqq" + "d" + _DROP)
_ADDITIVE = struct.Struct(_LAYOUT + _ROWS * 4 + "PP" + "q" * 7 + "d" + _DROP)
_ADDITIVE_BACKWARD = struct.Struct(_LAYOUT * 2 + _ROWS * 8 + "PPPPP" + "q" * 7 + "d" + _DROP)
_EDGE_WEIGHTS = struct.Struct(_LAYOUT + "q" + _ROWS * 2 + "PPP" + "q" * 5 + "d" + _DROP)

_WINDOW = "PPP" * 2 + _ROWS * 3 + "PP" + "q" * 12 + "d" + _DROP
_WINDOW_FORWARD = struct.Struct(_WINDOW + _ROWS + "P")
_WINDOW_BACKWARD = struct.Struct(_WINDOW + _ROWS * 5 + "PPP")
_DROP_BLOCK = struct.Struct("PPP" + "q" * 6 + _DROP)

MAX_CHANNELS = 56 * 128
_SUMMED_PIECES = 256
_NO_VECTORS = (0,) * 14
_WINDOW_SPAN = 256  # kSpan of src/window.cpp
_STORED = (torch.float32, torch.bfloat16)
Drop = tuple[float, int, int]  # p, seed, heads of one batch entry
_RANGES = 256  # of rows, each with its own part of a gradient that all rows share


class Dense(NamedTuple):
    """All pairs of `rows` rows with `every`, the numbers 0, 1, ... in int32; `causal`: only those with m <= n."""

    rows: int
    every: Tensor
    causal: bool


def usable(x: Tensor, edges: int) -> Core | None:
    """The kernels, if they can take x (., rows, channels): on the CPU, float32 or bfloat16, of bearable size."""
    if not x.is_cpu or x.dtype not in _STORED or x.shape[-1] > MAX_CHANNELS or not fits(edges, *x.shape):
        return None
    return core()


def spmm(kernels: Core, layout: Csr, values: Tensor | None, x: Tensor, z: Tensor | None, rows: int, count: int,
         alpha: float, beta: float, out: Tensor | None = None) -> Tensor:
    """y[v rows // V] += alpha A_v x[v X // V] + beta z, for V = `count`: values None, (E,), (1, E) or (V, E).

    x (X, M, C). y is written to `out`, contiguous, where it is given; z may be the same memory.
    """
    batch, inputs, channels = x.shape
    x = x.contiguous()
    indptr, indices, order, outputs, edges = _layout(layout)
    if values is not None:
        sorted_values = in_slots(values, layout.order)
        values, order = (values, order) if sorted_values is None else (sorted_values, 0)
        if values.dtype is not x.dtype or not values.is_contiguous():
            values = values.to(x.dtype).contiguous()
    z = None if z is None else z.contiguous()
    y = new_empty(x, (rows, outputs, channels)) if out is None else out
    stride = 0 if values is None or values.numel() == edges else edges
    kernels.spmm(_SPMM.pack(indptr, indices, order, outputs, edges, _pointer(values), x.data_ptr(), _pointer(z),
                            y.data_ptr(), inputs, channels, count, stride, count // batch, count // rows, _half(x),
                            torch.get_num_threads(),
                            alpha, beta))
    return y


def sddmm(kernels: Core, layout: Csr, q: Tensor, k: Tensor, rows: int) -> Tensor:
    """s[v, e] = <q[v Y // V][n], k[v X // V][m]>, in the order of the edges."""
    q, k = q.contiguous(), k.contiguous()
    s = new_empty(q, (rows, layout.indices.shape[0]))
    packed = _layout(layout)
    kernels.sddmm(_SDDMM.pack(*packed, q.data_ptr(), k.data_ptr(), s.data_ptr(), k.shape[1], q.shape[2], rows,
                              rows // q.shape[0], rows // k.shape[0], _half(q), torch.get_num_threads()))
    return s


class Vectors(NamedTuple):
    """Terms <source_k, x_mk> and <target_k, z_nk> of scores, z = x where it is None, and what is added to y."""

    source: Tensor
    target: Tensor
    z: Tensor | None
    bias: Tensor | None


def affine_forward(kernels: Core, by_target: Csr, source: Tensor, target: Tensor, x: Tensor, slope: float, drop: Drop,
                   train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, y2, lse, mass); y2 is empty unless `train`."""
    return _affine_forward(kernels, by_target, _floats(source), _floats(target), _unit(x), _NO_VECTORS, slope, drop,
                           train)


def projected_forward(kernels: Core, by_target: Csr, x: Tensor, vectors: Vectors, slope: float, drop: Drop,
                      train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, y2, lse, mass, source, target): as `affine_forward`, the terms of the scores computed and returned too."""
    x, given = _unit(x), _packable(vectors)
    source, target = (torch.empty((rows, x.shape[1]), dtype=torch.float32)
                      for rows in (x.shape[0], by_target.indptr.shape[0] - 1))
    packed = (*_vectors(given), *_rows(None), 0, 0, 0, 0)
    return *_affine_forward(kernels, by_target, source, target, x, packed, slope, drop, train), source, target


def _affine_forward(kernels: Core, by_target: Csr, source: Tensor, target: Tensor, x: Tensor, vectors: tuple[int, ...],
                    slope: float, drop: Drop, train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs, heads, channels = target.shape[0], x.shape[1], x.shape[2]
    y = new_empty(x, (outputs, heads, channels))
    y2 = new_empty(x, (outputs if train else 0, heads, channels))
    lse, mass = torch.empty_like(target), torch.empty_like(target)
    packed = _layout(by_target)
    kernels.affine_forward(_AFFINE.pack(
        *packed, source.data_ptr(), target.data_ptr(), *_rows(x), *_rows(y), *_rows(y2 if train else None),
        lse.data_ptr(), mass.data_ptr(), x.shape[0], heads, channels, _half(x), torch.get_num_threads(), slope,
        *_drop(drop, outputs, 0), *vectors))
    return y, y2, lse, mass


def affine_backward(kernels: Core, by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor,
                    saved: Sequence[Tensor], grad: Tensor, slope: float, drop: Drop) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of source, target and x; `saved` is what the forward returned."""
    scratch = _piece_sums(x)
    return _affine_backward(kernels, by_target, by_source, _floats(source), _floats(target), _unit(x), saved, grad,
                            slope, drop, (*_NO_VECTORS[:-1], scratch.data_ptr()))


def projected_backward(kernels: Core, by_target: Csr, by_source: Csr, x: Tensor, vectors: Vectors,
                       saved: Sequence[Tensor], grad: Tensor, slope: float, drop: Drop) -> tuple[Tensor | None, ...]:
    """Gradients of x, z, and in float32 of the vectors and the bias; `saved` is what the forward returned."""
    x, given = _unit(x), _packable(vectors)
    scratch = _piece_sums(x)
    grad_z = None if given.z is None else new_empty(given.z, given.z.shape)
    of_source, of_target = torch.empty_like(given.source), torch.empty_like(given.target)
    bias = None if given.bias is None else torch.empty_like(given.bias)
    packed = (*_vectors(given), *_rows(grad_z), of_source.data_ptr(), of_target.data_ptr(), _pointer(bias),
              scratch.data_ptr())
    found = _affine_backward(kernels, by_target, by_source, saved[4], saved[5], x, saved[:4], grad, slope, drop, packed)
    return found[2], grad_z, of_source, of_target, bias


def _affine_backward(kernels: Core, by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor,
                     saved: Sequence[Tensor], grad: Tensor, slope: float, drop: Drop,
                     vectors: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    grad = _unit(grad)
    y, y2, lse, mass = (t.contiguous() for t in saved)
    outputs, heads, channels = y.shape
    grad_x = new_empty(x, x.shape)
    grad_source, grad_target = torch.empty_like(source), torch.empty_like(target)
    scratch = new_empty(target, (outputs, 4, heads))
    ahead, back = _layout(by_target), _layout(by_source)
    kernels.affine_backward(_AFFINE_BACKWARD.pack(
        *ahead, *back, source.data_ptr(), target.data_ptr(), lse.data_ptr(), mass.data_ptr(), *_rows(x), *_rows(y),
        *_rows(y2), *_rows(grad), *_rows(grad_x), grad_source.data_ptr(), grad_target.data_ptr(), scratch.data_ptr(),
        heads, channels, _half(x), torch.get_num_threads(), slope, *_drop(drop, outputs, 1), *vectors))
    return grad_source, grad_target, grad_x


def bilinear_forward(kernels: Core, by_target: Csr, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float,
                     drop: Drop) -> tuple[Tensor, Tensor]:
    """(y, lse)."""
    q, k, v = _unit(q), _unit(k), _unit(v)
    outputs, heads, depth = q.shape
    bias = None if bias is None else _floats(bias)
    y = new_empty(v, (outputs, heads, v.shape[2]))
    lse = torch.empty((outputs, heads), dtype=torch.float32)
    packed = _layout(by_target)
    kernels.bilinear_forward(_BILINEAR.pack(
        *packed, *_rows(q), *_rows(k), *_rows(v), *_rows(y), _pointer(bias), lse.data_ptr(), heads, depth, v.shape[2],
        _half(q), torch.get_num_threads(), scale, *_drop(drop, outputs, 0)))
    return y, lse


def bilinear_backward(kernels: Core, by_target: Csr, by_source: Csr, q: Tensor, k: Tensor, v: Tensor,
                      bias: Tensor | None, saved: Sequence[Tensor], grad: Tensor, scale: float, drop: Drop,
                      into: Sequence[Tensor] | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k, v, written `into` tensors of their shapes where given, and bias (float32; None without)."""
    q, k, v, grad = _unit(q), _unit(k), _unit(v), _unit(grad)
    outputs, heads, depth = q.shape
    y, lse = (t.contiguous() for t in saved)
    bias = None if bias is None else _floats(bias)
    grads = [new_empty(t, t.shape) for t in (q, k, v)] if into is None else into
    grad_bias = None if bias is None else torch.empty_like(bias)
    scratch = lse.new_empty((outputs, 2, heads))
    ahead, back = _layout(by_target), _layout(by_source)
    tables = [number for t in (q, k, v, y, grad, *grads) for number in _rows(t)]
    kernels.bilinear_backward(_BILINEAR_BACKWARD.pack(
        *ahead, *back, *tables, _pointer(bias), lse.data_ptr(), _pointer(grad_bias), scratch.data_ptr(),
        heads, depth, v.shape[2], _half(q), torch.get_num_threads(), scale, *_drop(drop, outputs, 0)))
    return grads[0], grads[1], grads[2], grad_bias


def additive_forward(kernels: Core, by_target: Csr | Dense, q: Tensor, k: Tensor, x: Tensor, vector: Tensor,
                     activation: int, parameter: float, drop: Drop) -> tuple[Tensor, Tensor]:
    """(y, lse)."""
    q, k, x, vector = _unit(q), _unit(k), _unit(x), _floats(vector)
    outputs, heads, depth = q.shape
    y = new_empty(x, (outputs, heads, x.shape[2]))
    lse = torch.empty((outputs, heads), dtype=torch.float32)
    packed = _pairs(by_target)
    kernels.additive_forward(_ADDITIVE.pack(
        *packed, *_rows(q), *_rows(k), *_rows(x), *_rows(y), vector.data_ptr(), lse.data_ptr(), heads, depth,
        x.shape[2], activation, _causal(by_target), _half(x), torch.get_num_threads(), parameter,
        *_drop(drop, outputs, 0)))
    return y, lse


def additive_backward(kernels: Core, by_target: Csr | Dense, by_source: Csr | Dense, q: Tensor, k: Tensor, x: Tensor,
                      vector: Tensor, saved: Sequence[Tensor], grad: Tensor, activation: int, parameter: float,
                      drop: Drop) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, x and vector (float32)."""
    q, k, x, grad, vector = _unit(q), _unit(k), _unit(x), _unit(grad), _floats(vector)
    outputs, heads, depth = q.shape
    y, lse = (t.contiguous() for t in saved)
    grads, grad_vector = [new_empty(t, t.shape) for t in (q, k, x)], torch.empty_like(vector)
    scratch = new_empty(lse, (outputs, 2, heads)), new_empty(lse, (_RANGES, heads, depth))
    ahead, back = _pairs(by_target), _pairs(by_source)
    tables = [number for t in (q, k, x, y, grad, *grads) for number in _rows(t)]
    kernels.additive_backward(_ADDITIVE_BACKWARD.pack(
        *ahead, *back, *tables, vector.data_ptr(), lse.data_ptr(), grad_vector.data_ptr(), scratch[0].data_ptr(),
        scratch[1].data_ptr(), heads, depth, x.shape[2], activation, _causal(by_target), _half(x),
        torch.get_num_threads(), parameter, *_drop(drop, outputs, 0)))
    return grads[0], grads[1], grads[2], grad_vector


class Scores(NamedTuple):
    """What scores of edges are made of, by the kinds of src/api.h: 0 terms, 1 products, 2 activations.

    q (N, K, D) and k (M, K, D), for terms (N, K) and (M, K).
    """

    kind: int
    q: Tensor
    k: Tensor
    parameter: float
    bias: Tensor | None = None
    vector: Tensor | None = None
    activation: int = 0


def edge_weights(kernels: Core, by_target: Csr, scores: Scores, drop: Drop) -> Tensor:
    """(E, K), in the order of the edges."""
    kind, q, k, parameter, bias, vector, activation = scores
    q, k = ((_floats(t).unsqueeze(-1) for t in (q, k)) if kind == 0 else (_unit(q), _unit(k)))
    bias, vector = (None if t is None else _floats(t) for t in (bias, vector))
    outputs, heads, depth = q.shape
    weights = new_empty(q, (by_target.indices.shape[0], heads), torch.float32)
    packed = _layout(by_target)
    kernels.edge_weights(_EDGE_WEIGHTS.pack(
        *packed, kind, *_rows(q), *_rows(k), _pointer(bias), _pointer(vector), weights.data_ptr(), heads, depth,
        activation, _half(q), torch.get_num_threads(), parameter, *_drop(drop, outputs, 0)))
    return weights


def _pairs(pairs: Csr | Dense) -> tuple[int, int, int, int, int]:
    if isinstance(pairs, Dense):
        return 0, pairs.every.data_ptr(), 0, pairs.rows, pairs.every.shape[0]
    return _layout(pairs)


def _causal(pairs: Csr | Dense) -> int:
    return int(isinstance(pairs, Dense) and pairs.causal)


class WindowCall(NamedTuple):
    """What both passes of `window_attention` share.

    Args:
        lines: indptr, line and combination by target, then by source, int32; see src/api.h.
        tables: the offsets' bias by falling and by rising offset, float32 (K or 1, combinations, below + above + 31).
        size, step, below, above: entries of the last axis, its dilation and its offsets.
    """

    lines: tuple[Tensor, ...]
    tables: tuple[Tensor, Tensor]
    size: int
    step: int
    below: int
    above: int
    scale: float
    drop: Drop

    def tasks(self) -> int:
        """How many parts the rows of one head are computed in: as many tables of gradients are added up."""
        return (self.lines[0].shape[0] - 1) * self.step * -(-self.size // (_WINDOW_SPAN * self.step))

    def pack(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[float, ...]:
        """The fields of `WindowArgs`."""
        entries, heads, depth = q.shape
        falling, rising = self.tables
        one = falling[0].numel()
        return (*(index.data_ptr() for index in self.lines), *_rows(q), *_rows(k), *_rows(v), falling.data_ptr(),
                rising.data_ptr(), 0 if falling.shape[0] == 1 else one, one, self.lines[0].shape[0] - 1, self.size,
                self.step, self.below, self.above, heads, depth, v.shape[2], _half(q), torch.get_num_threads(),
                self.scale, *_drop(self.drop, entries, 0))


def window_forward(kernels: Core, call: WindowCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """(y, lse)."""
    q, k, v = _unit(q), _unit(k), _unit(v)
    y = new_empty(v, (*q.shape[:2], v.shape[2]))
    lse = torch.empty(q.shape[:2], dtype=torch.float32)
    kernels.window_forward(_WINDOW_FORWARD.pack(*call.pack(q, k, v), *_rows(y), lse.data_ptr()))
    return y, lse


def window_backward(kernels: Core, call: WindowCall, q: Tensor, k: Tensor, v: Tensor, y: Tensor, lse: Tensor,
                    grad: Tensor, table_grad: bool) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of q, k and v, and of the table by falling offset, (K, combinations, below + above + 31)."""
    q, k, v, y, grad, lse = _unit(q), _unit(k), _unit(v), _unit(y), _unit(grad), lse.contiguous()
    grads = [new_empty(t, t.shape) for t in (q, k, v)]
    delta = torch.empty_like(lse)
    parts = torch.zeros((q.shape[1], call.tasks(), *call.tables[0].shape[1:])) if table_grad else None
    rows = [number for t in (y, grad, *grads) for number in _rows(t)]
    kernels.window_backward(_WINDOW_BACKWARD.pack(*call.pack(q, k, v), *rows, lse.data_ptr(), delta.data_ptr(),
                                                  _pointer(parts)))
    return grads[0], grads[1], grads[2], None if parts is None else parts.sum(1)


def drop_block(kernels: Core, weights: Tensor, dropped: Tensor, gradient: Tensor | None, first_head: int,
               last_row: int, outputs: int, drop: Drop) -> None:
    """dropped = weights times 0 or 1 / (1 - p), and so the gradient in place: contiguous float32 (heads, rows, M).

    Row i is output `last_row` - i of `outputs`; head h is head `first_head` + h of all.
    """
    kernels.drop_block(_DROP_BLOCK.pack(weights.data_ptr(), dropped.data_ptr(), _pointer(gradient), *weights.shape,
                                        first_head, last_row, torch.get_num_threads(), *_drop(drop, outputs, 0)))


def _layout(layout: Csr) -> tuple[int, int, int, int, int]:
    """Pointers and sizes; the narrowed arrays live as long as those they were made of."""
    return remembered(layout, _addresses)


def _addresses(layout: Csr) -> tuple[int, int, int, int, int]:
    indptr, indices, order = (narrow(index) for index in layout)
    return indptr.data_ptr(), indices.data_ptr(), order.data_ptr(), indptr.shape[0] - 1, indices.shape[0]


def _packable(vectors: Vectors) -> Vectors:
    z, bias = vectors.z, vectors.bias
    return Vectors(_floats(vectors.source), _floats(vectors.target), None if z is None else _unit(z),
                   None if bias is None else _floats(bias))


def _vectors(given: Vectors) -> tuple[int, ...]:
    """Where the terms come from, by the interface's number, and the pointers."""
    return (1 if given.z is None else 2, given.source.data_ptr(), given.target.data_ptr(), _pointer(given.bias),
            *_rows(given.z))


def _piece_sums(x: Tensor) -> Tensor:
    """Scratch for sums over pieces of the rows."""
    return torch.empty((_SUMMED_PIECES, 3, max(128, (x.shape[2] + 7) // 8 * 8)), dtype=torch.float32)


def _rows(t: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if t is None else (t.data_ptr(), t.stride(0), t.stride(1))


def _pointer(t: Tensor | None) -> int:
    return 0 if t is None else t.data_ptr()


def _half(t: Tensor) -> int:
    return int(t.dtype is torch.bfloat16)


def _unit(t: Tensor) -> Tensor:
    """The same tensor with contiguous channels."""
    return t if t.stride(-1) == 1 or t.shape[-1] <= 1 else t.contiguous()


def _floats(t: Tensor) -> Tensor:
    return t if t.dtype is torch.float32 and t.is_contiguous() else t.to(torch.float32).contiguous()


def _drop(drop: Drop, outputs: int, source_major: int) -> tuple[float, int, int, int, int]:
    p, seed, batch_heads = drop
    return p, seed, batch_heads, outputs, source_major
