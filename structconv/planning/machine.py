"""The rates of the machine, measured on demand and stored in the user's cache folder.

Nothing is measured unless `measure` is called; until then the planner uses typical rates, which rank paths the same
way on most machines.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from structconv.errors import ConfigError
from structconv.files import cache_folder, read_json, write_json

__all__ = ["TYPICAL", "Machine", "cache_folder", "load", "measure", "rates"]


@dataclass(frozen=True)
class Machine:
    """Rates of one device.

    Args:
        gflops: float32 matrix products, in GFLOP/s.
        copy_gbs: streamed bytes, read plus written, in GB/s.
        gather_gbs: bytes of 256-byte rows read at random indices, in GB/s.
        name: the device.
        call_us: microseconds that an operator takes before it computes.

    Example:

        >>> from structconv.planning import Cost, Machine
        >>> slow, fast = (Machine(gflops, copy_gbs=20, gather_gbs=10) for gflops in (50, 500))
        >>> Cost(flops=1e9).seconds(slow) / Cost(flops=1e9).seconds(fast)
        10.0
    """

    gflops: float
    copy_gbs: float
    gather_gbs: float
    name: str = "typical"
    call_us: float = 3.0


class Measured:
    """Count the measurements of a device in this process; earlier plans used other rates."""

    times = 0


TYPICAL = {"cpu": Machine(150.0, 40.0, 15.0), "cuda": Machine(50_000.0, 2_000.0, 800.0)}
_KNOWN: dict[str, Machine] = {}


def rates(device: torch.device | str = "cpu") -> Machine:
    """The device's rates: as measured and stored, else typical. O(1) after the first call; measures nothing. While
    `torch.compile` or `torch.export` trace, they are the typical ones: a program depends on no cache."""
    kind = torch.device(device).type
    typical = TYPICAL.get(kind, TYPICAL["cpu"])
    if torch.compiler.is_compiling():
        return typical
    known = _KNOWN.get(kind)
    if known is None:
        known = _KNOWN[kind] = load(kind) or typical
    return known


def load(kind: str = "cpu") -> Machine | None:
    """The stored rates of a kind of device; `None` if there are none that can be read."""
    try:
        result = Machine(**read_json(_file())[kind])
        valid = all(value > 0 for value in (result.gflops, result.copy_gbs, result.gather_gbs, result.call_us))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if valid else None


def measure(device: torch.device | str = "cpu", seconds: float = 0.5) -> Machine:
    """Measure the device, store the rates, and use them from now on. Takes about four times `seconds`.

    The rates are stored in the cache folder ($STRUCTCONV_CACHE, or ~/.cache/structconv) and read by later processes.

    Raises:
        ConfigError: if `seconds` is not positive.

    Example: `measure()` measures the CPU, as `structconv doctor --measure` does.

        >>> from structconv.planning import measure
        >>> measure("cpu", seconds=0)
        Traceback (most recent call last):
        structconv.errors.ConfigError: measure: seconds must be positive; got 0.
    """
    if not seconds > 0:
        raise ConfigError("measure", "seconds must be positive", seconds)
    device = torch.device(device)
    result = Machine(_matmul_gflops(device, seconds), _copy_gbs(device, seconds), _gather_gbs(device, seconds),
                    _name(device), _call_us(device, seconds))
    _store(device.type, result)
    _KNOWN[device.type] = result
    Measured.times += 1
    return result


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"


def _matmul_gflops(device: torch.device, seconds: float) -> float:
    size = 1024
    a = torch.ones(size, size, device=device)
    out = torch.empty_like(a)
    return 2 * size**3 / _best(lambda: torch.mm(a, a, out=out), device, seconds) * 1e-9


def _copy_gbs(device: torch.device, seconds: float) -> float:
    source = torch.ones(1 << 24, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device, seconds) * 1e-9


def _gather_gbs(device: torch.device, seconds: float) -> float:
    table = torch.ones(1 << 18, 64, device=device)
    generator = torch.Generator(device).manual_seed(0)
    index = torch.randint(0, table.shape[0], (1 << 18,), device=device, generator=generator)
    out = torch.empty_like(table)
    return table.nbytes / _best(lambda: torch.index_select(table, 0, index, out=out), device, seconds) * 1e-9


def _call_us(device: torch.device, seconds: float) -> float:
    a = torch.ones(4, 4, device=device)

    def calls() -> None:
        for _ in range(100):
            torch.mm(a, a.t())

    return 1e4 * _best(calls, device, seconds)


def _best(work: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest of the runs that fit into `seconds`, at least three."""
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    best, runs, end = float("inf"), 0, time.perf_counter() + seconds
    while runs < 3 or time.perf_counter() < end:
        wait()
        start = time.perf_counter()
        work()
        wait()
        best, runs = min(best, time.perf_counter() - start), runs + 1
    return best


def _file() -> Path:
    return cache_folder() / "machine.json"


def _store(kind: str, machine: Machine) -> None:
    """Add the rates of one kind of device to the file; one that cannot be read is replaced."""
    path = _file()
    try:
        stored = read_json(path)
    except (OSError, ValueError):
        stored = {}
    write_json(path, {**stored, kind: dataclasses.asdict(machine)})
