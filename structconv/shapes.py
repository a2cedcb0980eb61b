"""The checks of shapes, dtypes and devices, shared by all layers of the package."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from structconv.errors import ConfigError, ShapeError, text_of

__all__ = ["NO_TENSORS", "Shape", "alike", "broadcast", "check_alike", "check_choice", "check_device", "check_divides",
           "check_entries", "check_finite", "check_leads", "check_natural", "check_not_traced", "check_number",
           "check_positive", "check_same_shape", "check_seed", "check_tensor", "concatenate", "converted", "goes_into",
           "layout_hint", "leads_fit", "mixes", "shape_or_type", "total"]

Shape = tuple[int, ...]
#: Types of arguments that are mistaken for tensors; a class may also hold a stand-in for a tensor.
NO_TENSORS = (bool, int, float, complex, str, list, dict, np.ndarray)
_TOO_MANY = 2 ** 63
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def broadcast(*shapes: Shape) -> Shape:
    """The shape that all broadcast to, or torch's error; no work where they are equal, or empty beside one that is
    not."""
    if torch.compiler.is_compiling():
        return tuple(torch.broadcast_shapes(*shapes))
    first: Shape = ()
    for shape in shapes:
        if shape and first and shape != first:
            return tuple(torch.broadcast_shapes(*shapes))
        first = first or shape
    return tuple(first)


def concatenate(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """Join tensors along `dim` < 0, with the dimensions before it broadcast."""
    lead = tensors[0].shape[:dim]
    if all(t.shape[:dim] == lead for t in tensors):
        return torch.cat(list(tensors), dim)
    lead = torch.broadcast_shapes(*(t.shape[:dim] for t in tensors))
    return torch.cat([t.expand(*lead, *t.shape[dim:]) for t in tensors], dim)


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Sum tensors whose dimensions broadcast."""
    shape = tensors[0].shape
    same = all(t.shape == shape for t in tensors)
    return torch.stack(list(tensors if same else torch.broadcast_tensors(*tensors))).sum(0)


def sum_tensors(terms: Sequence[Tensor]) -> Tensor:
    """The sum of one or more tensors from left to right; unlike `sum`, it does not start from 0."""
    result = terms[0]
    for term in terms[1:]:
        result = result + term
    return result


def goes_into(shape: Shape, whole: Shape) -> bool:
    """Return True if `shape` broadcasts to `whole` without changing `whole`."""
    rank = len(whole) - len(shape)
    return rank >= 0 and all(size in (1, other) for size, other in zip(shape, whole[rank:], strict=True))


def check_tensor(owner: str, name: str, value: object, remedy: str = "") -> None:
    """Raise `ConfigError` unless `value` is a tensor, and `ShapeError` if it is a sparse or a nested one."""
    if not isinstance(value, Tensor):
        plain = isinstance(value, (list, tuple)) or hasattr(value, "__array_interface__")
        convert = f"Convert it, for example torch.as_tensor({name}, dtype=torch.float32)." if plain else ""
        raise ConfigError(owner, f"{name} must be a tensor", type(value).__name__, remedy or convert)
    if value.layout in _SPARSE:
        raise ShapeError(owner, f"{name} must be dense", value.layout, "Convert it with .to_dense(); a matrix that "
                         "relates entries is Graph.from_torch_sparse(matrix).")
    if value.is_nested:
        raise ShapeError(owner, f"{name} must not be nested", value.layout, f"The entries of all sequences are "
                         f"{name}.values(), with structure=Samples({name}.offsets().diff()).")


def check_same_shape(owner: str, name: str, result: object, argument: Tensor) -> Tensor:
    """Return the result of a function of the user's, if it has the shape of its argument."""
    if not isinstance(result, Tensor) or result.shape != argument.shape:
        raise ShapeError(owner, f"{name} must return a tensor of the shape of its argument, {text_of(argument.shape)}",
                         shape_or_type(result))
    return result


def shape_or_type(value: object) -> object:
    """The shape of a tensor, or the name of the type of anything else, for an error."""
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__


def layout_hint(x: Tensor, channels: int | None) -> str:
    """Say where entries and channels are, and how to get there from (B, P, *S)."""
    if channels is not None and x.dim() > 2 and x.shape[1] == channels:
        return "Entries are dim -2, channels dim -1. If channels are dim 1, pass x.flatten(2).mT."
    return "Entries are dim -2, channels dim -1."


def check_entries(owner: str, x: Tensor, *, entries: int | None = None, channels: int | None = None,
                  name: str = "x", letters: Sequence[str] = "MP") -> None:
    """Raise `ShapeError` unless `x` has shape (..., entries, channels); `None` leaves a size free."""
    fits = x.dim() >= 2
    if fits and channels is not None:
        fits = x.shape[-1] == channels
    if fits and entries is not None:
        fits = x.shape[-2] == entries
    if not fits:
        sizes = [letter if size is None else f"{letter}={int(size)}"  # a compiler writes no unread argument
                 for letter, size in zip(letters, (entries, channels), strict=True)]
        raise ShapeError(owner, f"{name} must have shape (..., {', '.join(sizes)})", tuple(x.shape),
                         layout_hint(x, channels))


