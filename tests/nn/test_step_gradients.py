"""Steps of additive attention over what was prepared leave the gradients of the inputs to the end of a backward pass:
however passes follow, interrupt or contain each other, they are those of the whole call."""

import copy
import gc
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from structconv import STRUCTURE, Additive, Conv, Eye, Padding
from structconv.primitives import dense_additive
from structconv.primitives.native import core
from structconv.weights import EyeBlocks

STEPS = 5
pytestmark = pytest.mark.skipif(core() is None, reason="without native kernels no gradient is left to others")


class Decoder:
    """A layer, x and z, and the steps over x prepared once."""

    def __init__(self, lead=(3,), heads=1, dtype=torch.float32, mechanism=None, structure=None, **options):
        torch.manual_seed(0)
        scores = Additive(20, heads=heads).softmax() if mechanism is None else mechanism
        others = options.pop("others", 10)
        self.layer = Conv(scores, 12, options.pop("outputs", 6), other_channels=others, **options).to(dtype)
        self.x, self.z = (torch.randn(*lead, n, c).to(dtype).requires_grad_() for n, c in ((30, 12), (STEPS, others)))
        self.structure = structure

    @property
    def leaves(self):
        return [t for t in (self.x, self.z, *self.layer.parameters()) if t.requires_grad]

    def steps(self, cache=None):
        cache = self.layer.prepare(self.x, self.structure) if cache is None else cache
        return [self.layer(cache, z=self.z[..., t:t + 1, :]) for t in range(STEPS)]

    def reference(self, loss=lambda y: y.cos().sum()):
        return torch.autograd.grad(loss(self.layer(self.x, z=self.z, structure=self.structure)), self.leaves)


def loss_of(steps):
    return torch.cat(steps, -2).cos().sum()


def close(actual, reference, **tolerance):
    torch.testing.assert_close(actual, reference, **(tolerance or {"rtol": 1e-4, "atol": 1e-5}))


@pytest.fixture
def taken(monkeypatch):
    """How many steps have left their gradients to others."""
    seen = []
    take = dense_additive._Sums.take
    monkeypatch.setattr(dense_additive._Sums, "take", lambda *args: seen.append(1) or take(*args))
    return seen


@pytest.mark.parametrize("options", [
    {}, {"lead": ()}, {"lead": (2, 3)}, {"heads": 2}, {"lead": (), "heads": 2}, {"weight": Eye(), "outputs": 12},
    {"weight": EyeBlocks(), "heads": 2, "outputs": 12, "bias": False},
    {"mechanism": Additive(heads=2, on="projected").softmax(), "others": 12},
    {"mechanism": Additive(20, activation=torch.sigmoid).softmax()}], ids=repr)
def test_gradients_are_those_of_the_whole_call(options, taken):
    decoder = Decoder(**options)
    close(torch.autograd.grad(loss_of(decoder.steps()), decoder.leaves), decoder.reference())
    assert len(taken) == STEPS


def padded(heads=1, dtype=torch.float32):
    """A decoder of samples with padding; of one nothing exists, of one all."""
    keep = torch.arange(30) < torch.tensor([17, 0, 30]).unsqueeze(-1)
    return Decoder(heads=heads, dtype=dtype, mechanism=Additive(20, heads).masked(keep=STRUCTURE).softmax(),
                   structure=Padding(keep))


@pytest.mark.parametrize("heads", [1, 2])
def test_gradients_of_padded_samples_are_those_of_the_whole_call(heads, taken):
    decoder = padded(heads)
    steps, whole = decoder.steps(), decoder.layer(decoder.x, z=decoder.z, structure=decoder.structure)
    close([torch.cat(steps, 1)], [whole])
    close(torch.autograd.grad(loss_of(steps), decoder.leaves), decoder.reference())
    assert len(taken) == STEPS


def test_padded_samples_in_another_order():
    decoder, order = padded(), torch.tensor([2, 0, 0])
    with torch.no_grad():
        decoder.x[~decoder.structure.keep] = torch.nan
        cache = decoder.layer.prepare(decoder.x, decoder.structure)
        decoder.layer(cache, z=decoder.z[:, :1])
        actual = decoder.layer(cache.reorder(order), z=decoder.z[:, 1:2])
        own = Padding(decoder.structure.keep[order])
        torch.testing.assert_close(actual, decoder.layer(decoder.x[order], z=decoder.z[:, 1:2], structure=own))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_dtypes_leave_nothing(dtype, taken):
    decoder = Decoder(dtype=dtype)
    close(torch.autograd.grad(loss_of(decoder.steps()), decoder.leaves), decoder.reference(),
          **({"rtol": 0.1, "atol": 0.1} if dtype is torch.bfloat16 else {"rtol": 1e-10, "atol": 1e-10}))
    assert not taken


def test_a_graph_that_is_retained_gives_the_same_again():
    decoder = Decoder()
    loss, reference = loss_of(decoder.steps()), decoder.reference()
    for last in (False, False, True):
        close(torch.autograd.grad(loss, decoder.leaves, retain_graph=not last), reference)


