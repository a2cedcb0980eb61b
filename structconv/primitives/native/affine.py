"""`affine_attention`: attention along edges with scores leaky_relu(source_m + target_n), without edge-sized tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError
from structconv.primitives import triton
from structconv.primitives.functions import sum_dtype
from structconv.primitives.hashing import Drop
from structconv.primitives.native import calls
from structconv.primitives.native.calls import DROP, ROWS, dropped, edges_of, floats, half, pointer, rows, unit
from structconv.primitives.native.checks import check_dropout
from structconv.primitives.native.edges import Ends
from structconv.primitives.native.indices import LAYOUT, Csr
from structconv.primitives.native.interface import Struct, constants, integers, pointers, reals
from structconv.primitives.native.loader import Core
from structconv.primitives.native.operator import differentiable_operator, trains
from structconv.primitives.segments import segment_softmax, segment_sum

__all__ = ["Saved", "Vectors", "affine_attention", "attend_backward", "attend_forward", "projected_backward",
           "projected_forward"]

_VECTORS = Struct("VectorArgs", integers("terms"), pointers("of_source of_target bias"), ROWS.named("z grad_z"),
                  pointers("grad_source grad_target grad_bias partial"))
_FORWARD = Struct("AffineForwardArgs", LAYOUT.named("layout"), pointers("source target"), ROWS.named("x y y2"),
                  pointers("lse mass"), integers("inputs heads channels half threads"), reals("slope"),
                  DROP.named("drop"), _VECTORS.named("vectors"))
_BACKWARD = Struct("AffineBackwardArgs", LAYOUT.named("by_target by_source"), pointers("source target lse mass"),
                   ROWS.named("x y y2 grad grad_x"), pointers("grad_source grad_target packed"),
                   integers("heads channels half threads"), reals("slope"), DROP.named("drop"),
                   _VECTORS.named("vectors"))
_GIVEN, _OF_X, _OF_X_AND_Z = constants(kGiven=0, kOfX=1, kOfXAndZ=2)
_NO_VECTORS, _NO_ROWS = (_GIVEN,) + (0,) * 13, (0,) * 6
Layout = Csr | calls.Side


def affine_attention(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, *, slope: float = 0.2,
                     dropout: float = 0.0, seed: Tensor | None = None, batch_heads: int | None = None) -> Tensor:
    """y_nk = sum over the edges m -> n of p_ke x_mk, p = softmax over the edges into n of leaky_relu(s_mk + t_nk).

    The attention of GAT (Velickovic et al., 2018, equations 3 to 6) for any pair of vectors s, t; slope 1 is a plain
    affine score, slope 0 a ReLU. Duplicate edges count twice; an output without edges, or whose scores are all -inf,
    is exactly zero.

    Args:
        by_target, by_source: the two layouts of the edges.
        source: (M, K), one number an input and head.
        target: (N, K).
        x: (M, K, C), any strides; float32 and bfloat16 (sums in float32) run natively on a CPU, anything else by
            torch's operators with (K, E) tensors.
        slope: of the activation below zero, at least 0.
        dropout: probability p that a weight falls; the others are divided by 1 - p. Which of them is a function of
            seed, head and pair, as `structconv.primitives.hashing.hash_uniform(seed, batch, head, m N + n) >= p`.
        seed: integer scalar tensor; needed where dropout > 0.
        batch_heads: where a batch is folded into the heads, heads of one of its entries; by default K.

    Returns:
        (N, K, C) of the dtype of x.

    Cost: 2 E K C flops and as many bytes as x_m has, an edge; forward and backward hold O((M + N) K C) and, natively,
    nothing of size E. Derivatives of higher order go through (K, E) tensors.

    Raises:
        ShapeError: if sizes do not fit the edges or each other.
        ConfigError: for a negative slope, a p outside [0, 1), or dropout without a seed.
    """
    _check(by_target, by_source, source, target, x, slope, dropout, seed, batch_heads)
    return _affine_attention(*by_target, *by_source, source, target, x, slope, dropout, seed,
                             x.shape[1] if batch_heads is None else batch_heads, trains(source, target, x))[0]


def _check(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, slope: float, dropout: float,
           seed: Tensor | None, batch_heads: int | None) -> None:
    inputs, outputs = by_source.indptr.shape[0] - 1, by_target.indptr.shape[0] - 1
    if x.dim() != 3 or x.shape[0] != inputs:
        raise ShapeError("affine_attention", f"x must have shape (M={inputs}, K, C)", tuple(x.shape))
    for name, tensor, count in (("source", source, inputs), ("target", target, outputs)):
        if tensor.dim() != 2 or tensor.shape[0] != count or tensor.shape[1] != x.shape[1]:
            expected = f"{name} must have shape ({count}, K={x.shape[1]})"
            raise ShapeError("affine_attention", expected, tuple(tensor.shape))
    if slope < 0:
        raise ConfigError("affine_attention", "slope must be at least 0", slope)
    check_dropout("affine_attention", dropout, seed, batch_heads)


# -- the native kernels -------------------------------------------------------------------------------------------

class Vectors(NamedTuple):
    """Terms <source_k, x_mk> and <target_k, z_nk> of scores, z = x where it is None, and what is added to y."""

    source: Tensor
    target: Tensor
    z: Tensor | None
    bias: Tensor | None

    def readable(self) -> Vectors:
        z, bias = self.z, self.bias
        return Vectors(floats(self.source), floats(self.target), None if z is None else unit(z),
                       None if bias is None else floats(bias))

    def packed(self) -> tuple[int, ...]:
        """Where the terms come from, and the first pointers of the struct."""
        return (_OF_X if self.z is None else _OF_X_AND_Z, pointer(self.source), pointer(self.target),
                pointer(self.bias), *rows(self.z))


def affine_forward(kernels: Core, by_target: Layout, source: Tensor, target: Tensor, x: Tensor, slope: float,
                   drop: calls.Drop, train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, y2, lse, mass); y2 is empty unless `train`."""
    return _forward_kernel(kernels, by_target, floats(source), floats(target), unit(x), _NO_VECTORS, slope, drop,
                           train)


