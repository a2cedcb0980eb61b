"""Layers along edges that a kernel has sorted, each as one node of autograd: one description, a line for each layer.

See `node.as_node` for how they are called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from structconv.errors import ShapeError
from structconv.primitives.native import dispatch
from structconv.primitives.native.adjacency import Adjacency
from structconv.primitives.native.dispatch import Loaded
from structconv.primitives.native.node import Gradients, as_node
from structconv.primitives.products import FULL_WIDTH, LEAST_NUMBERS, LEAST_PRODUCTS, outer, product

__all__ = ["attend_additive", "attend_affine", "attend_bilinear", "attend_dots",
           "attend_entries", "attend_entries_weighted", "attend_layer", "attend_pairs", "convolve", "convolve_linear",
           "convolve_with_self", "gather_maxima", "gather_messages", "gather_sums", "group_starts",
           "pool_groups", "standardize_groups"]

#: Pooling in src/api.h.
_POOLINGS = {"sum": 0, "mean": 1, "max": 2, "min": 3, "var": 4, "softmax": 5, "fixed softmax": 6}

# -- sums and products --------------------------------------------------------------------------------------------

def _sums(adjacency: Adjacency, x: Tensor, more: Tensor | None = None) -> Tensor:
    if x.shape[0] != adjacency.columns:
        raise ShapeError("Conv", f"x must have shape (..., M={adjacency.columns}, P)", tuple(x.shape),
                         "Entries are dim -2, channels dim -1.")
    y: Tensor = Loaded.core.sums(adjacency.by_target, x, more)  # type: ignore[union-attr]
    return y


def _sums_backward(adjacency: Adjacency, _: Any, grad: Tensor, needed: Any) -> Tensor:
    return _spread(adjacency, grad)


def _spread(adjacency: Adjacency, grad: Tensor, more: Tensor | None = None) -> Tensor:
    """The sums over the reversed edges, plus `more`."""
    sums: Tensor = Loaded.core.sums(adjacency.by_source(), grad, more)  # type: ignore[union-attr]
    return sums


def _linear(adjacency: Adjacency, x: Tensor, weight: Tensor, root: Tensor | None, x_root: Tensor | None,
            bias: Tensor | None, structure_first: bool, train: bool) -> tuple[Tensor, Tensor | None]:
    """y, and A^T x where it was made."""
    if _is_small(adjacency, weight) and x.size(0) == adjacency.columns:
        of_few: tuple[Tensor, Tensor | None] = Loaded.core.convolve_linear(  # type: ignore[union-attr]
            adjacency.by_target, x, weight, root, x_root, bias, structure_first, train)
        return of_few
    own = x if x_root is None else x_root
    if not structure_first:
        more = None if root is None else product(own, root.t(), bias)
        y = _sums(adjacency, product(x, weight.t()), more)
        return y if bias is None or root is not None else y.add_(bias), None
    r = _sums(adjacency, x)
    y = product(r, weight.t(), bias)
    return y if root is None else _plus_product(y, own, root.t()), r


def _linear_backward(adjacency: Adjacency, x: Tensor, weight: Tensor, root: Tensor | None, x_root: Tensor | None,
                     bias: Tensor | None, r: Tensor | None, grad: Tensor, needed: tuple[bool, ...],
                     structure_first: bool) -> Gradients:
    if _is_small(adjacency, weight):
        grads: Gradients = Loaded.core.convolve_linear_backward(  # type: ignore[union-attr]
            adjacency.by_source(), x, weight, root, x_root, r, grad, structure_first, *needed)
        return grads
    g = dispatch.dense(grad)
    to_x = g if structure_first or not (needed[0] or needed[1]) else _spread(adjacency, g)
    grad_x = grad_own = None
    if needed[0]:
        grad_x = product(to_x, weight)
        shared = None if root is None or x_root is not None else root
        if structure_first:
            grad_x = _spread(adjacency, grad_x, None if shared is None else product(g, shared))
        elif shared is not None:
            grad_x = _plus_product(grad_x, g, shared)
    if needed[3]:
        grad_own = product(g, cast(Tensor, root))
    return (grad_x, outer(to_x, x if r is None else r) if needed[1] else None,
            outer(g, x if x_root is None else x_root) if needed[2] else None, grad_own,
            g.sum(0) if needed[4] else None)


def _plus_product(y: Tensor, x: Tensor, w: Tensor) -> Tensor:
    """y + x w, in the place of y."""
    small = y.numel() < LEAST_NUMBERS
    return y.addmm_(x, w) if small else y.add_(product(x, w))


def _is_small(adjacency: Adjacency, theta: Tensor) -> bool:
    """Return True if torch's own products are the fastest, so that a kernel may call them: see `products.product`."""
    p, q = theta.size(-2), theta.size(-1)
    numbers = max(adjacency.rows, adjacency.columns) * max(p, q)
    return numbers < LEAST_NUMBERS or (min(p, q) >= FULL_WIDTH and numbers * max(p, q) < LEAST_PRODUCTS)


