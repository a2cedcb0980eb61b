"""Memory of large results on a CPU: on huge pages, and reused by later results of the same size.

The C library returns freed blocks of 32 MB and more to the system, so that each result has new page faults: writing 34
MB takes 11 ms, and 31 MB 1 ms, up to a third of a large layer. By default this module does the same. After
`keep_memory()` it stores a freed block for the next result, as torch does on a GPU. The system may take a stored block
if memory is short (`MADV_FREE`).
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.errors import ConfigError

__all__ = ["keep_memory", "release_memory", "reserved_memory"]

#: Bytes from which a result is large, and of a huge page.
LEAST, _PAGE = 32 << 20, 2 << 20
_MOST_RESERVED, _SHARE_RESERVED = 2 << 30, 8
_SUPPORTED = all(hasattr(mmap, name) for name in ("MADV_HUGEPAGE", "MADV_FREE", "MAP_ANONYMOUS"))


class _Block(NamedTuple):
    """`size` bytes of a mapping from `start` on, a border of huge pages."""

    mapping: mmap.mmap
    start: int
    size: int


def new_empty(like: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Tensor:
    """`like.new_empty(shape, dtype=dtype)`; a large one on a CPU lies on huge pages, where the system has them.

    Its storage cannot be resized. The memory is kept from the moment that no tensor uses it, up to the limit of
    `keep_memory`.
    """
    dtype = like.dtype if dtype is None else dtype
    size = math.prod(shape) * dtype.itemsize
    if size < LEAST or not _SUPPORTED or not like.is_cpu:
        return like.new_empty(shape, dtype=dtype)
    block = _acquire(-(-size // _PAGE) * _PAGE)
    lease = (ctypes.c_char * size).from_buffer(block.mapping, block.start)
    weakref.finalize(lease, _give_back, block).atexit = False
    return torch.frombuffer(lease, dtype=dtype).view(shape)


def keep_memory(limit: int | None = None) -> None:
    """Keep up to `limit` bytes of freed memory of large results for later results; `keep_memory(0)` keeps none.

    Nothing is kept until you call this function. Large results are those of 32 MB and more on a CPU, on Linux. A
    result that reuses kept memory costs no page faults, which are up to a third of the time of a large layer. The
    process holds the kept memory until `release_memory()`, or until the system needs it.

    Args:
        limit: bytes; if absent, an eighth of the machine's memory, at most 2 GiB.

    Raises:
        ConfigError: for a negative limit.

    Example:

        >>> from structconv import keep_memory
        >>> keep_memory(256 << 20)                  # at most 256 MiB; keep_memory() chooses by the machine's memory
        >>> keep_memory(0)                          # as at the start: keeps none
    """
    if limit is not None and limit < 0:
        raise ConfigError("keep_memory", "limit must be at least 0", limit)
    _reserved.limit = _usual_limit() if limit is None else limit
    if reserved_memory() > _reserved.limit:
        release_memory()


def release_memory() -> None:
    """Give the kept memory back to the system.

    Example:

        >>> from structconv.primitives.memory import release_memory, reserved_memory
        >>> release_memory()
        >>> reserved_memory()
        0
    """
    _reserved.blocks.clear()


def reserved_memory() -> int:
    """Bytes of freed memory that are kept for later results.

    Example:

        >>> from structconv.primitives.memory import keep_memory, reserved_memory
        >>> keep_memory(0)                                         # the default: nothing is kept
        >>> reserved_memory()
        0
    """
    return sum(size * len(blocks) for size, blocks in list(_reserved.blocks.items()))


class _Reserved:
    """Free blocks by size. Python makes each step on the lists atomic, so a block has one owner at any time."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[_Block]] = {}
        self.limit = 0


def _usual_limit() -> int:
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
    return min(memory // _SHARE_RESERVED, _MOST_RESERVED)


def _acquire(size: int) -> _Block:
    try:
        return _reserved.blocks[size].pop()
    except (KeyError, IndexError):
        return _mapped(size)


def _mapped(size: int) -> _Block:
    mapping = mmap.mmap(-1, size + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = -ctypes.addressof(ctypes.c_char.from_buffer(mapping)) % _PAGE
    mapping.madvise(mmap.MADV_HUGEPAGE, start, size)
    return _Block(mapping, start, size)


def _give_back(block: _Block) -> None:
    """Called when the last tensor on the block is gone; a block that is not kept is unmapped with its last name."""
    if reserved_memory() + block.size > _reserved.limit:
        release_memory()
    if block.size <= _reserved.limit:
        block.mapping.madvise(mmap.MADV_FREE, block.start, block.size)
        _reserved.blocks.setdefault(block.size, []).append(block)


_reserved = _Reserved()