@pytest.mark.parametrize("first", ["z", "x", "vector", "target"])
def test_passes_for_some_leave_nothing_for_later_ones(first):
    decoder = Decoder()
    cache = decoder.layer.prepare(decoder.x)
    loss, reference = loss_of(decoder.steps(cache)), decoder.reference()
    names = ["x", "z", *[name for name, _ in decoder.layer.named_parameters()]]
    at = next(i for i, name in enumerate(names) if first in name)
    for _ in range(2):
        close(torch.autograd.grad(loss, decoder.leaves[at], retain_graph=True), reference[at:at + 1])
    assert not cache.reused._last[2].sums._passes
    close(torch.autograd.grad(loss, decoder.leaves), reference)


@pytest.mark.parametrize("make", [Decoder, padded])
def test_second_derivatives(make):
    actual = []
    for dtype in (torch.float32, torch.float64):
        decoder = make(dtype=dtype)
        grads = torch.autograd.grad(loss_of(decoder.steps()), decoder.leaves, create_graph=True)
        actual.append(torch.autograd.grad(sum(g.square().sum() for g in grads[:3]), decoder.leaves))
    close([t.double() for t in actual[0]], actual[1], rtol=1e-3, atol=1e-4)


def test_forward_derivatives_of_gradients():
    decoder = Decoder()
    y, v, t = torch.cat(decoder.steps(), 1), *torch.randn(2, 3, STEPS, 6)
    expected = [torch.autograd.grad(y, decoder.leaves, g, retain_graph=True) for g in (v, t)]
    with forward_ad.dual_level():
        actual = torch.autograd.grad(y, decoder.leaves, forward_ad.make_dual(v, t))
        pairs = [forward_ad.unpack_dual(g) for g in actual]
        close([pair.primal for pair in pairs], expected[0])
        close([pair.tangent for pair in pairs], expected[1])


def test_functional_gradients():
    decoder = Decoder()
    layer = decoder.layer

    def loss(x, z):
        cache = layer.prepare(x)
        return loss_of([layer(cache, z=z[:, t:t + 1]) for t in range(STEPS)])

    close(torch.func.grad(loss, (0, 1))(decoder.x, decoder.z), decoder.reference()[:2])


@pytest.mark.parametrize(("reentrant", "prepared_within"), [(True, True), (False, True), (False, False)])
def test_checkpoints_around_steps(reentrant, prepared_within):
    """But for several passes within a pass through the keys' one graph, which is gone after the first."""
    decoder = Decoder()
    layer, held = decoder.layer, None if prepared_within else decoder.layer.prepare(decoder.x)

    def run(x, z):
        cache = layer.prepare(x) if held is None else held
        return torch.cat([layer(cache, z=z[:, t:t + 1]) for t in range(z.shape[1])], 1)

    parts = [checkpoint(run, decoder.x, z, use_reentrant=reentrant) for z in decoder.z.split(2, 1)]
    torch.cat(parts, 1).cos().sum().backward()
    close([t.grad for t in decoder.leaves], decoder.reference())


def test_a_pass_within_a_pass_keeps_to_itself():
    """Through keys without a graph of their own, which would be gone after the inner pass."""
    decoder, inner = Decoder(weight=Eye(), outputs=12), []
    decoder.layer.mechanism.requires_grad_(False)
    with torch.no_grad():
        cache = decoder.layer.prepare(decoder.x)
    leaves = cache.x.requires_grad_(), decoder.z

    def within(_):
        with torch.enable_grad():
            loss = loss_of([decoder.layer(cache, z=decoder.z[:, :1])])
        inner.append(torch.autograd.grad(loss, leaves))

    steps = decoder.steps(cache)
    reference = [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (loss_of(steps), loss_of(steps[:1]))]
    steps[2].register_hook(within)
    close(torch.autograd.grad(loss_of(steps), leaves), reference[0])
    close(inner[0], reference[1])


@pytest.mark.parametrize("frozen", ["x", "source", "vector", "target", "x source", "x source vector", "x z target"])
def test_what_is_frozen(frozen):
    decoder = Decoder()
    for name, t in (("x", decoder.x), ("z", decoder.z), *decoder.layer.named_parameters()):
        t.requires_grad_(not any(part in name.split(".") for part in frozen.split()))
    close(torch.autograd.grad(loss_of(decoder.steps()), decoder.leaves), decoder.reference())


def test_modes_of_gradients_in_turn():
    decoder, no_grad = Decoder(), torch.no_grad()
    cache, whole = decoder.layer.prepare(decoder.x), decoder.layer(decoder.x, z=decoder.z)
    with no_grad:
        close(decoder.steps(cache), whole.split(1, 1))
    close(torch.autograd.grad(loss_of(decoder.steps(cache)), decoder.leaves), decoder.reference())
    with no_grad:
        held = decoder.layer.prepare(decoder.x)
    for _ in range(2):
        with no_grad:
            close(decoder.steps(held), whole.split(1, 1))
        expected, = torch.autograd.grad(decoder.layer(decoder.x, z=decoder.z).cos().sum(), decoder.z)
        close(torch.autograd.grad(loss_of(decoder.steps(held)), decoder.z), [expected])