def _convolve(adjacency: Adjacency, x: Tensor, theta: Tensor, bias: Tensor | None, structure_first: bool, train: bool
              ) -> Any:
    """y, and A^T x where it was made."""
    if _is_small(adjacency, theta) and x.size(0) == adjacency.columns:
        return Loaded.core.convolve(  # type: ignore[union-attr]
            adjacency.by_target, x, theta, bias, structure_first, train)
    if structure_first:
        r, rows = _sums(adjacency, x), theta.flatten(0, 1)
        return product(r.view(-1, rows.shape[0]), rows, bias), r
    y = _sums(adjacency, product(x, theta.squeeze(0)))
    return y if bias is None else y.add_(bias), None


def _convolve_backward(adjacency: Adjacency, x: Tensor, theta: Tensor, bias: Tensor | None, r: Tensor | None,
                       grad: Tensor, needed: tuple[bool, ...], structure_first: bool) -> Any:
    if _is_small(adjacency, theta):
        return Loaded.core.convolve_backward(  # type: ignore[union-attr]
            adjacency.by_source(), x, theta, r, grad, *needed)
    grad_x = grad_theta = None
    g, rows = dispatch.dense(grad), theta.flatten(0, 1)
    if r is None and (needed[0] or needed[1]):
        g = _spread(adjacency, g)
    if needed[1]:
        grad_theta = outer(x if r is None else r.view(-1, rows.shape[0]), g).view(theta.shape)
    if needed[0]:
        grad_x = product(g, rows.t())
        if r is not None:
            grad_x = _spread(adjacency, dispatch.dense(grad_x).view(-1, theta.shape[1]))
    return grad_x, grad_theta, grad.sum(0) if needed[2] else None


def _convolve_with_self(adjacency: Adjacency, x: Tensor, theta: Tensor, bias: Tensor | None, own: int, train: bool
                        ) -> Any:
    if _is_small(adjacency, theta) and x.size(0) == adjacency.columns:
        return Loaded.core.convolve_with_self(  # type: ignore[union-attr]
            adjacency.by_target, x, theta, bias, own, train)
    r = _sums(adjacency, x)
    return product(r, theta[1 - own], bias).add_(product(x, theta[own])), r


def _convolve_with_self_backward(adjacency: Adjacency, x: Tensor, theta: Tensor, bias: Tensor | None, r: Tensor,
                                 grad: Tensor, needed: tuple[bool, ...], own: int) -> Any:
    if _is_small(adjacency, theta):
        return Loaded.core.convolve_with_self_backward(  # type: ignore[union-attr]
            adjacency.by_source(), x, theta, r, grad, own, *needed)
    grad_x = grad_theta = None
    g = dispatch.dense(grad)
    if needed[0]:
        grad_x = _spread(adjacency, product(g, theta[1 - own].t()), product(g, theta[own].t()))
    if needed[1]:
        grads = [outer(r, g), outer(x, g)]
        grad_theta = torch.stack(grads if own else grads[::-1])
    return grad_x, grad_theta, grad.sum(0) if needed[2] else None


#: y = sum_k A_k^T x Theta_k + b of x (M, P), Theta (K, P, Q) and b (Q) or none: (N, Q). Edges lead to N K outputs, of
#: which n K + k is output n of A_k; of one matrix, `structure_first` tells (A^T x) Theta from A^T (x Theta).
convolve = as_node("_Convolve", 3, _convolve, _convolve_backward, reads_result=False, flagged=True, read={2: ()})
#: y = A^T x Theta_(1 - own) + x Theta_own + b of x (N, P) and Theta (2, P, Q): GraphSAGE (Hamilton et al. 2017).
convolve_with_self = as_node("_ConvolveWithSelf", 3, _convolve_with_self, _convolve_with_self_backward,
                             reads_result=False, flagged=True, read={2: ()})
