"""The cost of a call beside the arithmetic: layers on the smallest inputs, new graphs, and plan lookups."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.case import FORWARD, Case, Comparison, Size, entrant
from benchmarks.records import Line
from benchmarks.runner import Probe, Settings, huge_pages
from benchmarks.suites.attention import build_multihead
from benchmarks.suites.expressions import build_alibi, build_mixed, build_own, build_relative_bias
from benchmarks.suites.graph import build_gat, build_gcn
from benchmarks.suites.graph_peers import copied, leaf
from benchmarks.suites.grid import build_conv2d
from benchmarks.suites.new_graphs import build_new_graphs
from structconv.bases import Identity as IdentityBasis
from structconv.bases.shift import Shift
from structconv.mechanisms import Identity
from structconv.nn import Conv
from structconv.planning.plan import plan_for
from structconv.planning.problem import Call
from structconv.structures import Graph, Grid
from structconv.weights import Full
from structconv_systems.timing import alternate

__all__ = ["CASES"]


def _ring(nodes: int = 8) -> Graph:
    position = torch.arange(nodes)
    return Graph(torch.stack([position, (position + 1) % nodes]), num_nodes=nodes)


def _linear(size: Size) -> Comparison:
    """A layer over the identity, which is torch's linear layer."""
    ours: Any = Conv(Identity(), 8, 8)
    module = nn.Linear(8, 8)
    copied(module.weight, ours.weight.theta[0].mT, module.bias)
    x, x_peer = leaf(8, 8), leaf(8, 8)
    return Comparison(ours=entrant("ours", ours, lambda: ours(x), x), size="8 entries, 8 to 8",
                      peers=(entrant("torch linear", module, lambda: module(x_peer), x_peer),))


def _lookup(kind: str, settings: Settings) -> Iterator[Line]:
    """Finding a plan that was made before, next to one addition of two numbers."""
    basis, number = _bases()[kind], torch.ones(())
    x, theta = torch.ones(basis.num_inputs, 8), Full.of(torch.ones(basis.size, 8, 8))
    call = Call(x, basis, theta)
    works: dict[str, Callable[[], object]] = {"ours": lambda: plan_for(call),
                                              "torch.add": lambda: torch.add(number, number)}
    works["ours"]()  # the first plan of a process measures the machine
    times = alternate(works, repeats=settings.rounds, seconds=settings.limit)
    own, add = times["ours"], times["torch.add"]
    yield Line(suite="dispatch", case=f"plan-lookup-{kind}", phase=FORWARD, peer="torch.add", size="remembered",
               ratio=add.median / own.median, ours_ms=_milliseconds(own.quartiles, own.median),
               peer_ms=_milliseconds(add.quartiles, add.median), rounds=len(own.samples), repeated=own.repeated,
               other_load=own.other_load, huge_pages=huge_pages(), extra={"lookup_us": 1e6 * own.median})


def _bases() -> dict[str, IdentityBasis | Shift]:
    return {"identity": IdentityBasis(8), "shift": Shift(Grid((8, 8)), ((0, 0), (0, 1), (1, 0)))}


def _milliseconds(quartiles: tuple[float, float], median: float) -> tuple[float, float, float]:
    return 1e3 * quartiles[0], 1e3 * median, 1e3 * quartiles[1]


CASES = (
    Probe(suite="dispatch", name="plan-lookup-identity", measure=partial(_lookup, "identity")),
    Probe(suite="dispatch", name="plan-lookup-shift", measure=partial(_lookup, "shift")),
    Case(suite="dispatch", name="linear", build=_linear),
    Case(suite="dispatch", name="conv2d", build=lambda size: build_conv2d(1, 4, 4, 8, kernel_size=3, padding=1)),
    Case(suite="dispatch", name="gcn", build=lambda size: build_gcn(_ring(), 8, 8, uncached=True)),
    Case(suite="dispatch", name="gat", build=lambda size: build_gat(_ring(), 8, 2, 4)),
    Case(suite="dispatch", name="multihead", build=lambda size: build_multihead(1, 8, 8, 2)),
    Case(suite="dispatch", name="attention-beside-shifts", build=lambda size: build_mixed()),
    Case(suite="dispatch", name="alibi", build=lambda size: build_alibi()),
    Case(suite="dispatch", name="relative-bias", build=lambda size: build_relative_bias()),
    Case(suite="dispatch", name="own-mechanism", build=lambda size: build_own()),
    Case(suite="dispatch", name="gcn-new-graphs", build=lambda size: build_new_graphs("gcn", 64)),
    Case(suite="dispatch", name="gat-new-graphs", build=lambda size: build_new_graphs("gat", 64)),
)