def test_entries_appended_between_steps_and_samples_in_another_order_and_entries_taken_back():
    decoder = Decoder()
    layer, x, z, order = decoder.layer, decoder.x, decoder.z, torch.tensor([2, 2, 0])
    cache = layer.prepare(x[:, :20])
    steps, whole = [], []
    for t in range(STEPS):
        steps.append(layer(cache, z=z[:, t:t + 1]))
        whole.append(layer(x[:, :20 + 2 * t], z=z[:, t:t + 1]))
        cache.append(x[:, 20 + 2 * t:22 + 2 * t])
    for change, inputs in ((lambda: cache.reorder(order), x[order]), (lambda: cache.truncate(7), x[order, :7])):
        change()
        steps.append(layer(cache, z=z[:, 1:2]))
        whole.append(layer(inputs, z=z[:, 1:2]))
    close(torch.autograd.grad(loss_of(steps), decoder.leaves), torch.autograd.grad(loss_of(whole), decoder.leaves))


@pytest.mark.parametrize("twin_of", [copy.copy, copy.deepcopy])
def test_copies(twin_of):
    decoder = Decoder()
    cache = decoder.layer.prepare(decoder.x)
    first = decoder.layer(cache, z=decoder.z[:, :1])
    twin = twin_of(cache)
    rest = [decoder.layer(twin if t % 2 else cache, z=decoder.z[:, t:t + 1]) for t in range(1, STEPS)]
    close(torch.autograd.grad(loss_of([first, *rest]), decoder.leaves), decoder.reference())


def test_two_losses_of_one_prepared():
    decoder = Decoder()
    steps, reference = decoder.steps(), decoder.reference()
    first, second = loss_of(steps[:2]), loss_of(steps[1:])
    actual = [torch.autograd.grad(loss, decoder.leaves, retain_graph=True, allow_unused=True)
             for loss in (first, second)]
    overlap = torch.autograd.grad(loss_of(steps[1:2]), decoder.leaves)
    close([a + b - c for a, b, c in zip(*actual, overlap, strict=True)], reference)


def test_a_pass_that_fails_leaves_later_ones_right():
    decoder = Decoder()
    steps, reference = decoder.steps(), decoder.reference()

    def fail(_):
        raise ValueError("in between")

    failing = steps[1].register_hook(fail)
    with pytest.raises(ValueError, match="in between"):
        torch.autograd.grad(loss_of(steps), decoder.leaves, retain_graph=True)
    failing.remove()
    close(torch.autograd.grad(loss_of(steps), decoder.leaves), reference)


@pytest.mark.parametrize("changed", ["keys", "x", "vector"])
def test_what_was_changed_in_place_is_told(changed):
    decoder = Decoder()
    cache = decoder.layer.prepare(decoder.x)
    loss = loss_of(decoder.steps(cache))
    with torch.no_grad():
        {"keys": next(iter(cache._entries.values())).rows.entries(), "x": cache.heads(),
         "vector": next(p for name, p in decoder.layer.named_parameters() if "vector" in name)}[changed].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("grad", [True, False])
def test_keys_that_were_changed_in_place_are_read_anew(grad):
    """Keys without numbers weigh all values alike, whatever the output."""
    decoder = Decoder()
    cache = decoder.layer.prepare(decoder.x)
    with torch.set_grad_enabled(grad):
        before = decoder.steps(cache)
        with torch.no_grad():
            next(iter(cache._entries.values())).rows.entries().zero_()
        after = decoder.steps(cache)
    assert not torch.allclose(before[0], before[1], atol=1e-3)
    torch.testing.assert_close(after[0], after[1])


@pytest.mark.parametrize(("scale", "of"), [(200.0, "z"), (200.0, "x"), (torch.nan, "z"), (torch.inf, "z")])
def test_numbers_of_which_no_factor_is_made(scale, of):
    decoder = Decoder()
    with torch.no_grad():
        getattr(decoder, of)[0, :2] *= scale
    expected = decoder.layer(decoder.x, z=decoder.z)
    steps = torch.cat(decoder.steps(), 1)
    torch.testing.assert_close(steps, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    actual = torch.autograd.grad(steps.cos().sum(), decoder.leaves[:2])
    torch.testing.assert_close(actual, decoder.reference()[:2], rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("outputs", [(1, 4), (5,), (2, 3)])
def test_several_outputs_a_step(outputs):
    decoder = Decoder()
    cache = decoder.layer.prepare(decoder.x)
    steps = [decoder.layer(cache, z=part) for part in decoder.z.split(outputs, 1)]
    close(torch.autograd.grad(loss_of(steps), decoder.leaves), decoder.reference())


@pytest.mark.parametrize("of", ["x", "z"])
def test_nothing_is_held_beyond_the_prepared(of):
    decoder = Decoder()
    gc.collect()
    gc.disable()
    try:
        cache = decoder.layer.prepare(decoder.x)
        steps, known = decoder.steps(cache), weakref.ref(cache.x)
        loss = loss_of(steps)
        torch.autograd.grad(loss, getattr(decoder, of), retain_graph=of == "z")
        del cache, steps, loss
        assert known() is None
    finally:
        gc.enable()
