"""Peak memory of a piece of work: the high-water mark of the pages that the process holds, above what it held before.

It counts every allocation that is written to: torch's, and those of native kernels and of other
libraries, which a counter inside torch would miss. Linux keeps the mark and resets it on demand. Elsewhere torch's
profiler adds up the tensors that torch allocates, which is less, and is said so (`METHODS`).
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from structconv.primitives.memory import release_memory

__all__ = ["METHODS", "available", "keep_freed", "method", "peak"]

#: How a peak is found: pages of the process, or tensors allocated by torch.
METHODS = ("pages", "tensors")
_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of malloc.h
_LARGE = 128 << 10  # bytes of a block, as glibc begins with


@cache
def method() -> str:
    """Which of `METHODS` this machine allows."""
    try:
        _RESET.write_text(_RESET_PEAK)
        return METHODS[0] if {"VmHWM", "VmRSS"} <= _status().keys() else METHODS[1]
    except OSError:
        return METHODS[1]


def peak(work: Callable[[], object]) -> int:
    """Bytes that `work` holds at its highest point above what is held before, its result included.

    Run `work` once before, so that caches and workspaces that stay are not counted. Pages are counted to a few
    hundred kilobytes, so peaks below one megabyte mean little.
    """
    gc.collect()
    if method() == METHODS[1]:
        return _profiled(work)
    _trim()
    _RESET.write_text(_RESET_PEAK)
    before = _status()["VmRSS"]
    result = work()
    held = _status()["VmHWM"] - before
    del result
    return max(held, 0)


def keep_freed() -> None:
    """From now on freed blocks of less than 32 MB stay with this process, where the C library is glibc.

    It gives back what lies free at the top of its heap, and which step pays for the faults of getting it again, up to a
    sixth of the step, depends on what ran before: by chance one entrant's or another's.
    """
    _allocate(trim=2**31 - 1, mapped=32 << 20)


def _allocate(trim: int, mapped: int) -> None:
    """From how many free bytes on glibc trims its heap, and a block (of 32 MB at most) is mapped for itself."""
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_TRIM_THRESHOLD, trim)
        option(_MMAP_THRESHOLD, mapped)


def available() -> float:
    """Bytes that could still be allocated; infinite where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return float("inf")
    return next((float(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")), float("inf"))


def _status() -> dict[str, int]:
    """The fields of the process's status that are sizes, in bytes."""
    pairs = (line.partition(":")[::2] for line in _STATUS.read_text().splitlines())
    return {key: int(value.split()[0]) * 1024 for key, value in pairs if value.endswith("kB")}


def _trim() -> None:
    """Give freed memory back to the system now, and large blocks whenever they are freed: what lies free between others
    in the heap differs by a tenth from call to call."""
    release_memory()
    _allocate(trim=_LARGE, mapped=_LARGE)
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _profiled(work: Callable[[], object]) -> int:
    """The highest running sum of torch's allocations and frees."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = work()
    del result
    events = sorted((event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"),
                    key=lambda event: event.start_ns())
    held = highest = 0
    for event in events:
        held += event.nbytes()
        highest = max(highest, held)
    return highest