def projected_forward(kernels: Core, by_target: Layout, x: Tensor, vectors: Vectors, slope: float, drop: calls.Drop,
                      train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(y, y2, lse, mass, source, target): as `affine_forward`, the terms of the scores computed and returned too."""
    x, given = unit(x), vectors.readable()
    source = torch.empty(x.shape[:2], dtype=torch.float32)
    target = torch.empty((calls.rows_of(by_target), x.shape[1]), dtype=torch.float32)
    packed = (*given.packed(), *rows(None), 0, 0, 0, 0)
    return *_forward_kernel(kernels, by_target, source, target, x, packed, slope, drop, train), source, target


def _forward_kernel(kernels: Core, by_target: Layout, source: Tensor, target: Tensor, x: Tensor,
                    vectors: tuple[int, ...], slope: float, drop: calls.Drop,
                    train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    outputs, (inputs, heads, channels) = target.shape[0], x.shape
    y = calls.empty(x, (outputs, heads, channels))
    y2 = calls.empty(x, (outputs if train else 0, heads, channels))
    lse, mass = torch.empty_like(target), torch.empty_like(target)
    layout = edges_of(by_target, inputs)
    kernels.affine_forward(_FORWARD.pack(
        *layout[:5], pointer(source), pointer(target), *rows(x), *rows(y), *rows(y2 if train else None),
        lse.data_ptr(), mass.data_ptr(), inputs, heads, channels, half(x), torch.get_num_threads(), slope,
        *dropped(drop, outputs, 0), *vectors))
    return y, y2, lse, mass


def affine_backward(kernels: Core, by_target: Layout, by_source: Layout, source: Tensor, target: Tensor, x: Tensor,
                    saved: Sequence[Tensor], grad: Tensor, slope: float,
                    drop: calls.Drop) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of source, target and x; `saved` is what the forward returned."""
    scratch = _piece_sums(kernels, x, by_target)
    return _backward_kernel(kernels, by_target, by_source, floats(source), floats(target), unit(x), saved, grad,
                            slope, drop, (*_NO_VECTORS[:-1], scratch.data_ptr()))


def projected_backward(kernels: Core, by_target: Layout, by_source: Layout, x: Tensor, vectors: Vectors,
                       saved: Sequence[Tensor], grad: Tensor, slope: float,
                       drop: calls.Drop) -> tuple[Tensor | None, ...]:
    """Gradients of x, z, and in float32 of the vectors and the bias; `saved` is what the forward returned."""
    x, given = unit(x), vectors.readable()
    scratch = _piece_sums(kernels, x, by_target)
    grad_z = None if given.z is None else calls.empty(given.z, given.z.shape)
    of_source, of_target = torch.empty_like(given.source), torch.empty_like(given.target)
    bias = None if given.bias is None else torch.empty_like(given.bias)
    packed = (*given.packed(), *rows(grad_z), of_source.data_ptr(), of_target.data_ptr(), pointer(bias),
              scratch.data_ptr())
    terms = floats(saved[4]), floats(saved[5])
    found = _backward_kernel(kernels, by_target, by_source, *terms, x, saved[:4], grad, slope, drop, packed)
    return found[2], grad_z, of_source, of_target, bias


def _backward_kernel(kernels: Core, by_target: Layout, by_source: Layout, source: Tensor, target: Tensor, x: Tensor,
                     saved: Sequence[Tensor], grad: Tensor, slope: float, drop: calls.Drop,
                     vectors: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    grad = unit(grad)
    y, y2, lse, mass = map(calls.dense, saved)
    outputs, heads, channels = y.shape
    grad_x = calls.empty(x, x.shape)
    grad_source, grad_target = torch.empty_like(source), torch.empty_like(target)
    scratch = calls.empty(target, (outputs, 4, heads))
    ahead, back = edges_of(by_target, x.shape[0]), edges_of(by_source, outputs)
    kernels.affine_backward(_BACKWARD.pack(
        *ahead[:5], *back[:5], pointer(source), pointer(target), pointer(lse), pointer(mass), *rows(x), *rows(y),
        *rows(y2), *rows(grad), *rows(grad_x), grad_source.data_ptr(), grad_target.data_ptr(), scratch.data_ptr(),
        heads, channels, half(x), torch.get_num_threads(), slope, *dropped(drop, outputs, 1), *vectors))
    return grad_source, grad_target, grad_x


def _piece_sums(kernels: Core, x: Tensor, by_target: Layout) -> Tensor:
    """Scratch for sums over pieces of the rows."""
    return torch.empty(_piece_size(kernels, x, edges_of(by_target, x.shape[0])), dtype=torch.float32)


def _piece_size(kernels: Core, x: Tensor, by_target: Sequence[Any]) -> int:
    """Numbers of sums over as many pieces of the rows as the kernel makes at most (`summed_pieces`)."""
    inputs, heads, channels = x.shape
    outputs, slots = by_target[3:5]
    work = (slots + max(outputs, inputs)) * heads * (channels + 8) * x.element_size() >> 17
    pieces, block = min(max(work, 1), kernels.constants["kSummedPieces"]), kernels.constants["kBlock"]
    return pieces * 3 * max(block, (channels + 7) // 8 * 8)


class Saved(NamedTuple):
    """What a forward pass leaves to its backward, beside its arguments: y, y2, and lse, mass and both terms in one."""

    y: Tensor
    y2: Tensor | None
    numbers: Tensor


def attend_forward(kernels: Core, side: calls.Side, x: Tensor, of_source: Tensor, of_target: Tensor,
                   bias: Tensor | None, slope: float, drop: calls.Drop, train: bool) -> Saved:
    """`projected_forward` of contiguous float32 among the inputs (M, K, C), in three allocations."""
    nodes, heads, channels = x.shape
    y = calls.empty(x, x.shape)
    y2 = calls.empty(x, x.shape) if train else None
    size, row = nodes * heads, (heads * channels, channels)
    numbers = torch.empty(4 * size, dtype=torch.float32)
    lse = numbers.data_ptr()
    kernels.affine_forward(_FORWARD.pack(
        *side.layout, lse + 8 * size, lse + 12 * size, x.data_ptr(), *row, y.data_ptr(), *row, pointer(y2), *row,
        lse, lse + 4 * size, nodes, heads, channels, 0, torch.get_num_threads(), slope, *dropped(drop, nodes, 0),
        _OF_X, of_source.data_ptr(), of_target.data_ptr(), pointer(bias), *_NO_ROWS, 0, 0, 0, 0))
    return Saved(y, y2, numbers)


def attend_backward(kernels: Core, by_target: calls.Side, by_source: calls.Side, x: Tensor, of_source: Tensor,
                    of_target: Tensor, bias: Tensor | None, saved: Saved, grad: Tensor, slope: float,
                    drop: calls.Drop) -> tuple[Tensor, Tensor]:
    """The gradients of x (M, K, C), and of of_source, of_target and bias in one (3, K, C)."""
    nodes, heads, channels = x.shape
    grad_x, grads = calls.empty(x, x.shape), torch.empty((3, heads, channels), dtype=torch.float32)
    size, row, lse, own = nodes * heads, (heads * channels, channels), saved.numbers.data_ptr(), grads.data_ptr()
    scratch = torch.empty(6 * size + _piece_size(kernels, x, by_target.layout), dtype=torch.float32)
    first, step = scratch.data_ptr(), 4 * heads * channels
    kernels.affine_backward(_BACKWARD.pack(
        *by_target.layout, *by_source.layout, lse + 8 * size, lse + 12 * size, lse, lse + 4 * size,
        x.data_ptr(), *row, saved.y.data_ptr(), *row, pointer(saved.y2), *row, grad.data_ptr(), *row,
        grad_x.data_ptr(), *row, first, first + 4 * size, first + 8 * size, heads, channels, 0,
        torch.get_num_threads(), slope, *dropped(drop, nodes, 1), _OF_X, of_source.data_ptr(), of_target.data_ptr(),
        pointer(bias), *_NO_ROWS, own, own + step, own + 2 * step if bias is not None else 0, first + 24 * size))
    return grad_x, grads


# -- the operator -------------------------------------------------------------------------------------------------

def forward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
             source: Tensor, target: Tensor, x: Tensor, slope: float, p: float, seed: Tensor | None, batch_heads: int,
             train: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    by_target = Csr(indptr, indices, order)
    kernels = calls.usable(x, indices.shape[0])
    if kernels is not None:
        return affine_forward(kernels, by_target, source, target, x, slope, calls.drop_of(p, seed, batch_heads), train)
    if (gpu := triton.usable(x, indices.shape[0])) is not None:
        return gpu.affine_forward(by_target, source, target, x, slope, Drop(p, seed, batch_heads), train)
    dtype = sum_dtype(x.dtype)
    ends, x_wide = Ends(by_target, Csr(indptr_T, indices_T, order_T)), x.to(dtype)
    scores, slopes = _scores(ends, source.to(dtype), target.to(dtype), slope)
    p_KE, lse = ends.softmax_parts(scores)
    mass = segment_sum(slopes * p_KE, ends.target, ends.num_outputs).t().contiguous()
    kept = ends.kept(Drop(p, seed, batch_heads), x.shape[1])
    w_KE = p_KE if kept is None else p_KE * kept.to(dtype)
    y = ends.collect(w_KE, x_wide).to(x.dtype).contiguous()
    y2 = ends.collect(slopes * w_KE, x_wide).to(x.dtype).contiguous() if train else x.new_empty((0, *x.shape[1:]))
    return y, y2, lse, mass


def backward(indptr: Tensor, indices: Tensor, order: Tensor, indptr_T: Tensor, indices_T: Tensor, order_T: Tensor,
              source: Tensor, target: Tensor, x: Tensor, y: Tensor, y2: Tensor, lse: Tensor, mass: Tensor, grad: Tensor,
              slope: float, p: float, seed: Tensor | None, batch_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    by_target, by_source = Csr(indptr, indices, order), Csr(indptr_T, indices_T, order_T)
    kernels = calls.usable(x, indices.shape[0])
    if kernels is not None:
        found = affine_backward(kernels, by_target, by_source, source, target, x, (y, y2, lse, mass), grad, slope,
                                calls.drop_of(p, seed, batch_heads))
        return found[0].to(source.dtype), found[1].to(target.dtype), found[2]
    if (gpu := triton.usable(x, indices.shape[0])) is not None:
        found = gpu.affine_backward(by_target, by_source, source, target, x, (y, y2, lse, mass), grad, slope,
                                    Drop(p, seed, batch_heads))
        return found[0].to(source.dtype), found[1].to(target.dtype), found[2]
    dtype = sum_dtype(x.dtype)
    ends = Ends(by_target, by_source)
    g, x_wide = grad.to(dtype), x.to(dtype)
    scores, slopes = _scores(ends, source.to(dtype), target.to(dtype), slope)
    p_KE, kept = ends.weights(scores, lse), ends.kept(Drop(p, seed, batch_heads), x.shape[1])
    w_KE = p_KE if kept is None else p_KE * kept.to(dtype)
    filled = by_target.indptr.diff().unsqueeze(-1) > 0
    d_NK = torch.where(filled, (g * y).sum(-1), 0)
    grad_target = torch.where(filled, (g * y2).sum(-1) - d_NK * mass, 0)
    shift = segment_sum(slopes * p_KE * d_NK.t()[:, ends.target], ends.source, ends.num_inputs).t()
    sums = (ends.spread(slopes * w_KE, g) * x_wide).sum(-1)
    used = by_source.indptr.diff().unsqueeze(-1) > 0
    grad_source = torch.where(used, sums - shift, 0)
    grad_x = ends.spread(w_KE, g).to(x.dtype).contiguous()
    return grad_source.to(source.dtype).contiguous(), grad_target.to(target.dtype).contiguous(), grad_x


def _scores(ends: Ends, source: Tensor, target: Tensor, slope: float) -> tuple[Tensor, Tensor]:
    """Scores (K, E) and the slope of the activation at each of them."""
    raw = source.t()[:, ends.source] + target.t()[:, ends.target]
    above = raw > 0
    return torch.where(above, raw, raw * slope), torch.full_like(raw, slope).masked_fill(above, 1.0)


def composed(by_target: Csr, by_source: Csr, source: Tensor, target: Tensor, x: Tensor, slope: float, p: float,
             seed: Tensor | None, batch_heads: int) -> Tensor:
    """The same numbers by differentiable operators: what a second derivative is taken of."""
    ends = Ends(by_target, by_source)
    scores = torch.nn.functional.leaky_relu(source.t()[:, ends.source] + target.t()[:, ends.target], slope)
    weights = segment_softmax(scores, ends.target, ends.num_outputs)
    kept = ends.kept(Drop(p, seed, batch_heads), x.shape[1])
    return ends.collect(weights if kept is None else weights * kept.to(weights.dtype), x)


# -- registration -------------------------------------------------------------------------------------------------

def _fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    source, target, x, train = args[6], args[7], args[8], args[13]
    rows, heads = target.shape
    y = x.new_empty((rows, heads, x.shape[2]))
    y2 = x.new_empty((rows if train else 0, heads, x.shape[2]))
    dtype = sum_dtype(x.dtype)
    return y, y2, source.new_empty((rows, heads), dtype=dtype), source.new_empty((rows, heads), dtype=dtype)


_affine_attention = differentiable_operator(
    "affine_attention", "Tensor source, Tensor target, Tensor x",
    "float slope, float p, Tensor? seed, SymInt batch_heads", "y, y2, lse, mass", flags="bool train",
    forward=forward, fake=_fake, backward=backward, composed=composed, check=_check)
