"""The checks of arguments that loaders share. They run when a loader is made, and not for each batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from structconv.arguments import plain
from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.primitives.layout import check_bounds
from structconv.shapes import check_natural, check_positive, check_tensor

__all__ = ["check_counts", "check_edges", "check_indices", "check_loading", "check_range", "check_rows", "check_times"]

_TOO_MANY = 2 ** 63


def check_edges(owner: str, edge_index: Any, num_nodes: int) -> Tensor:
    """Return edges (2, E) between N nodes as int64 on the CPU."""
    check_natural(owner, "num_nodes", num_nodes)
    check_tensor(owner, "edge_index", edge_index)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ShapeError(owner, "edge_index must have shape (2, E)", tuple(edge_index.shape))
    index = check_indices(owner, "edge_index", edge_index).cpu().long()
    check_bounds(owner, "edge_index", "edge", index, (("num_nodes", num_nodes),) * 2)
    return index


def check_indices(owner: str, name: str, value: Any, *, masks: bool = False) -> Tensor:
    """Return indices, a tensor or a list of integers, as a tensor; of booleans only with `masks`."""
    try:
        index = torch.as_tensor(value)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(owner, f"{name} must be a tensor or a list of indices", type(value).__name__) from error
    if not index.numel() and index.dtype is torch.float32:
        return index.long()  # an empty list
    if index.is_floating_point() or index.is_complex() or (index.dtype is torch.bool and not masks):
        raise ConfigError(owner, f"{name} must be integers", str(index.dtype), "" if masks or index.dtype
                          is not torch.bool else "The positions of a mask are mask.nonzero().flatten().")
    return index


def check_range(owner: str, name: str, index: Tensor, size: int) -> None:
    """Raise `StructureError` unless all indices are in [0, size)."""
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise StructureError(owner, f"{name} must be in [0, {size})", (int(index.min()), int(index.max())))


def check_rows(owner: str, name: str, value: Any, length: int, of: str) -> Tensor | None:
    """Return a tensor with an entry for each seed on the CPU, or `None`."""
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise ConfigError(owner, f"{name} must be a tensor", type(value).__name__)
    if not value.dim() or value.shape[0] != length:
        raise ShapeError(owner, f"{name} must have the length {length}, that of {of}", tuple(value.shape))
    return value.cpu()


def check_times(owner: str, name: str, times: Tensor | None) -> Tensor | None:
    """Return times as int64 on the CPU, or `None`; they must be integers of one dimension."""
    if times is None:
        return None
    if times.is_floating_point() or times.is_complex():
        raise ConfigError(owner, f"{name} must be integers", str(times.dtype),
                          "Scale and round them, for example to seconds.")
    if times.dim() != 1:
        raise ShapeError(owner, f"{name} must have one dimension", tuple(times.shape))
    return times.detach().cpu().long().contiguous()


def check_counts(owner: str, name: str, counts: Any, expected: str, least: int) -> list[int]:
    """Return a list of integers that are at least `least`; `expected` says what they are."""
    try:
        numbers = [None] if isinstance(counts, (str, Mapping)) else list(map(plain, counts))
    except TypeError:
        numbers = [None]  # no sequence
    if any(type(number) is not int or not least <= number < _TOO_MANY for number in numbers):
        raise ConfigError(owner, f"{name} must be {expected}", repr(counts))
    return numbers  # type: ignore[return-value]


def check_loading(owner: str, options: dict[str, Any], *, shuffle: Any, sampler: Any, batch_sampler: Any,
                  generator: Any) -> None:
    """Check the arguments that go on to torch's `DataLoader`, which reads some of them only when it is iterated."""
    for name in ("batch_size", "num_workers"):
        if name in options:
            options[name] = plain(options[name])
    if shuffle is not None and not isinstance(shuffle, bool):
        raise ConfigError(owner, "shuffle must be of type bool", type(shuffle).__name__)
    if not isinstance(options.get("drop_last", False), bool):
        raise ConfigError(owner, "drop_last must be of type bool", type(options["drop_last"]).__name__)
    if batch_sampler is not None and (sampler is not None or shuffle):
        raise ConfigError(owner, "batch_sampler excludes sampler and shuffle", "both")
    if sampler is not None and shuffle:
        raise ConfigError(owner, "sampler and shuffle exclude each other", "both")
    for name, positions in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        iterable = positions.dim() > 0 if isinstance(positions, Tensor) else (
            positions is None or hasattr(positions, "__getitem__") or isinstance(positions, Iterable))
        if not iterable or isinstance(positions, type):
            raise ConfigError(owner, f"{name} must be iterable", type(positions).__name__)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise ConfigError(owner, "generator must be a torch.Generator", type(generator).__name__)
    check_natural(owner, "num_workers", options.get("num_workers", 0))
    if options.get("batch_size", 1) is None:
        if sampler is None:
            raise ConfigError(owner, "batch_size must be a positive integer", "None",
                              "With None, sampler must yield lists of positions. A batch of one seed is batch_size=1.")
    elif batch_sampler is None:
        check_positive(owner, "batch_size", options.get("batch_size", 1))
