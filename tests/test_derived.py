"""`derived`: remembered, forgotten with its owner, rebuilt after a change in place, built outside of every mode."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch._subclasses.fake_tensor import FakeTensorMode

from structconv import derived as derivation
from structconv import torch_compat as private
from structconv.derived import derived, forget
from structconv.mechanisms import ALiBi, DotProduct, RelativeBias
from structconv.nn import Conv
from structconv.structures import EdgeSupport, Graph, KnowledgeGraph, Padding


class Counter:
    def __init__(self):
        self.calls = 0

    def __call__(self):
        self.calls += 1
        return self.calls


def pair():
    return torch.tensor([[0], [1]])


def test_what_torch_does_not_count_is_told():
    graph, build = Graph(pair(), num_nodes=2), Counter()
    derived(graph, "a", build)
    graph.edge_index.data.zero_()
    graph.changed()
    assert derived(graph, "a", build) == 2
    forget((graph.edge_index,))
    assert derived(graph, "a", build) == 3


@pytest.mark.parametrize("structure", [
    lambda: KnowledgeGraph(torch.tensor([[0, 0, 1]]), 2, ["r"]), lambda: Padding(torch.tensor([True, False])),
    lambda: EdgeSupport(Graph(pair(), num_nodes=2)) & ~Padding(torch.tensor([True, False]))],
    ids=["knowledge graph", "mask", "masks of masks"])
def test_every_structure_is_told_of_unseen_writes(structure):
    one, build = structure(), Counter()
    assert [derived(one, "a", build), derived(one, "a", build)] == [1, 1]
    one.changed()
    assert derived(one, "a", build) == 2


def in_inference_mode(build):
    with torch.inference_mode():
        return build()


def in_fake_mode(build):
    with FakeTensorMode():
        return build()


def in_vmap(build):
    actual = []
    torch.func.vmap(lambda x: (actual.append(build()), x)[1])(torch.ones(3))
    return actual[0]


def in_jvp(build):
    actual = []
    torch.func.jvp(lambda x: (actual.append(build()), x)[1], (torch.ones(3),), (torch.ones(3),))
    return actual[0]


def in_grad(build):
    actual = []
    torch.func.grad(lambda x: (actual.append(build()), x)[1])(torch.tensor(1.0))
    return actual[0]


def in_dual_level(build):
    with forward.dual_level():
        return build()


def in_autocast(build):
    with torch.autocast("cpu", torch.bfloat16):
        return build()


def on_meta(build):
    with torch.device("meta"):
        return build()


MODES = [in_inference_mode, in_fake_mode, in_vmap, in_jvp, in_grad, in_dual_level, in_autocast, on_meta]


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
def test_what_is_derived_is_free_of_the_mode_of_its_first_caller(mode, public, monkeypatch):
    if public:
        monkeypatch.setattr(private, "no_transforms", None)
    owner = torch.eye(2)
    actual = mode(lambda: derived(owner, "product", lambda: owner @ owner + torch.zeros(2, 2)))
    assert not actual.is_inference() and not private.is_wrapped(actual) and not actual.is_meta
    assert actual.dtype == torch.float32 and torch.equal(actual, torch.eye(2))
    assert derived(owner, "product", Counter()) is actual


def test_an_error_in_another_thread_is_raised(monkeypatch):
    monkeypatch.setattr(private, "no_transforms", None)

    def fail():
        raise ValueError("no")

    with torch.inference_mode(), pytest.raises(ValueError, match="no"):
        derived(torch.zeros(1), "a", fail)


def test_memo_dies_with_its_owner():
    graph = Graph(torch.tensor([[0, 1], [1, 0]]), num_nodes=2)
    looped = graph.with_self_loops()
    graph.reversed().by_target()
    watched = [weakref.ref(graph), weakref.ref(looped)]
    gc.collect()
    before = len(derivation._ENTRIES)
    del graph, looped
    gc.collect()
    assert [ref() for ref in watched] == [None, None] and len(derivation._ENTRIES) < before


def test_a_value_must_not_hold_its_owner():
    owner = torch.zeros(2)
    with pytest.raises(AssertionError, match="owner"):
        derived(owner, "itself", lambda: [owner])


@pytest.mark.parametrize("bias", [RelativeBias(4), RelativeBias(4, buckets="log"), ALiBi()])
def test_what_a_bias_keeps_does_not_grow_with_the_lengths_that_were_seen(bias):
    def numbers():
        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor)

    layer = Conv((DotProduct(2, 4).scaled() + bias).softmax(), 8, 8)
    actual = []
    with torch.no_grad():
        for lengths in (range(98, 101), range(101, 111)):  # of one class of sizes
            for length in lengths:
                layer(torch.zeros(1, length, 8), z=torch.zeros(1, 209 - length, 8))
            actual.append(numbers())
    assert actual[1] - actual[0] < 3 * 112 * 112
