"""Tensors over any shapes: numbering of entries, slicing, flattening, outer product and composition.

The vocabulary of J.-M. Andreoli, *Convolution, attention and structure embedding*, 2019, equations 1 to 5. A shape is
a tuple of sizes, a multi-index one position on each axis; any number of axes will do, none included. A linear map is
`compose(A, Theta)` (eq. 7), and what it does to x is eq. 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from structconv.arguments import explained
from structconv.errors import ConfigError, ShapeError, StructureError, text_of
from structconv.shapes import check_alike

__all__ = ["compose", "flatten", "outer", "ravel", "take", "unflatten", "unravel"]

Groups = Sequence[Sequence[int]]


# -- the canonical bijection, eq. 3 -------------------------------------------------------------------------------

@explained
def ravel(index: Tensor, shape: Sequence[int]) -> Tensor:
    """Number of a multi-index, row by row (the last axis runs fastest); the canonical bijection, eq. 3.

    i = sum over axes a of i_a S_(a+1) ... S_r, from the multi-indices of S = (S_1, ..., S_r) onto 0 .. prod S - 1.

    Args:
        index: (..., r) integers, one multi-index along the last dimension.
        shape: S.

    Returns:
        (...) of the dtype of `index`.

    Raises:
        ShapeError: if the last dimension is not r, or the dtype is not an integer type.
        StructureError: if a position is outside its axis.

    Example:

        >>> from structconv.tensors import ravel
        >>> ravel(torch.tensor([[0, 0], [0, 2], [1, 0]]), (2, 3))
        tensor([0, 2, 3])
    """
    _check_integers("ravel", index)
    if index.dim() < 1 or index.shape[-1] != len(shape):
        raise ShapeError("ravel", f"index must have shape (..., {len(shape)}), a position on each axis",
                         tuple(index.shape))
    sizes = torch.tensor(list(shape), dtype=index.dtype, device=index.device)
    _check_range("ravel", index, sizes, tuple(shape))
    return (index * torch.tensor(_strides(shape), dtype=index.dtype, device=index.device)).sum(-1, dtype=index.dtype)


@explained
def unravel(position: Tensor, shape: Sequence[int]) -> Tensor:
    """Multi-index of a number: the inverse of `ravel`, eq. 3; i_a = (i div S_(a+1) ... S_r) mod S_a.

    Args:
        position: (...) integers in 0 .. prod S - 1.
        shape: S, of r axes.

    Returns:
        (..., r) of the dtype of `position`.

    Raises:
        ShapeError: if the dtype is not an integer type.
        StructureError: if a number is outside 0 .. prod S - 1.

    Example:

        >>> from structconv.tensors import unravel
        >>> unravel(torch.tensor([0, 2, 3]), (2, 3)).tolist()
        [[0, 0], [0, 2], [1, 0]]
    """
    _check_integers("unravel", position)
    total = torch.tensor(math.prod(shape), dtype=position.dtype, device=position.device)
    _check_range("unravel", position, total, (math.prod(shape),))
    sizes = torch.tensor(list(shape), dtype=position.dtype, device=position.device)
    strides = torch.tensor(_strides(shape), dtype=position.dtype, device=position.device)
    return position.unsqueeze(-1).div(strides, rounding_mode="floor").remainder(sizes)


# -- slicing and flattening, eqs. 1 and 2 -------------------------------------------------------------------------

@explained
def take(a: Tensor, axes: Sequence[int], index: Tensor | Sequence[int]) -> Tensor:
    """Slice of a tensor at given positions of some of its axes, eq. 1: (A_i)_j = A_ij, wherever the axes of i stand.

    Args:
        a: any shape.
        axes: r different axes.
        index: r integers, or (..., r) integers for a batch of slices.

    Returns:
        (..., the other axes of `a` in their order).

    Raises:
        ConfigError: if an axis does not exist or is named twice.
        ShapeError, StructureError: as `ravel`.

    Example:

        >>> from structconv.tensors import take
        >>> a = torch.arange(24).view(2, 3, 4)
        >>> torch.equal(take(a, (0, 2), (1, 3)), a[1, :, 3])
        True
    """
    axes = _check_axes("take", axes, a.dim())
    index = index if isinstance(index, Tensor) else torch.tensor(list(index), dtype=torch.int64, device=a.device)
    rest = [axis for axis in range(a.dim()) if axis not in axes]
    sizes = [a.shape[axis] for axis in axes]
    position = ravel(index, sizes)
    rows = a.permute(*axes, *rest).reshape(math.prod(sizes), *(a.shape[axis] for axis in rest))
    return rows.index_select(0, position.reshape(-1)).reshape((*position.shape, *rows.shape[1:]))


@explained
def flatten(a: Tensor, groups: Groups, *, bijections: Mapping[int, Tensor] | None = None) -> Tensor:
    """Flatten groups of axes, each into one axis along a bijection, eq. 2: B_(beta(i)) = A_i.

    Args:
        a: any shape.
        groups: the axes of each group, in the order in which they are numbered; a group may be empty (an axis of size
            1), and axes that no group names are kept as leading batch axes.
        bijections: for a group, by its place in `groups`, where each number goes: a permutation (prod S,) that is
            applied after the canonical bijection (`ravel`). Groups without one are numbered canonically.

    Returns:
        (batch axes..., one axis a group).

    Raises:
        ConfigError: if an axis does not exist or is named twice, or a bijection belongs to no group.
        StructureError: if a bijection is not a permutation of its group's numbers.

    Example:

        >>> from structconv.tensors import flatten
        >>> image = torch.randn(8, 5, 6, 3)                        # batch, height, width, channels
        >>> flatten(image, [(1, 2), (3,)]).shape                   # batch, pixels, channels
        torch.Size([8, 30, 3])
        >>> flatten(torch.tensor([7, 8, 9]), [(0,)], bijections={0: torch.tensor([2, 0, 1])})
        tensor([8, 9, 7])
    """
    axes = _check_axes("flatten", [axis for group in groups for axis in group], a.dim())
    batch = [axis for axis in range(a.dim()) if axis not in axes]
    sizes = _group_sizes(tuple(a.shape), groups)
    flat = a.permute(*batch, *axes).reshape([*(a.shape[axis] for axis in batch), *sizes])
    for group, beta in (bijections or {}).items():
        _check_permutation("flatten", beta, group, sizes)
        flat = flat.index_select(len(batch) + group, torch.argsort(beta))
    return flat


@explained
def unflatten(b: Tensor, shape: Sequence[int], groups: Groups, *, bijections: Mapping[int, Tensor] | None = None,
              ) -> Tensor:
    """The tensor A of the given shape whose `flatten` with the same arguments is `b`, eq. 2: A_i = B_(beta(i)).

    Args:
        b: what `flatten` returned.
        shape: shape of A.
        groups, bijections: as in `flatten`.

    Raises:
        ShapeError: if `b` is not a flattening of that shape; otherwise as `flatten`.

    Example:

        >>> from structconv.tensors import flatten, unflatten
        >>> image = torch.randn(8, 5, 6, 3)
        >>> torch.equal(unflatten(flatten(image, [(1, 2), (3,)]), image.shape, [(1, 2), (3,)]), image)
        True
    """
    axes = _check_axes("unflatten", [axis for group in groups for axis in group], len(shape))
    batch = [axis for axis in range(len(shape)) if axis not in axes]
    sizes = _group_sizes(tuple(shape), groups)
    expected = (*(shape[axis] for axis in batch), *sizes)
    if tuple(b.shape) != expected:
        raise ShapeError("unflatten", f"b must have shape {expected}", tuple(b.shape))
    for group, beta in (bijections or {}).items():
        _check_permutation("unflatten", beta, group, sizes)
        b = b.index_select(len(batch) + group, beta.long())
    order = [*batch, *axes]
    inverse = [order.index(axis) for axis in range(len(shape))]
    return b.reshape([shape[axis] for axis in order]).permute(inverse)


# -- products, eqs. 4 and 5 ---------------------------------------------------------------------------------------

@explained
def outer(a: Tensor, b: Tensor, *, batch: int = 0) -> Tensor:
    """Outer product, eq. 4: (A outer B)_ij = A_i B_j.

    Args:
        a, b: any shapes; the first `batch` axes of both are shared and broadcast, i and j run over the others.
        batch: number of shared leading axes.

    Returns:
        (batch..., axes of a, axes of b); two dtypes are promoted as in `a * b`. Cost: one product an entry.

    Raises:
        ShapeError: if one has fewer than `batch` axes or these do not broadcast.

    Example:

        >>> from structconv.tensors import outer
        >>> outer(torch.tensor([1, 2]), torch.tensor([1, 10, 100])).tolist()
        [[1, 10, 100], [2, 20, 200]]
    """
    lead = _check_batch("outer", a, b, batch)
    own_a, own_b = a.shape[batch:], b.shape[batch:]
    left = a.reshape(*a.shape[:batch], math.prod(own_a), 1)
    right = b.reshape(*b.shape[:batch], 1, math.prod(own_b))
    return (left * right).reshape((*lead, *own_a, *own_b))


@explained
def compose(a: Tensor, b: Tensor, *, axes: int = 1, batch: int = 0) -> Tensor:
    """Composition, eq. 5: A o B = sum over k of A_k outer B_k, so that (A o B)_ij = sum over k of A_ki B_kj.

    k runs over the *first* axes of both; i, j and k are multi-indices. `compose(A, Theta)` of a basis A (K, M, N) and a
    weight Theta (K, P, Q) is the linear map Phi (M, N, P, Q) of a convolution, eq. 7. The matrix product of a (I, K)
    and b (K, J) is `compose(a.mT, b)`; with axes=0 it is the outer product.

    Args:
        a: (batch..., k..., i...).
        b: (batch..., k..., j...), with the same axes k.
        axes: number of axes of k.
        batch: number of shared leading axes, broadcast.

    Returns:
        (batch..., i..., j...). Cost: 2 prod(i) prod(k) prod(j) flops.

    Raises:
        ShapeError: if the axes of k differ, or as `outer`.

    Example:

        >>> from structconv.tensors import compose
        >>> a, theta, x = torch.randn(2, 5, 4), torch.randn(2, 3, 6), torch.randn(5, 3)
        >>> phi = compose(a, theta)                                # eq. 7
        >>> phi.shape
        torch.Size([5, 4, 3, 6])
        >>> y = sum(a[k].T @ x @ theta[k] for k in range(2))       # eq. 8
        >>> torch.allclose(torch.einsum("mnpq,mp->nq", phi, x), y, atol=1e-5)
        True
    """
    lead = _check_batch("compose", a, b, batch)
    check_alike("compose", a, b, name="a", other_name="b")
    if axes < 0 or a.dim() - batch < axes or b.dim() - batch < axes:
        raise ShapeError("compose", f"a and b must have {axes} axes to sum over after {batch} shared ones",
                         f"{text_of(a.shape)} and {text_of(b.shape)}")
    cut = batch + axes
    k, i, j = a.shape[batch:cut], a.shape[cut:], b.shape[cut:]
    if k != b.shape[batch:cut]:
        raise ShapeError("compose", f"b must start with the first axes of a, {text_of(k)}", tuple(b.shape[batch:cut]))
    left = a.reshape(*a.shape[:batch], math.prod(k), math.prod(i))
    right = b.reshape(*b.shape[:batch], math.prod(k), math.prod(j))
    return (left.mT @ right).reshape((*lead, *i, *j))


# -- checks -------------------------------------------------------------------------------------------------------

def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[axis + 1:]) for axis in range(len(shape))]


def _group_sizes(shape: tuple[int, ...], groups: Groups) -> list[int]:
    return [math.prod([shape[axis] for axis in group]) for group in groups]


def _check_integers(owner: str, index: Tensor) -> None:
    if index.is_floating_point() or index.is_complex() or index.dtype == torch.bool:
        raise ShapeError(owner, "positions must have an integer dtype", index.dtype)


def _check_range(owner: str, index: Tensor, sizes: Tensor, shape: tuple[int, ...]) -> None:
    if torch.compiler.is_compiling() or type(index) is not Tensor:
        return
    if ((index < 0) | (index >= sizes)).any():
        raise StructureError(owner, f"positions must lie within the shape {shape}",
                             f"values from {int(index.min())} to {int(index.max())}")


def _check_axes(owner: str, axes: Sequence[int], rank: int) -> list[int]:
    if any(not -rank <= axis < rank for axis in axes):
        raise ConfigError(owner, f"axes must lie between {-rank} and {rank - 1}", list(axes))
    positive = [axis % rank for axis in axes]
    if len(set(positive)) != len(positive):
        raise ConfigError(owner, "each axis may be named once", list(axes))
    return positive


def _check_permutation(owner: str, beta: Tensor, group: int, sizes: list[int]) -> None:
    if not 0 <= group < len(sizes):
        raise ConfigError(owner, f"a bijection must belong to one of the {len(sizes)} groups", group)
    _check_integers(owner, beta)
    if beta.shape != (sizes[group],):
        raise StructureError(owner, f"the bijection of group {group} must have shape ({sizes[group]},)",
                             tuple(beta.shape))
    if torch.compiler.is_compiling() or type(beta) is not Tensor:
        return
    if not torch.equal(beta.long().sort().values, torch.arange(sizes[group], device=beta.device)):
        raise StructureError(owner, f"the bijection of group {group} must hold each of 0 .. {sizes[group] - 1} once",
                             beta.tolist() if beta.numel() <= 16 else "repeated or missing numbers")


def _check_batch(owner: str, a: Tensor, b: Tensor, batch: int) -> tuple[int, ...]:
    if not 0 <= batch <= min(a.dim(), b.dim()):
        raise ShapeError(owner, f"a and b must have {batch} shared leading axes",
                         f"{text_of(a.shape)} and {text_of(b.shape)}")
    lead = list(zip(a.shape[:batch], b.shape[:batch], strict=True))
    if any(x != y and x != 1 and y != 1 for x, y in lead):
        raise ShapeError(owner, "shared leading axes must broadcast", f"{text_of(a.shape)} and {text_of(b.shape)}")
    return tuple(y if x == 1 else x for x, y in lead)
