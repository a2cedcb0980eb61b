"""Calls of src/sampler.cpp: neighbors of nodes, and numbers of keys. The caller has checked dtypes and strides."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from structconv.primitives.native.calls import pointer
from structconv.primitives.native.interface import Struct, constants, integers, pointers
from structconv.primitives.native.loader import Core

__all__ = ["InEdges", "bounds", "draw", "number"]

_EDGES = Struct("InEdges", pointers("indptr index order edge_times node_times weights"), integers("wide nodes slots"))
_BOUNDS = Struct("SampleBoundsArgs", _EDGES.named("edges"), pointers("nodes limits"),
                 integers("count fanout replace last"), pointers("first population offsets bad"))
_DRAW = Struct("SampleDrawArgs", _EDGES.named("edges"), pointers("nodes groups first population offsets"),
               integers("count fanout replace seed relation base threads"), pointers("sources numbers targets"))
_NUMBER = Struct("NumberArgs", pointers("table keys"), integers("wide capacity count next numbering"),
                 pointers("numbers fresh added"))
ENTER, ADD, FIND = constants(kEnter=0, kAdd=1, kFind=2)


class InEdges(NamedTuple):
    """Edges by target: node n owns the slots indptr[n] to indptr[n + 1].

    Args:
        indptr: (N + 1,), int32 or int64, contiguous, as are all others.
        sources: (E,), of the dtype of `indptr`: where the edge of each slot begins.
        order: (E,), of this dtype: which edge it is; `None`: slot s is edge s.
        edge_times: (E,) int64, by slot; `node_times`: (M,) int64, of the nodes where edges begin. The times of the
            edges of a node rise with its slots.
        weights: (E,) float64, by slot, finite and not negative.
    """

    indptr: Tensor
    sources: Tensor
    order: Tensor | None = None
    edge_times: Tensor | None = None
    node_times: Tensor | None = None
    weights: Tensor | None = None

    @property
    def num_nodes(self) -> int:
        """N."""
        return self.indptr.shape[0] - 1


def _packed(edges: InEdges) -> tuple[int, ...]:
    return (*map(pointer, edges), edges.indptr.dtype is torch.int64, edges.num_nodes, edges.sources.shape[0])


def bounds(core: Core, edges: InEdges, nodes: Tensor, limits: Tensor | None, fanout: int, replace: bool, last: bool
           ) -> tuple[Tensor, Tensor, Tensor, int]:
    """First slot and number of slots of each node, (n,), where its draws begin, (n + 1,), and the first wrong node."""
    count = nodes.shape[0]
    first, population, offsets = (nodes.new_empty(size) for size in (count, count, count + 1))
    bad = ctypes.c_int64()
    core.sample_bounds(_BOUNDS.pack(*_packed(edges), nodes.data_ptr(), pointer(limits), count, fanout, replace, last,
                                    first.data_ptr(), population.data_ptr(), offsets.data_ptr(),
                                    ctypes.addressof(bad)))
    return first, population, offsets, bad.value


def draw(core: Core, edges: InEdges, nodes: Tensor, groups: Tensor | None, found: tuple[Tensor, Tensor, Tensor],
         fanout: int, replace: bool, seed: int, relation: int, base: int) -> tuple[Tensor, Tensor, Tensor]:
    """Source, number and target of each edge that is drawn."""
    first, population, offsets = found
    sources, numbers, targets = (nodes.new_empty(int(offsets[-1])) for _ in range(3))
    core.sample_draw(_DRAW.pack(*_packed(edges), nodes.data_ptr(), pointer(groups), first.data_ptr(),
                                population.data_ptr(), offsets.data_ptr(), nodes.shape[0], fanout, replace, seed,
                                relation, base, torch.get_num_threads(), sources.data_ptr(), numbers.data_ptr(),
                                targets.data_ptr()))
    return sources, numbers, targets


def number(core: Core, table: Tensor, keys: Tensor, following: int, numbering: int) -> tuple[Tensor, Tensor]:
    """Numbers of keys, and the keys that had none; see `Numbering` in src/api.h."""
    count = keys.shape[0]
    numbers = keys.new_empty(0 if numbering == ENTER else count)
    fresh = keys.new_empty(count if numbering == ADD else 0)
    added = ctypes.c_int64()
    core.number(_NUMBER.pack(table.data_ptr(), keys.data_ptr(), table.shape[1] > 1, table.shape[0],
                             count, following, numbering,
                             numbers.data_ptr(), fresh.data_ptr(), ctypes.addressof(added)))
    return numbers, fresh[:added.value]