#: y = A^T x W^T + x_root R^T + b of x (M, P), W (Q, P), R (Q, P) or none, x_root (N, P) or none for x itself, and b (Q)
#: or none: (N, Q). Weights lie as in torch's linear layers. `structure_first` tells (A^T x) W^T from A^T (x W^T).
convolve_linear = as_node("_ConvolveLinear", 5, _linear, _linear_backward, reads_result=False, flagged=True,
                          read={4: ()})
#: The sums, or the maxima, of x (M, C) over the edges into each output: (N, C), zero without any.
gather_sums = as_node("_Sums", 1, _sums, _sums_backward, reads_result=False, read={0: ()})
gather_maxima = as_node("_Maxima", 1, "maxima", "maxima_backward")


# -- messages -----------------------------------------------------------------------------------------------------

def _messages_backward(adjacency: Adjacency, x: Tensor, attributes: Tensor, grad: Tensor, needed: tuple[bool, ...]
                       ) -> Gradients:
    gradients: Gradients = Loaded.core.messages_backward(  # type: ignore[union-attr]
        *adjacency.sides(), x, attributes, grad, *needed)
    return gradients


#: y_n = sum over the edges m -> n of relu(x_m + a_e), of x (M, C) and a (E, C), with a `numbered` adjacency: (N, C).
gather_messages = as_node("_Messages", 2, "messages", _messages_backward, reads_result=False)

# -- attention; its options end with p, seed and heads of one batch entry, see `dispatch.drop_of` ------------------

#: `projected_attention` among the inputs, of x (M, K, C), of_source and of_target (K, C), a bias (K, C) or none, and
#: the slope: (M, K, C).
attend_affine = as_node("_AttendAffine", 4, "attend_forward", "attend_backward", flagged=True)
#: `attend_affine` of x Theta_k instead of x: of x (M, P), Theta (K, P, C), of_source, of_target and a bias (K C) or
#: none: (M, K C).
attend_layer = as_node("_AttendLayer", 5, "attend_layer_forward", "attend_layer_backward", flagged=True)
#: `bilinear_attention` of q, k, v, no bias, and the scale.
attend_bilinear = as_node("_AttendBilinear", 4, "bilinear_forward", "bilinear_backward")
#: `additive_attention` of q, k, x, the vector, the kind and the parameter of its activation, and False.
attend_additive = as_node("_AttendAdditive", 4, "additive_forward", "additive_backward")
#: GATv2 among the inputs, projections included: (M, K C). Of x (M, P), Theta (K, P, C), the weight (K C, P) and bias of
#: the targets, the vector (K, C), a bias (K C) or none, and the slope.
attend_pairs = as_node("_AttendPairs", 6, "attend_pairs_forward", "attend_pairs_backward")
#: Scaled dot-product attention among the entries of x (M, P), projections included: (M, K C). Of x, queries (K D, P)
#: and their bias (K D) or none, keys and theirs, values (K, P, C), or (K C, P) with the number of heads in place of 0,
#: their bias (K C) or none, a bias (K C) of the result or none, 0, and the scale.
attend_dots = as_node("_AttendDots", 8, "attend_dots_forward", "attend_dots_backward", flagged=True)


def _entries(_: Any, *arguments: Any) -> Any:
    *own, train = arguments
    return Loaded.core.attend_entries_forward(*own, 0, train)[:4]  # type: ignore[union-attr]


def _entries_backward(_: Any, *arguments: Any) -> Gradients:
    *saved, _, heads, scale, causal = arguments
    grads: Gradients = Loaded.core.attend_entries_backward(*saved, heads, scale, causal)  # type: ignore[union-attr]
    return *grads, None


#: Multi-head attention of x (..., M, P) to itself, without an adjacency. Of x, weight (K D, P) and bias of queries,
#: those of keys, of values (K C, P) with a bias (K C) or (K, C), of the output (Q, K C), a mask without a gradient, as
#: of `fused_attention.exact_attention`, K, the scale, and whether it is causal.
attend_entries = as_node("_AttendEntries", 10, _entries, _entries_backward, reads_result=False, flagged=True)


