"""A step of decoding in one kernel: the numbers of the whole call, what is kept, and what goes another way."""

import copy

import pytest
import torch
from torch import Tensor, nn

from structconv import Causal, Conv, LowRank, MultiheadAttention, Padding, Window
from structconv.mechanisms import STRUCTURE_IF_GIVEN, ALiBi, DotProduct, RelativeBias, Rotary
from structconv.primitives.native.loader import core
from tests.support.threads import on_threads

pytestmark = pytest.mark.skipif(core() is None, reason="needs the native kernels")
NAME = "structconv.attention_step"


def whole(layer: Conv, x: Tensor) -> Tensor:
    return layer(x, structure=Causal())


def stepped(layer: Conv, x: Tensor, start: int, **options) -> tuple[Tensor, str]:
    """The outputs from `start` on, one by one, and by which kernel the last was computed."""
    cache = layer.prepare(x[..., :start, :], Causal())
    actual = [layer.step(cache, x[..., t:t + 1, :], **options) for t in range(start, x.shape[-2])]
    cache.truncate(x.shape[-2] - 1)
    cache.reserve(x[..., -1:, :])
    args, by_name = layer._arguments(cache, x[..., -1:, :])
    return torch.cat(actual, -2), layer.plan(*args, **by_name, positions=x.shape[-2] - 1).kernel


def conv(heads: int, dim: int, channels: int, others: int | None = None, *, bias_of=None, **options) -> Conv:
    scores = DotProduct(heads, dim, **options).scaled()
    scores = (scores if bias_of is None else scores + bias_of).masked(keep=STRUCTURE_IF_GIVEN).softmax()
    return Conv(scores, channels, 7, weight=LowRank(5, options.get("shared_by", 1)), other_channels=others)


@torch.no_grad()
@pytest.mark.parametrize(("batch", "heads", "dim", "channels"), [
    ((), 3, 5, 6), ((1,), 4, 64, 96), ((2,), 1, 70, 272), ((4,), 2, 16, 33), ((7,), 1, 1, 1), ((7,), 4, 64, 96)])
def test_equals_the_whole_call(batch, heads, dim, channels):
    layer, x = conv(heads, dim, channels), torch.randn(*batch, 9, channels)
    actual, kernel = stepped(layer, x, 4)
    torch.testing.assert_close(actual, whole(layer, x)[..., 4:, :], rtol=1e-4, atol=1e-5)
    assert kernel == NAME


@torch.no_grad()
@pytest.mark.parametrize("length", [511, 512, 513, 1100])
def test_more_entries_than_a_chunk(length):
    layer, x = MultiheadAttention(8, 2).eval(), 3 * torch.randn(2, length + 2, 8)
    actual, kernel = stepped(layer, x, length)
    torch.testing.assert_close(actual, whole(layer, x)[:, -2:], rtol=1e-4, atol=1e-5)
    assert kernel == NAME


