"""Autotuning: paths with similar predicted costs are timed once for each class of shapes, and remembered.

Measurements are stored in memory and in `plans.json` of the user's cache folder. Their key is the machine, the versions
of torch and of this library, and the sizes of the problem: exact channels and K, and sizes of bases and batches rounded
up to a power of two. Nothing is timed while a program is traced.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.files import cache_folder, read_json, write_json
from structconv.planning.problem import Call, Run
from structconv.structures.values import map_tensors

__all__ = ["ENTRIES", "LIMIT", "LONG_SECONDS", "ROUNDS", "SAMPLE_SECONDS", "Autotuning", "Seconds", "autotune",
           "may_time", "measured"]

#: Paths predicted to take more than this many times the cheapest are not timed.
LIMIT = 3.0
#: Entries of one environment that the file keeps, the newest.
ENTRIES = 5000
ROUNDS, SAMPLE_SECONDS, LONG_SECONDS = 5, 2e-4, 0.2

Seconds = dict[str, float]
_MEASURED: dict[str, dict[str, Seconds]] = {}


class Autotuning:
    """The setting of the process, and the context in which `autotune` gave it another value."""

    enabled: bool = os.environ.get("STRUCTCONV_AUTOTUNE", "0") not in ("", "0")

    def __init__(self, enabled: bool) -> None:
        self._before, Autotuning.enabled = Autotuning.enabled, bool(enabled)

    def __enter__(self) -> Autotuning:
        return self

    def __exit__(self, *_: object) -> None:
        Autotuning.enabled = self._before


def autotune(enabled: bool = True) -> Autotuning:
    """Time the paths within three times the predicted cheapest once per class of shapes, and take the fastest.

    A function and a context manager::

        structconv.planning.autotune(True)         # from now on
        with structconv.planning.autotune():       # in this block
            layer(x)

    Off by default, unless the environment has STRUCTCONV_AUTOTUNE=1. The first call with new sizes runs each candidate
    several times, forward, and backward if a gradient is required, on detached tensors; the caller's gradients and
    random numbers do not change. Nothing is timed while `torch.compile` or `torch.export` trace. The setting holds for
    the process, not for a thread.

    Example:

        >>> from structconv import Conv, Cuboid, Grid
        >>> from structconv.planning import autotune
        >>> layer, x, grid = Conv(Cuboid((3, 3)), 16, 16), torch.randn(100, 16), Grid((10, 10))
        >>> with autotune(False):
        ...     print(layer.plan(x, structure=grid).measured)
        None
    """
    return Autotuning(enabled)


def measured(runs: dict[str, Run], call: Call, key: Hashable) -> Seconds:
    """The seconds of each of these runs for this class of problems, remembered or timed now on `call`; empty if timing
    is not possible."""
    digest = hashlib.sha256(repr(_written(key)).encode()).hexdigest()[:32]
    path, environment = _file(), _environment(call.x.device, torch.get_num_threads())
    known = _known(environment).get(digest, {})
    if all(name in known for name in runs):
        return known
    if not may_time(call.x):
        return {}
    result = {**known, **_timed(runs, call)}
    _known(environment)[digest] = result
    _remember(path, environment, digest, result)
    return result


def _written(key: Any) -> Any:
    """The key without addresses, so that it is the same in every process: functions and types by their names."""
    if isinstance(key, tuple | list):
        return tuple(map(_written, key))
    if isinstance(key, frozenset):
        return sorted(repr(_written(part)) for part in key)
    name = getattr(key, "__qualname__", None)
    return key if name is None else f"{key.__module__}.{name}"


def may_time(x: Tensor) -> bool:
    """Return True if operators on x compute values: no tracer, no dispatch mode, no functional transform."""
    return (not torch.compiler.is_compiling() and type(x) in (Tensor, torch.nn.Parameter) and not x.is_meta
            and x.numel() > 0 and not private.dispatch_modes() and not private.function_modes()
            and not private.transforms_active() and not torch.jit.is_tracing())


def _timed(runs: dict[str, Run], call: Call) -> Seconds:
    """The median of a few rounds over all paths in turn; one that fails, for example without memory, takes forever."""
    x = call.x
    wait = torch.cuda.synchronize if x.is_cuda else (lambda: None)
    times: dict[str, list[float]] = {}
    with torch.random.fork_rng([x.device] if x.is_cuda else []):
        work = {name: _work(run, call) for name, run in runs.items()}
        for _ in range(2):  # the first run sorts edges, compiles and fills caches
            first = {name: _seconds(run, wait, 1) for name, run in work.items()}
        repeats = {name: max(1, int(SAMPLE_SECONDS / max(elapsed, 1e-7))) for name, elapsed in first.items()}
        for _ in range(ROUNDS if max(first.values()) < LONG_SECONDS else 1):
            for name, run in work.items():
                times.setdefault(name, []).append(_seconds(run, wait, repeats[name]))
    return {name: statistics.median(samples) for name, samples in times.items()}


def _seconds(run: Callable[[], None], wait: Callable[[], None], repeats: int) -> float:
    wait()
    start = time.perf_counter()
    try:
        for _ in range(repeats):
            run()
        wait()
    except (RuntimeError, MemoryError):
        return float("inf")
    return (time.perf_counter() - start) / repeats


def _work(run: Run, call: Call) -> Callable[[], None]:
    """A function that runs the path on copies of the tensors, and computes their gradients if they require any."""
    arguments: tuple[Any, ...] = call.x, call.basis, call.theta, call.bias, call.projected, call.relative
    leaves: list[Tensor] = []
    if torch.is_grad_enabled():
        copies: dict[int, Tensor] = {}
        arguments = map_tensors(arguments, lambda t: copies.setdefault(
            id(t), t.detach().requires_grad_() if t.requires_grad else t))
        leaves = [t for t in copies.values() if t.requires_grad]
    x, basis, theta, bias, projected, relative = arguments
    own = Call(x, basis, theta, bias, projected, relative, call.output_positions, part=call.part)

    def forward() -> None:
        with torch.no_grad():
            run(own)

    def both() -> None:
        y = run(own)
        torch.autograd.grad(y, leaves, torch.ones_like(y), allow_unused=True)

    return both if leaves else forward


# -- memory -------------------------------------------------------------------------------------------------------

@functools.cache
def _environment(device: torch.device, threads: int) -> str:
    """The machine and the versions for which a measurement holds."""
    if device.type == "cuda":
        where = torch.cuda.get_device_name(device)
    else:
        where = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {threads} threads"
    return (f"{platform.node()}, {where}, torch {torch.__version__}, "
            f"structconv {importlib.metadata.version('structconv')}")


def _known(environment: str) -> dict[str, Seconds]:
    """Return the measurements of this environment, read from the file once for each folder."""
    path = _file()
    known = _MEASURED.get(f"{path} {environment}")
    if known is None:
        known = _MEASURED[f"{path} {environment}"] = _valid(_stored(path).get(environment))
    return known


def _file() -> Path:
    return cache_folder() / "plans.json"


def _stored(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"structconv: {path} cannot be read ({error}); measured plans start again", RuntimeWarning,
                      stacklevel=2)
        return {}


def _valid(entries: Any) -> dict[str, Seconds]:
    """The well-formed entries of a file."""
    if not isinstance(entries, dict):
        return {}
    return {digest: seconds for digest, seconds in entries.items() if isinstance(seconds, dict)
            and all(isinstance(elapsed, int | float) and elapsed > 0 for elapsed in seconds.values())}


def _remember(path: Path, environment: str, digest: str, seconds: Seconds) -> None:
    """Add an entry to the file, where other processes may have added theirs."""
    finite = {name: time for name, time in seconds.items() if time < float("inf")}
    stored = _stored(path)
    entries = {**_valid(stored.get(environment)), digest: finite}
    stored[environment] = dict(list(entries.items())[-ENTRIES:])
    try:
        write_json(path, stored)
    except OSError as error:
        warnings.warn(f"structconv: {path} cannot be written ({error}); measured plans last for this process",
                      RuntimeWarning, stacklevel=2)