def attend_entries_weighted(*arguments: Any, mean: bool) -> tuple[Tensor, Tensor]:
    """`attend_entries` where no gradient is needed; its weights (B, K, M, M), or their `mean` over heads (B, M, M)."""
    y, *_, weights = Loaded.core.attend_entries_forward(*arguments, 1 + mean, False)  # type: ignore[union-attr]
    return y, weights


# -- groups of consecutive rows -------------------------------------------------------------------------------------

class _Groups(NamedTuple):
    """The first row of each group and the number of all, in the place of an adjacency."""

    by_target: Tensor

    def sides(self) -> tuple[Tensor]:
        return (self.by_target,)


def _even_backward(groups: _Groups, x: Tensor, grad: Tensor, _: Any, kind: int, t: float) -> Tensor:
    of_x: Tensor = Loaded.core.pool_backward(  # type: ignore[union-attr]
        groups.by_target, x, grad, grad, kind, t)  # which reads no number of x and y
    return of_x


def _centered(groups: _Groups, x: Tensor, *options: Any) -> Tensor:
    y: Tensor = Loaded.core.norm(groups.by_target, x, None, None, None, *options)  # type: ignore[union-attr]
    return y


def _centered_backward(groups: _Groups, _: Any, grad: Tensor, needed: Any, *options: Any) -> Tensor:
    return _centered(groups, grad, *options)


_pool = as_node("_Pool", 1, "pool", "pool_backward")
_pool_evenly = as_node("_Pool", 1, "pool", _even_backward, reads_result=False, read={0: ()})
_center = as_node("_Norm", 1, _centered, _centered_backward, reads_result=False, read={0: ()})
_norm = as_node("_Norm", 4, "norm", "norm_backward", reads_result=False, read={3: ()})
#: Center and Scale in src/api.h.
_CENTERS = {"channel": 0, "all": 1}
_SCALES = {None: 0, "channel": 1, "all": 2}


def pool_groups(x: Tensor, starts: Tensor, kind: str, composed: Callable[[Tensor], Tensor], t: float = 1.0
                ) -> Tensor | None:
    """x (M, C) by groups of rows -> (G, C), zero for a group without rows; `None` where no kernel can read them.

    Args:
        starts: (G + 1,), the first row of each group and the number of all.
        kind: "sum", "mean", "max", "min", "var" (the mean of squared distances from the mean), "softmax" (weights
            softmax(t x) in each channel), or "fixed softmax", whose weights have no gradient.
        t: the factor of the scores of a softmax.
        x, composed: as of every layer here.
    """
    if _readable(starts) is None:
        return None
    return (_pool_evenly if kind in ("sum", "mean") else _pool)(_Groups(starts), composed, x, _POOLINGS[kind], t)


def standardize_groups(x: Tensor, starts: Tensor, shift: Tensor | None, weight: Tensor | None, bias: Tensor | None,
                       composed: Callable[..., Tensor], center: str, scale: str | None, eps: float, gain: float
                       ) -> Tensor | None:
    """y = gain weight (x - shift mean) scale + bias of x (M, C) by groups of rows; `None` where no kernel reads them.

    Args:
        starts, x: as of `pool_groups`.
        shift, weight, bias: (C,), or none for 1, 1 and 0.
        composed: the same function of x, shift, weight and bias.
        center: the mean is that of each "channel" of a group, or of "all" its channels.
        scale: 1 / sqrt(mean((x - shift mean)^2) + eps) of each "channel" or of "all", or None for 1.
    """
    if _readable(starts) is None:
        return None
    options = _CENTERS[center], _SCALES[scale], eps, gain
    if scale is shift is weight is bias is None:
        return _center(_Groups(starts), lambda x: composed(x, None, None, None), x, *options)
    return _norm(_Groups(starts), composed, x, shift, weight, bias, *options)


def group_starts(groups: Tensor, count: int) -> Tensor | None:
    """The first row of each group, and the number of all: (count + 1,); `None` where no kernel can say.

    Args:
        groups: (M,), the group of each row; `None` is returned if they do not rise, or one is not in [0, count).
    """
    core = _readable(groups)
    starts = None if core is None else core.starts(groups, count)
    return starts if starts is not None and starts.shape[0] else None


def _readable(index: Tensor) -> Any:
    """The kernels, or `None` if the index has another device, dtype or layout than they read."""
    if not (index.is_cpu and index.dtype is torch.int64 and index.is_contiguous()):
        return None
    return Loaded.core if Loaded.asked else dispatch.kernels()
