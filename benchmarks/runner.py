"""Runs cases: first whether all entrants give the same numbers, then memory, then times in turns."""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import memory
from benchmarks.case import Case, Comparison, Entrant, Size
from benchmarks.records import Line
from structconv_systems.timing import Times, alternate

__all__ = ["HUGE_PAGES", "Probe", "Settings", "huge_pages", "milliseconds", "run", "timed"]

#: Read by torch's allocator once, when a process first allocates.
HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
#: Peaks below this many bytes are not compared.
_SMALL = 1 << 20
_AVAILABLE_SHARE = 0.6
#: Calls of which the middle peak counts: what an allocator keeps differs by a tenth from call to call.
_PEAKS = 3
#: The seed of the parameters, equal in all runs: if one of millions of scores lies within rounding of a kink, as in
#: leaky ReLU, gradients differ by more than the tolerance.
_SEED = 0
#: How many more times a line below 1 is measured, with new tensors and layers, and beside them the peer against a copy
#: of itself: their place in memory changes a ratio by 1 to 4 %, even between two copies of one layer.
_ANEW = 4
#: The suite whose inputs are so small that only overheads are left.
_TINY = "dispatch"
#: The name of a comparison's parts together.
_PARTS = "its parts"

Work = Callable[[], Sequence[Tensor]]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run measures.

    Args:
        quick: smaller sizes and fewer samples, headline cases only.
        repeats: rounds; by default 5 in a quick run, else 9.
        seconds: about how long the rounds of one phase of a case may last; by default 1 in a quick run, else 60.
    """

    quick: bool = False
    repeats: int | None = None
    seconds: float | None = None

    @property
    def rounds(self) -> int:
        """Samples of each entrant."""
        return self.repeats or (5 if self.quick else 9)

    @property
    def limit(self) -> float:
        """Seconds for one phase of a case."""
        return self.seconds or (1.0 if self.quick else 60.0)

    def size(self, edges: int | None = None) -> Size:
        """The setting for which cases are built."""
        return Size(quick=self.quick, edges=edges)


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A case that makes its lines itself, where there is no comparison of layers."""

    suite: str
    name: str
    measure: Callable[[Settings], Iterator[Line]]
    headline: bool = True
    swept: bool = field(default=False, init=False)


def huge_pages() -> bool:
    """Return True if this process puts tensors on transparent huge pages."""
    return os.environ.get(HUGE_PAGES) == "1"


def run(case: Case | Probe, settings: Settings, edges: int | None = None) -> Iterator[Line]:
    """The lines of one case; `edges` asks for that size of a swept case."""
    gc.collect()
    if isinstance(case, Probe):
        yield from case.measure(settings)
        return
    torch.manual_seed(_SEED)
    comparison = case.build(settings.size(edges))
    upstream = _upstream(comparison.ours)
    for phase in comparison.ours.phases:
        for line in _phase(case, comparison, phase, upstream, settings):
            if line.ratio is not None and line.ratio < 1 and line.max_error is not None:
                anew = [_ratios_anew(case, settings, edges, phase, upstream, line.peer) for _ in range(_ANEW)]
                of_ours, of_itself = map(list, zip(*anew, strict=True))
                line = replace(line, extra={**line.extra, "anew": of_ours, "itself": of_itself})
            if edges is not None and line.ours_ms is not None:
                line = replace(line, extra={**line.extra, "ns_per_edge": 1e6 * line.ours_ms[1] / (line.edges or edges)})
            yield line


def _ratios_anew(case: Case, settings: Settings, edges: int | None, phase: str, upstream: Tensor, peer: str | None
                 ) -> tuple[float, float]:
    """The ratio of the same comparison with new tensors and layers, and that of the peer to a copy of itself."""
    torch.manual_seed(_SEED)
    comparison = case.build(settings.size(edges))
    works = {entrant.name: entrant.work(phase, upstream) for entrant in (comparison.ours, *comparison.peers)
             if entrant.name in (comparison.ours.name, peer)}
    copy = next(entrant for entrant in case.build(settings.size(edges)).peers if entrant.name == peer)
    works["itself"] = copy.work(phase, upstream)
    times = alternate(works, repeats=settings.rounds, seconds=settings.limit)
    of_peer = times[str(peer)].median
    return of_peer / times[comparison.ours.name].median, of_peer / times["itself"].median


def _noting(once: dict[str, float], name: str, work: Work) -> Sequence[Tensor]:
    """Return the result of `work` and note its seconds."""
    start = time.perf_counter()
    result = work()
    once[name] = time.perf_counter() - start
    return result


