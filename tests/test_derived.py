"""`derived`: remembered, forgotten with its owner, rebuilt after a change in place, built outside of every mode."""

import gc
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward
from torch._subclasses.fake_tensor import FakeTensorMode

from structconv import ALiBi, Conv, DotProduct, RelativeBias
from structconv import derived as derivation
from structconv import torch_compat as private
from structconv.derived import derived, forget
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


def within(transform):
    """What a function builds while torch transforms another one."""
    def run(build):
        actual = []
        transform(lambda x: (actual.append(build()), x)[1])
        return actual[0]

    return run


def under(mode):
    """What a function builds in a mode."""
    def run(build):
        with mode():
            return build()

    return run


MODES = {
    "inference": under(torch.inference_mode), "fake": under(FakeTensorMode), "dual level": under(forward.dual_level),
    "autocast": under(lambda: torch.autocast("cpu", torch.bfloat16)), "meta": under(lambda: torch.device("meta")),
    "vmap": within(lambda fn: torch.func.vmap(fn)(torch.ones(3))),
    "jvp": within(lambda fn: torch.func.jvp(fn, (torch.ones(3),), (torch.ones(3),))),
    "grad": within(lambda fn: torch.func.grad(fn)(torch.tensor(1.0)))}


@pytest.mark.parametrize("public", [False, True])
@pytest.mark.parametrize("mode", MODES.values(), ids=list(MODES))
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
