"""`derived`: remembered, forgotten with its owner, rebuilt after a change in place."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from structconv.structures import Graph, derived
from structconv.structures.cache import _MEMOS


class Counter:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls


@pytest.mark.parametrize("owner", [torch.arange(3), Graph(torch.tensor([[0], [1]]))])
def test_built_once_for_each_key(owner):
    build = Counter()
    assert [derived(owner, "a", build), derived(owner, "a", build), derived(owner, ("a", 1), build)] == [1, 1, 2]


def test_owners_are_told_apart_by_identity():
    first, second, build = torch.zeros(2), torch.zeros(2), Counter()
    assert derived(first, "a", build) != derived(second, "a", build)


def test_a_change_in_place_is_seen():
    index, build = torch.tensor([[0], [1]]), Counter()
    graph = Graph(index, num_nodes=2)
    derived(graph, "a", build)
    index[1, 0] = 0
    assert derived(graph, "a", build) == 2 and derived(graph, "a", build) == 2


def test_nothing_is_kept_where_a_gradient_flows():
    weight, build = torch.ones(1, requires_grad=True), Counter()
    graph = Graph(torch.tensor([[0], [1]]), edge_weight=weight)
    assert [derived(graph, "a", build), derived(graph, "a", build)] == [1, 2]


def test_nothing_is_kept_of_fake_tensors():
    build = Counter()
    with FakeTensorMode():
        owner = torch.zeros(2)
        assert [derived(owner, "a", build), derived(owner, "a", build)] == [1, 2]


def test_inference_tensors():
    with torch.inference_mode():
        graph = Graph(torch.tensor([[0], [1]]), num_nodes=2)
        assert graph.by_target() is graph.by_target()


def test_memo_dies_with_its_owner():
    graph = Graph(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    looped = graph.with_self_loops()
    graph.reversed().by_target()
    watched = [weakref.ref(graph), weakref.ref(looped)]
    gc.collect()
    before = len(_MEMOS)
    del graph, looped
    gc.collect()
    assert [ref() for ref in watched] == [None, None] and len(_MEMOS) < before