def check_leads(owner: str, x: Tensor, z: Tensor, *, name: str = "x", other_name: str = "z") -> None:
    """Raise `ShapeError` unless the leading dimensions of x and z broadcast."""
    if not leads_fit(x, z):
        expected = f"leading dimensions of {other_name} must broadcast with those of {name}, {text_of(x.shape[:-2])}"
        raise ShapeError(owner, expected, tuple(z.shape), "Both are of one batch.")


def leads_fit(x: Tensor, z: Tensor) -> bool:
    """Return True if the leading dimensions of x and z broadcast; a compiler cannot catch torch's error."""
    for own, other in zip(x.shape[-3::-1], z.shape[-3::-1], strict=False):
        if own != other and own != 1 and other != 1:
            return False
    return True


def check_not_traced(*sizes: object) -> None:
    """Raise `ConfigError` for a size that is a tensor: `torch.jit.trace` would make a constant of it."""
    if any(isinstance(size, Tensor) for size in sizes):
        raise ConfigError("plan", "an expression must be exported or compiled", "torch.jit.trace",
                          "Use torch.export.export(layer, (x,)) or torch.compile(layer).")


def check_alike(owner: str, x: Tensor, other: Tensor, *, name: str = "x", other_name: str = "theta") -> None:
    """Raise `ShapeError` unless two tensors share dtype and device."""
    if x.dtype != other.dtype:
        raise ShapeError(owner, f"{name} and {other_name} must share one dtype", f"{x.dtype} and {other.dtype}",
                         f"Convert one, for example {name}.to({other.dtype}).")
    if x.device != other.device:
        raise ShapeError(owner, f"{name} and {other_name} must be on one device", f"{x.device} and {other.device}",
                         f"Move one, for example {name}.to({str(other.device)!r}).")


def alike(owner: str, x: Tensor, other: Tensor, *, name: str = "x", other_name: str = "values") -> Tensor:
    """`other`, in the dtype of x where autocast may have given it another; else `ShapeError` unless they share both."""
    mixed = mixes(x, other)
    if not mixed:
        check_alike(owner, x, other, name=name, other_name=other_name)
    return other.to(x.dtype) if mixed else other


def converted(owner: str, name: str, t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `t` in this dtype; `ShapeError` for complex numbers that would lose their imaginary part."""
    if t.dtype is dtype:
        return t
    if t.is_complex() and not dtype.is_complex:
        raise ShapeError(owner, f"{name} must be real", t.dtype, f"Pass both parts as channels, for example "
                         f"torch.view_as_real({name}).flatten(-2), which doubles their number.")
    return t.to(dtype)


def mixes(x: Tensor, other: Tensor) -> bool:
    """Return True if autocast may be the reason for the different dtypes of two tensors."""
    return x.dtype != other.dtype and x.device == other.device and torch.is_autocast_enabled(x.device.type)


def check_positive(owner: str, name: str, value: int) -> int:
    """Return `value` if it is a positive integer, else raise `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or not 0 < value < _TOO_MANY:
        raise ConfigError(owner, f"{name} must be a positive integer", repr(value))
    return value


def check_number(owner: str, name: str, value: object) -> float:
    """Return `value` as a float if it is a number, also one that a compiler traces, else raise `ConfigError`."""
    if not isinstance(value, (int, float, torch.SymInt, torch.SymFloat)) and not (
            value.numel() == 1 if isinstance(value, Tensor) else hasattr(value, "__float__")):
        raise ConfigError(owner, f"{name} must be a number", repr(value))
    return float(value)  # type: ignore[arg-type]


def check_natural(owner: str, name: str, value: int) -> int:
    """Return `value` if it is an integer >= 0, else raise `ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)) or not 0 <= value < _TOO_MANY:
        raise ConfigError(owner, f"{name} must be an integer >= 0", repr(value))
    return value


def check_device(owner: str, device: object) -> torch.device:
    """Return the device, or raise `ConfigError` if torch has none of this name."""
    try:
        return torch.device(device)  # type: ignore[call-overload]
    except (RuntimeError, TypeError, ValueError) as error:
        expected = "device must be a torch.device or the name of one, for example 'cpu'"
        raise ConfigError(owner, expected, repr(device)) from error


def check_finite(owner: str, name: str, value: float, *, above: float = -math.inf) -> float:
    """Return `value` if it is a finite number greater than `above`, else raise `ConfigError`."""
    if isinstance(value, bool) or not math.isfinite(check_number(owner, name, value)) or value <= above:
        more = "" if above == -math.inf else f" greater than {above:g}"
        raise ConfigError(owner, f"{name} must be a finite number{more}", repr(value))
    return value


def check_seed(owner: str, seed: int) -> None:
    """Raise `ConfigError` unless a generator of random numbers takes the seed."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not -2 ** 63 <= seed < 2 ** 63:
        raise ConfigError(owner, "seed must be an integer of 64 bits", repr(seed))


def check_divides(owner: str, divisor_name: str, divisor: int, name: str, value: int) -> int:
    """Return value // divisor if it is whole, else raise `ConfigError`."""
    check_positive(owner, divisor_name, divisor)
    if value % divisor:
        raise ConfigError(owner, f"{divisor_name} must divide {name}={value}", f"{divisor_name}={divisor}")
    return value // divisor


def check_choice(owner: str, name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise `ConfigError` unless `value` is one of `choices`."""
    if isinstance(value, Tensor) or value not in choices:
        raise ConfigError(owner, f"{name} must be one of {', '.join(map(repr, choices))}", repr(value))