def _phase(case: Case, comparison: Comparison, phase: str, upstream: Tensor, settings: Settings) -> Iterator[Line]:
    def line(peer: str | None, **fields: Any) -> Line:
        return Line(suite=case.suite, case=case.name, group=case.group, phase=phase, peer=peer, size=comparison.size,
                    edges=comparison.edges, huge_pages=huge_pages(), **fields)

    ours = comparison.ours.work(phase, upstream)
    reference = [tensor.clone() for tensor in _compared(ours(), comparison.ours)]
    works: dict[str, Work] = {"ours": ours}
    errors: dict[str, float | None] = {}
    for peer in comparison.peers:
        if phase not in peer.phases or (peer.full_only and settings.quick):
            continue
        if peer.needs > _AVAILABLE_SHARE * memory.available():
            yield line(peer.name, note=f"left out: it needs about {peer.needs / 1e9:.0f} GB")
            continue
        work = peer.work(phase, upstream)
        error, complaint = _agreement(reference, work, peer, comparison.tolerance)
        if complaint:
            yield line(peer.name, note=complaint, max_error=error, failed=True)
        else:
            works[peer.name], errors[peer.name] = work, error or 0.0
    del reference
    if comparison.parts:
        parts = [part.work(phase, upstream) for part in comparison.parts]
        works[_PARTS], errors[_PARTS] = lambda: [tensor for part in parts for tensor in part()], None
    peaks: dict[str, int] = {}
    once: dict[str, float] = {}
    for name, work in works.items():
        peaks[name] = statistics.median_low(memory.peak(partial(_noting, once, name, work)) for _ in range(_PEAKS))
    memory.keep_freed()
    times = alternate(works, repeats=settings.rounds, seconds=settings.limit, known=once)
    least = comparison.least.get(phase)
    fraction = None if least is None or case.suite == _TINY else least.seconds() / times["ours"].median
    rivals: list[str | None] = [*errors] or [None]
    for rival in rivals:
        yield line(rival, roofline=fraction, max_error=None if rival is None else errors[rival],
                   overhead_us=_overhead(case, times, rival), **_measured(times, peaks, rival))


def _measured(times: dict[str, Times], peaks: dict[str, int], peer: str | None) -> dict[str, Any]:
    own = times["ours"]
    fields = timed(own) | {"ours_peak_mb": peaks["ours"] / 1e6, "memory_method": memory.method()}
    if peer is not None:
        large = max(peaks["ours"], peaks[peer]) > _SMALL and peaks[peer] > 0
        fields |= {"peer_ms": milliseconds(times[peer]), "peer_peak_mb": peaks[peer] / 1e6,
                   "ratio": times[peer].median / own.median,
                   "memory_ratio": peaks["ours"] / peaks[peer] if large else None,
                   "extra": {"ratio_of_minima": min(times[peer].samples) / min(own.samples)}}
    return fields


def _overhead(case: Case, times: dict[str, Times], peer: str | None) -> float | None:
    if case.suite != _TINY or peer is None:
        return None
    return 1e6 * (times["ours"].median - times[peer].median)


def milliseconds(times: Times) -> tuple[float, float, float]:
    """The first quartile, the median and the third quartile."""
    low, high = times.quartiles
    return 1e3 * low, 1e3 * times.median, 1e3 * high


def timed(times: Times) -> dict[str, Any]:
    """The fields of a line that tell how long ours took."""
    return {"ours_ms": milliseconds(times), "rounds": len(times.samples), "repeated": times.repeated,
            "other_load": times.other_load}


def _upstream(ours: Entrant) -> Tensor:
    """A gradient of y, the same for every entrant."""
    with torch.no_grad():
        y = ours.run()
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y)


def _compared(results: Sequence[Tensor], entrant: Entrant) -> Sequence[Tensor]:
    """y and the gradients of the inputs."""
    return results[:1 + len(entrant.inputs)]


def _agreement(reference: Sequence[Tensor], work: Work, peer: Entrant,
               tolerance: float) -> tuple[float | None, str]:
    """The largest error and, where the peer stops or disagrees, a complaint."""
    try:
        results = _compared(work(), peer)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, MemoryError) as stopped:
        words = " ".join(str(stopped).split())
        return None, f"{type(stopped).__name__}: {words[:160]}"
    if [tuple(t.shape) for t in results] != [tuple(t.shape) for t in reference]:
        return None, f"shapes differ: {[tuple(t.shape) for t in results]} and {[tuple(t.shape) for t in reference]}"
    error = max(_distance(a, b) for a, b in zip(reference, results, strict=True))
    return error, "" if error <= tolerance else f"disagrees by {error:.1e}"


def _distance(ours: Tensor, peers: Tensor) -> float:
    """max |a - b| / max |b|; infinite where a number is none."""
    if not peers.numel():
        return 0.0
    error = float((ours - peers).abs().max() / peers.abs().max().clamp(min=1e-30))
    return error if error == error else float("inf")