LAYERS = {"bias": lambda: MultiheadAttention(12, 3), "no_bias": lambda: MultiheadAttention(12, 3, bias=False),
          "grouped": lambda: MultiheadAttention(12, 6, num_kv_heads=2),
          "rotary": lambda: conv(2, 4, 12, rotary=Rotary()), "shared_keys": lambda: conv(4, 4, 12, shared_by=2),
          "rotary_halves": lambda: conv(4, 10, 12, shared_by=4, bias=True, rotary=Rotary(layout="half", channels=6)),
          "rotary_yarn": lambda: conv(2, 6, 12, rotary=Rotary(100.0, scaling={
              "rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 4})),
          "alibi": lambda: conv(4, 4, 12, bias_of=ALiBi(), shared_by=2),
          "relative": lambda: conv(2, 4, 12, bias_of=RelativeBias(clip=2), rotary=Rotary()),
          "relative_shared": lambda: conv(3, 4, 12, bias_of=RelativeBias(clip=8, heads=1, buckets="log"))}


@torch.no_grad()
@pytest.mark.parametrize("name", LAYERS)
def test_of_each_kind_of_projection(name):
    layer, x = LAYERS[name]().eval(), torch.randn(2, 8, 12)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    actual, kernel = stepped(layer, x, 3)
    torch.testing.assert_close(actual, whole(layer, x)[:, 3:], rtol=1e-4, atol=1e-5)
    assert kernel == NAME
    cache = layer.prepare(x[:, :3], Causal())
    layer.step(cache, x[:, 3:4])
    assert cache._bound is not None
    keys = next(part for part in layer.modules() if isinstance(part, DotProduct))
    assert cache._entries[id(keys), "stored_keys"].rows.entries().shape[1] == keys.key_heads


@torch.no_grad()
@pytest.mark.parametrize("name", [*LAYERS, "scores of x"])
def test_in_bfloat16(name):
    """Each rounding is half a unit of 2^-8: of what is stored, and of y."""
    layer = (Conv(DotProduct().scaled().masked(keep=STRUCTURE_IF_GIVEN).softmax(), 12, 7, weight=LowRank(5))
             if name == "scores of x" else LAYERS[name]()).eval().to(torch.bfloat16)
    x = torch.randn(2, 9, 12).to(torch.bfloat16)
    exact = copy.deepcopy(layer).double()
    actual, kernel = stepped(layer, x, 3)
    assert actual.dtype is torch.bfloat16 and kernel == NAME
    torch.testing.assert_close(actual.double(), whole(exact, x.double())[:, 3:], rtol=2e-2, atol=2e-2)


@torch.no_grad()
@pytest.mark.parametrize("structure", [Causal(), Causal() & Window(5)])
def test_terms_by_offset_in_a_long_sequence(structure):
    layer, x = LAYERS["relative"](), torch.randn(2, 30, 12)
    cache = layer.prepare(x[:, :3], structure)
    actual = [layer.step(cache, x[:, t:t + 1]) for t in range(3, 30)]
    assert cache._bound is not None
    torch.testing.assert_close(torch.cat(actual, 1), layer(x, structure=structure)[:, 3:], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("visible", [0, 2, 5])
@pytest.mark.parametrize("length", [3, 600, 1100])
def test_terms_of_minus_infinity(length, visible):
    layer, x = LAYERS["relative"](), torch.randn(2, length + 1, 12)
    table = next(part for part in layer.modules() if isinstance(part, RelativeBias)).table
    table[..., :5 - visible] = -torch.inf  # the entries far before an output, all of them where none is visible
    actual, kernel = stepped(layer, x, length)
    torch.testing.assert_close(actual, whole(layer, x)[:, length:], rtol=1e-4, atol=1e-5)
    assert kernel == NAME


@torch.no_grad()
def test_queries_at_other_positions_than_the_last():
    layer, x = LAYERS["rotary_halves"](), torch.randn(2, 8, 12)
    cache = layer.prepare(x[:, :7], Causal())
    layer.step(cache, x[:, 7:])
    actual = layer(cache, z=x[:, 2:4], positions=torch.tensor([3, 9]))
    expected = layer(x, structure=Causal(), z=x[:, 2:4], positions=torch.tensor([3, 9]))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_what_is_kept_is_what_would_have_been_made():
    layer, x = MultiheadAttention(8, 2).eval(), torch.randn(3, 6, 8)
    cache, whole_x = layer.prepare(x[:, :4], Causal()), layer.prepare(x, Causal())
    for t in (4, 5):
        layer.step(cache, x[:, t:t + 1])
    keys = next(part for part in layer.modules() if isinstance(part, DotProduct)).stored_keys
    torch.testing.assert_close((cache.heads(), cache.of(keys), cache.x), (whole_x.heads(), whole_x.of(keys), x))


@torch.no_grad()
def test_what_is_not_a_number_stays_in_its_sample():
    layer, x = MultiheadAttention(8, 2).eval(), torch.randn(2, 5, 8)
    x[0, 1, 3] = torch.nan
    actual, _ = stepped(layer, x, 4)
    assert actual[0].isnan().all()
    torch.testing.assert_close(actual[1], stepped(layer, x[1:], 4)[0][0])


@torch.no_grad()
def test_queries_from_elsewhere():
    layer, x, z = conv(2, 4, 6, others=3), torch.randn(2, 5, 6), torch.randn(2, 1, 3)
    cache = layer.prepare(x[:, :4])
    actual = layer.step(cache, x[:, 4:], z=z)
    torch.testing.assert_close(actual, layer(x, z=z, positions=4))


@torch.no_grad()
@pytest.mark.parametrize("before", [0, 2], ids=["first", "bound"])
@pytest.mark.parametrize("change", [
    "strided", "wide", "float64", "padding", "window", "two", "weights", "query", "hook"])
def test_whatever_it_does_not_take_is_right_too(change, before):
    layer, x = MultiheadAttention(8, 2).eval(), torch.randn(2, 9, 8)
    if change == "float64":
        layer, x = layer.double(), x.double()
    if change == "hook":
        dot = next(part for part in layer.modules() if isinstance(part, DotProduct))
        dot.key.register_forward_hook(lambda module, given, y: 2 * y)
    count = 2 if change == "two" else 1
    turned = {"strided": x.mT.contiguous().mT, "wide": torch.stack([x, x], -1)[..., 0]}.get(change, x)
    query = torch.randn(2, 1, 8) if change == "query" else None
    structure = Causal() & Window(2) if change == "window" else Causal()
    mask = {"keep": Padding(torch.rand(2, 9) < 0.7)} if change == "padding" else {}
    cache = layer.prepare(x[:, :9 - count - before], structure)
    for t in range(9 - count - before, 9 - count):
        layer.step(cache, x[:, t:t + 1])
    more = {"return_weights": True} if change == "weights" else {}
    actual = layer.step(cache, turned[:, 9 - count:], query=query, **mask, **more)
    expected = layer(x, structure=structure, **mask)[:, -count:] if query is None else layer(query, x)
    torch.testing.assert_close(actual[0] if change == "weights" else actual, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(cache.heads(), layer.prepare(x).heads()[..., -cache.x.shape[-2]:, :])


@torch.no_grad()
def test_in_other_memory_than_that_of_the_default():
    layer, x = MultiheadAttention(8, 2).eval(), torch.randn(2, 6, 8)
    with torch.inference_mode():
        cache = layer.prepare(x[:, :3], Causal())
        first = layer.step(cache, x[:, 3:4])
    second = layer.step(cache, x[:, 4:5])
    with torch.inference_mode():
        third = layer.step(cache, x[:, 5:])
    torch.testing.assert_close(torch.cat([first, second, third], 1), whole(layer, x)[:, 3:], rtol=1e-4, atol=1e-5)


def test_with_gradients_it_goes_another_way():
    layer, x = MultiheadAttention(8, 2), torch.randn(2, 5, 8, requires_grad=True)
    actual, kernel = stepped(layer, x, 4)
    assert kernel != NAME
    (grad,) = torch.autograd.grad(actual.sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(whole(layer, x)[:, 4:].sum(), x)[0], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_the_same_on_any_number_of_threads():
    torch.manual_seed(3)
    layer, x = MultiheadAttention(192, 4).eval(), torch.randn(3, 40, 192)
    one, two = on_threads(lambda: stepped(layer, x, 38)[0], (1, 2))
    assert torch.equal(one, two)
