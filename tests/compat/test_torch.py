"""`structconv.compat.torch` against torch: values, gradients, states, containers, and programs that are compiled."""

import copy
import itertools
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode

from structconv import ConfigError, ShapeError, StructureError
from structconv import Conv2d as OwnConv2d
from structconv.compat import convert
from structconv.compat import torch as compat
from structconv.primitives.native.dispatch import kernels
from tests.support.errors import check_refused
from tests.support.layers import EVERY, drawn

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}


class Watching(TorchDispatchMode):
    """Sees each operator, and changes nothing: what it sees is planned."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


def _check_alike(original: Any, ours: Any, inputs: tuple[Tensor, ...], **options: Any) -> None:
    """Both modules give the same values, and the same gradients of inputs and parameters."""
    actual = []
    for module in (original, ours):
        shared: dict[int, Tensor] = {}  # one tensor that is passed twice stays one
        own = [shared.setdefault(id(t), t.detach().clone().requires_grad_()) for t in inputs]
        results = module(*own, **options)
        results = [t for t in (results if isinstance(results, tuple) else (results,)) if t is not None]
        reference = [*shared.values(), *(p for p in module.parameters() if p.requires_grad)]
        loss = sum((t * torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view(t.shape)).sum() for t in results)
        actual.append([*results, *torch.autograd.grad(loss, reference, allow_unused=True)])
    tolerance = TOLERANCES[inputs[0].dtype]
    assert len(actual[0]) == len(actual[1])
    for expected, own in zip(*actual, strict=True):
        assert (expected is None) == (own is None)
        if expected is not None:
            assert own.shape == expected.shape and own.dtype == expected.dtype
            torch.testing.assert_close(own, expected, rtol=tolerance,
                                       atol=tolerance * max(1.0, float(expected.detach().abs().max())))


def _pair(name: str, dtype: torch.dtype, *args: Any, **options: Any) -> tuple[nn.Module, nn.Module]:
    """torch's layer and ours, drawn alike; the state of each is loaded into the other."""
    torch.manual_seed(0)
    original = getattr(nn, name)(*args, **options, dtype=dtype)
    torch.manual_seed(0)
    ours = getattr(compat, name)(*args, **options, dtype=dtype)
    assert isinstance(ours, type(original)) and repr(ours) == repr(original)
    states = original.state_dict(), ours.state_dict()
    assert list(states[0]) == list(states[1])
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))
    for target, state in ((ours, states[0]), (original, states[1])):
        target.load_state_dict(state)
    for layer in (original, ours):
        for parameter in layer.parameters():
            with torch.no_grad():
                parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel(), dtype=dtype).view(parameter.shape))
    return original, ours


@st.composite
def attention_calls(draw: Any) -> tuple[Any, ...]:
    """Options, inputs and masks of a call of MultiheadAttention; each query has a key."""
    dtype = draw(st.sampled_from(list(TOLERANCES)))
    heads, dim, batch = draw(st.integers(1, 3)), draw(st.sampled_from((2, 3))), draw(st.integers(1, 3))
    outputs, inputs = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    first, batched, single = draw(st.booleans()), draw(st.booleans()), draw(st.booleans())
    embed = heads * dim
    kdim, vdim = (embed, embed) if single else (draw(st.sampled_from((embed, 5))), draw(st.sampled_from((embed, 3))))
    options = {"bias": draw(st.booleans()), "add_bias_kv": draw(st.booleans()), "add_zero_attn": draw(st.booleans()),
               "kdim": kdim, "vdim": vdim, "batch_first": first}
    inputs = outputs if single else inputs
    generator = torch.Generator().manual_seed(draw(st.integers(0, 100)))

    def normal(length: int, channels: int) -> Tensor:
        shape = (length, channels) if not batched else (batch, length, channels) if first else (length, batch, channels)
        return torch.randn(shape, dtype=dtype, generator=generator)

    query = normal(outputs, embed)
    tensors = (query, query, query) if single else (query, normal(inputs, kdim), normal(inputs, vdim))
    kind, batch = draw(st.sampled_from((None, "bool", "float", "-inf"))), batch if batched else 1
    masks: dict[str, Any] = {"key_padding_mask": None, "attn_mask": None}
    if kind is not None:
        absent = [torch.rand(shape, generator=generator) < 0.4
                  for shape in ((batch, inputs), draw(st.sampled_from(((outputs, inputs),
                                                                      (batch * heads, outputs, inputs)))))]
        for mask in absent:
            mask[..., 0] = False
        absent[0] = absent[0] if batched else absent[0][0]
        numbers = [torch.randn(m.shape, dtype=dtype, generator=generator) if kind == "float" else
                   torch.zeros(m.shape, dtype=dtype).masked_fill(m, -torch.inf) for m in absent]
        chosen = draw(st.sets(st.sampled_from(list(masks)), min_size=1))
        for name, *both in zip(masks, absent, numbers, strict=True):
            masks[name] = both[kind != "bool"] if name in chosen else None
    calls = dict(masks, need_weights=draw(st.booleans()), average_attn_weights=draw(st.booleans()))
    return dtype, embed, heads, options, tensors, calls


@pytest.mark.parametrize("planned", [False, True])
@settings(max_examples=100 if EVERY else 25)
@given(attention_calls())
def test_attention_is_torchs(planned: bool, call: tuple[Any, ...]) -> None:
    dtype, embed, heads, options, tensors, calls = call
    with Watching() if planned else nullcontext():
        _check_alike(*_pair("MultiheadAttention", dtype, embed, heads, **options), tensors, **calls)


FEW_MASKS: dict[str, dict[str, Any]] = {
    "none": {}, "padding": {"key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3], [1]])},
    "scores of padding": {"key_padding_mask": torch.zeros(1, 5).expand(3, 5)},
    "pairs": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(2)},
    "scores": {"attn_mask": torch.randn(5, 5).masked_fill(torch.ones(5, 5, dtype=torch.bool).triu(1), -torch.inf)},
    "causal": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True}}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masks", FEW_MASKS.values(), ids=FEW_MASKS)
def test_attention_of_few_entries_is_one_node(bias: bool, masks: dict[str, Any]) -> None:
    original, ours = _pair("MultiheadAttention", torch.float32, 8, 2, bias=bias, batch_first=True)
    x = torch.randn(3, 5, 8, requires_grad=True)
    _check_alike(original, ours, (x, x, x), need_weights=False, **masks)
    y = ours(x, x, x, need_weights=False, **masks)[0]
    assert type(y.grad_fn).__name__ == "_AttendEntriesBackward" or kernels() is None
    for average in (True, False):
        with torch.no_grad():
            pair = ours(x, x, x, average_attn_weights=average, **masks)
        torch.testing.assert_close(pair, original(x, x, x, average_attn_weights=average, **masks), rtol=1e-5, atol=1e-5)
    seconds = []
    for layer in (original, ours):
        (first,) = torch.autograd.grad(layer(x, x, x, need_weights=layer is original, **masks)[0].square().sum(), x,
                                       create_graph=True)
        seconds.append(torch.autograd.grad(first.square().sum(), x)[0])
    torch.testing.assert_close(*seconds, rtol=1e-4, atol=1e-5 * float(seconds[0].abs().max()))


@pytest.mark.parametrize(("channels", "entries", "frozen", "direct"), [
    (512, 4, False, False), (512, 4, True, True), (64, 4, False, True)])
def test_large_weights_of_few_entries_get_no_copied_gradient(channels: int, entries: int, frozen: bool, direct: bool
                                                            ) -> None:
    """The one node gives the gradients of queries, keys and values, which autograd copies into that of their weight."""
    layer = compat.MultiheadAttention(channels, 8, batch_first=True)
    original = nn.MultiheadAttention(channels, 8, batch_first=True)
    original.load_state_dict(layer.state_dict())
    x = torch.randn(2, entries, channels, requires_grad=True)
    for module in (layer, original):
        module.in_proj_weight.requires_grad_(not frozen)
    y, expected = (module(x, x, x, need_weights=False)[0] for module in (layer, original))
    assert (type(y.grad_fn).__name__ == "_AttendEntriesBackward") == (direct and kernels() is not None)
    torch.testing.assert_close(y, expected, atol=1e-5, rtol=1e-5)
    if not frozen:
        gradient, wanted = (torch.autograd.grad(t.square().sum(), module.in_proj_weight)[0]
                            for t, module in ((y, layer), (expected, original)))
        torch.testing.assert_close(gradient, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["_sa_block", "_ff_block"])
def test_a_block_that_one_encoder_layer_replaces_is_called(name: str) -> None:
    layer, peer = (library.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0) for library in (compat, nn))
    layer.load_state_dict(peer.state_dict())
    for one in (layer, peer):
        block = getattr(one, name)
        setattr(one, name, lambda *args, block=block, **options: 2 * block(*args, **options))
    x = torch.randn(2, 5, 8)
    torch.testing.assert_close(layer(x), peer(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm_first", [False, True])
def test_hooks_and_blocks_of_encoder_layers_are_called(norm_first: bool) -> None:
    calls = []

    class Doubled(compat.TransformerEncoderLayer):
        def _ff_block(self, x: Tensor) -> Tensor:
            return 2 * super()._ff_block(x)

    options, x = {"dropout": 0.0, "batch_first": True, "norm_first": norm_first}, torch.randn(2, 5, 8)
    layer, doubled = compat.TransformerEncoderLayer(8, 2, 16, **options), Doubled(8, 2, 16, **options)
    doubled.load_state_dict(layer.state_dict())
    layer.dropout1.register_forward_hook(lambda module, args, y: calls.append(module))
    y = layer(x)
    assert calls == [layer.dropout1] and not torch.allclose(y, doubled(x))


@pytest.mark.parametrize("longer", [False, True])
def test_the_hint_takes_the_place_of_a_causal_mask(longer: bool) -> None:
    layer, x = compat.MultiheadAttention(8, 2, add_bias_kv=longer, add_zero_attn=longer), torch.randn(5, 2, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    expected, _ = layer(x, x, x, attn_mask=mask)
    for need_weights in (False, True):
        torch.testing.assert_close(layer(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)[0],
                                   expected)
    original = nn.MultiheadAttention(8, 2, add_bias_kv=longer, add_zero_attn=longer)
    original.load_state_dict(layer.state_dict())
    for need_weights, alike in ((True, True), (False, not longer)):  # there the hint hides the keys that are added
        theirs, _ = original(x, x, x, attn_mask=mask, is_causal=True, need_weights=need_weights)
        assert torch.allclose(theirs, expected, atol=1e-5) is alike


@pytest.mark.parametrize("planned", [False, True])
@settings(max_examples=60 if EVERY else 15)
@given(st.data())
def test_scaled_dot_product_attention_is_torchs(planned: bool, data: Any) -> None:
    dtype, lead = data.draw(st.sampled_from(list(TOLERANCES))), data.draw(st.sampled_from(((), (2,), (2, 3))))
    groups, shared = (data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))) if lead else (1, 1)
    outputs, inputs, channels = (data.draw(st.integers(1, 4)) for _ in range(3))
    shape = (*lead, groups * shared) if lead else data.draw(st.sampled_from(((), (2,))))
    fewer = (*lead, groups) if lead else shape
    query, key, value = (torch.randn(*own, dtype=dtype) for own in (
        (*shape, outputs, 3), (*fewer, inputs, 3), (*fewer, inputs, channels)))
    kind = data.draw(st.sampled_from((None, "causal", "bool", "float")))
    mask = None
    if kind in ("bool", "float"):
        size = data.draw(st.sampled_from(((outputs, inputs), (*shape[:-1], *(1,) * bool(shape), 1, inputs),
                                          (*shape, outputs, inputs))))
        mask = torch.rand(size) < 0.7 if kind == "bool" else torch.randn(size, dtype=dtype)
        if kind == "bool":
            mask[..., 0] = True
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": kind == "causal", "enable_gqa": shared > 1,
                               "scale": data.draw(st.sampled_from((None, 0.3)))}

    class Both(nn.Module):
        def __init__(self, function: Any) -> None:
            super().__init__()
            self.function = function

        def forward(self, *tensors: Tensor) -> Tensor:
            return self.function(*tensors, **options)

    both = Both(F.scaled_dot_product_attention), Both(compat.scaled_dot_product_attention)
    with Watching() if planned else nullcontext():
        _check_alike(*both, (query, key, value))


@pytest.mark.parametrize("mask", [None, "causal", torch.ones(4, 5).tril(1).bool(), torch.arange(20.0).view(4, 5)],
                         ids=["none", "causal", "boolean", "floating"])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)], ids=str)
def test_attention_without_channels_is_uniform(lead: Any, mask: Any) -> None:
    """As torch 2.13's, where the default scale would be one over zero; earlier ones give zeros."""
    q, k, v = (torch.randn(*lead, rows, width, requires_grad=True) for rows, width in ((4, 0), (5, 0), (5, 2)))
    options: dict[str, Any] = {"is_causal": True} if isinstance(mask, str) else {"attn_mask": mask}
    found = []
    for y in (compat.scaled_dot_product_attention(q, k, v, **options),
              F.scaled_dot_product_attention(F.pad(q, (0, 1)), F.pad(k, (0, 1)), v, **options)):
        found.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v), allow_unused=True, materialize_grads=True)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("mask", [None, "boolean", "floating"])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("keys", [1, 3, 64, 65, 600])
def test_gradients_of_one_query_with_large_scores(keys: int, shared: bool, mask: str | None) -> None:
    """Weights that a backward pass makes again sum to one, whatever the size of the scores."""
    q, k, v = 1000 * torch.randn(2, 4, 1, 20), *(torch.randn(2, 2 if shared else 4, keys, 20) for _ in range(2))
    table = torch.rand(1, keys) if mask == "floating" else None if mask is None else torch.arange(keys)[None] % 3 != 1
    found = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, v)]
        own = table.to(dtype) if mask == "floating" else table
        attend = compat.scaled_dot_product_attention if dtype is torch.float32 else F.scaled_dot_product_attention
        found.append(torch.autograd.grad(attend(*leaves, own, enable_gqa=shared).sum(), leaves))
    for ours, expected, scale in zip(*found, (1, 1000, 1), strict=True):  # each is a sum of terms of this size
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5 * scale)


@pytest.mark.parametrize("outputs, inputs", [(5, 5), (3, 5), (5, 3)])
@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("planned", [False, True])
def test_a_mask_and_causality_together(planned: bool, by_head: bool, kind: str, outputs: int, inputs: int) -> None:
    """As torch 2.13 computes them on a CPU; others refuse them."""
    query, key, value = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (outputs, inputs, inputs))
    mask = torch.randn(*(2, 4) * by_head, outputs, inputs)
    mask = mask if kind == "float" else (mask > 0).index_fill(-1, torch.tensor(0), True)
    earlier = torch.ones(outputs, inputs, dtype=torch.bool).tril()
    joined = mask.masked_fill(~earlier, -torch.inf) if kind == "float" else mask & earlier
    expected = F.scaled_dot_product_attention(query, key, value, joined)
    with Watching() if planned else nullcontext():
        y = compat.scaled_dot_product_attention(query, key, value, mask, is_causal=True)
    torch.testing.assert_close([y, *torch.autograd.grad(y.cos().sum(), (query, key, value))],
                               [expected, *torch.autograd.grad(expected.cos().sum(), (query, key, value))])


@st.composite
def image_layers(draw: Any) -> tuple[Any, ...]:
    """A layer over grids, its options, and an input."""
    name = draw(st.sampled_from(("Conv", "ConvTranspose", "AvgPool"))) + draw(st.sampled_from(("1d", "2d", "3d")))
    axes, dtype = int(name[-2]), draw(st.sampled_from(list(TOLERANCES)))
    size = tuple(draw(st.integers(1, 3)) for _ in range(axes))
    stride, padding = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    if "Pool" in name:
        args: tuple[Any, ...] = (size,)
        options: dict[str, Any] = {"stride": draw(st.sampled_from((None, stride))),
                                   "padding": min(padding, min(size) // 2), "count_include_pad": draw(st.booleans())}
        if axes > 1:
            options["divisor_override"] = draw(st.sampled_from((None, 3)))
    else:
        groups, dilation = draw(st.sampled_from((1, 2))), draw(st.integers(1, 2))
        args = (4, 6, size)
        options = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups,
                   "bias": draw(st.booleans())}
        if "Transpose" in name:
            options["output_padding"] = draw(st.integers(0, max(stride, dilation) - 1))
        elif draw(st.booleans()):
            options.update(stride=1, padding=draw(st.sampled_from(("same", "valid"))))
        else:
            options["padding_mode"] = draw(st.sampled_from(("zeros", "circular", "reflect", "replicate")))
    lead = draw(st.sampled_from(((), (2,))))
    return name, dtype, args, options, torch.randn(*lead, 4, *(8 - axes + i for i in range(axes)), dtype=dtype)


@settings(max_examples=120 if EVERY else 30)
@given(image_layers())
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
def test_layers_over_grids_are_torchs(layer: tuple[Any, ...]) -> None:
    name, dtype, args, options, image = layer
    both = ((getattr(nn, name)(*args, **options), getattr(compat, name)(*args, **options)) if "Pool" in name
            else _pair(name, dtype, *args, **options))
    _check_alike(*both, (image,))
    assert both[1](image).is_contiguous()


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", ["Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d"])
def test_one_output_channel_has_gradients(name: str, size: int) -> None:
    axes = int(name[-2])
    image = torch.randn(1, *(size,) * axes, 3, dtype=torch.float64).movedim(-1, 1)
    _check_alike(*_pair(name, torch.float64, 3, 1, 2, **{} if "Transpose" in name else {"padding": 1}), (image,))


OVER_IMAGES: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: compat.AvgPool1d(3, 2, 1),
    "mean of entries": lambda: compat.AvgPool1d(3, 2, 1, count_include_pad=False),
    "override": lambda: compat.AvgPool2d(2, divisor_override=3),
    "conv": lambda: compat.Conv1d(4, 6, 3, padding=1, padding_mode="circular"),
    "transposed": lambda: compat.ConvTranspose1d(4, 6, 3, 2, output_padding=1),
    "groups": lambda: compat.ConvTranspose2d(4, 6, 3, 2, groups=2)}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("name", OVER_IMAGES)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_layers_over_grids_take_tensors_without_numbers_and_traces(name: str, warm: bool) -> None:
    build, size = OVER_IMAGES[name], (6, 7) if name in ("override", "groups") else (7,)
    image = torch.randn(2, 4, *size)
    layer = build()
    if warm:
        layer(image)
    traced = torch.jit.trace(layer, (image,))
    for other in (image, torch.randn(3, 4, *(n + 4 for n in size))):
        torch.testing.assert_close(traced(other), layer(other))
    shape = layer(image).shape
    with FakeTensorMode():
        assert build()(torch.randn(image.shape)).shape == shape
    assert build().to("meta")(image.to("meta")).shape == shape


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_pooling_of_other_numbers_is_that_of_torch(axes: int, dtype: torch.dtype) -> None:
    image = torch.arange(2 * 6 ** axes).view(2, *(6,) * axes).to(dtype)
    ours, original = (getattr(package, f"AvgPool{axes}d")(2) for package in (compat, nn))
    if dtype is torch.int64:
        assert ours(image).dtype is dtype
        torch.testing.assert_close(ours(image), original(image), rtol=0, atol=0)
        return
    for layer in (ours, original):
        with pytest.raises(NotImplementedError, match="not implemented for"):
            layer(image)


@pytest.mark.parametrize("name", ["Conv2d", "ConvTranspose2d"])
def test_a_call_reads_a_parametrized_weight_once(name: str) -> None:
    """The spectral norm improves its estimate at each reading in training, so that another number of them shows."""
    original, ours = _pair(name, torch.float64, 4, 6, 3)
    for layer in (original, ours):
        torch.manual_seed(1)
        spectral_norm(layer)
    for _ in range(3):
        _check_alike(original, ours, (torch.randn(2, 4, 5, 5, dtype=torch.float64),))


@pytest.mark.parametrize("where", ["class", "mixin", "below", "instance"])
@pytest.mark.parametrize("side", [3, 120])
def test_a_layer_may_say_how_it_convolves(side: int, where: str) -> None:
    def standardized(self: Any, image: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.Conv2d._conv_forward(self, image, weight - weight.mean((1, 2, 3), keepdim=True), bias)

    def doubled(self: Any, image: Tensor) -> Any:
        return 2 * super(type(self), self).forward(image)

    members: dict[str, Any] = {"_conv_forward": standardized}
    mixins = (type("Mixin", (), members),) if where == "mixin" else ()
    names = {"class": members, "below": {**members, "forward": doubled}}.get(where, {})
    ours, theirs = (type("Standardized", (*mixins, base), names)(4, 8, 3) for base in (compat.Conv2d, nn.Conv2d))
    if where == "instance":
        for layer in (ours, theirs):
            layer._conv_forward = standardized.__get__(layer)
    ours.load_state_dict(theirs.state_dict())
    image = torch.randn(2, 4, side, side)
    torch.testing.assert_close(ours(image), theirs(image))


@pytest.mark.parametrize("names", [("weight",), ("bias",), ("weight", "bias")], ids="-".join)
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_layer_takes_tensors_in_the_place_of_parameters(norm_first: bool, names: tuple[str, ...]) -> None:
    theirs = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    ours = compat.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
    ours.load_state_dict(theirs.state_dict())
    x, found = torch.randn(2, 5, 8), []
    for layer in (ours, theirs):
        for part in (layer.linear1, layer.linear2, layer.norm1, layer.norm2, layer.self_attn.out_proj):
            for name in names:
                tensor = getattr(part, name).detach() * 2
                delattr(part, name)
                setattr(part, name, tensor)
        found.append(layer(x))
    torch.testing.assert_close(*found)


def test_transposed_convolution_takes_an_output_size() -> None:
    original, ours = _pair("ConvTranspose2d", torch.float64, 3, 2, 3, stride=2)
    image = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    torch.testing.assert_close(ours(image, output_size=[10, 11]), original(image, output_size=[10, 11]))


@pytest.mark.parametrize(("batch_first", "norm_first", "mode"), [
    (False, False, "train"), (True, True, "train"), (True, False, "eval"), (False, True, "eval")])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_in_torchs_containers(batch_first: bool, norm_first: bool, mode: str) -> None:
    options = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": batch_first, "norm_first": norm_first,
               "activation": "gelu"}
    encoders, decoders = ([getattr(nn, f"Transformer{kind}")(layer, 2) for layer in _pair(
        f"Transformer{kind}Layer", torch.float64, 8, 2, **options)] for kind in ("Encoder", "Decoder"))
    source, target = (torch.randn((3, n, 8) if batch_first else (n, 3, 8), dtype=torch.float64) for n in (5, 4))
    causal = nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64)
    padding = torch.arange(5) >= torch.tensor([[5], [3], [2]])
    for modules in (encoders, decoders):
        assert all(type(layer) is getattr(compat, type(layer).__name__) for layer in modules[1].layers)
        for module in modules:
            module.train(mode == "train")
    _check_alike(*encoders, (source,), src_key_padding_mask=padding)
    _check_alike(*decoders, (target, source), tgt_mask=causal, memory_key_padding_mask=padding)
    _check_alike(*decoders, (target, source), tgt_mask=causal, tgt_is_causal=True)
    with torch.no_grad():  # where torch takes its fused inference
        torch.testing.assert_close(encoders[1](source), encoders[0](source), rtol=1e-10, atol=1e-10)


def test_the_whole_transformer(recwarn: pytest.WarningsRecorder) -> None:
    options = {"dim_feedforward": 12, "dropout": 0.0, "batch_first": True}
    original, ours = _pair("Transformer", torch.float64, 8, 2, 1, 2, **options)
    attentions = [m for m in ours.modules() if isinstance(m, nn.MultiheadAttention)]
    assert len(attentions) == 5 and {type(m) for m in attentions} == {compat.MultiheadAttention}
    source, target = (torch.randn(3, n, 8, dtype=torch.float64) for n in (5, 4))
    masks = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(4, dtype=torch.float64),
             "src_key_padding_mask": torch.arange(5) >= torch.tensor([[5], [3], [2]])}
    _check_alike(original, ours, (source, target), **masks)
    with torch.no_grad():  # where torch would take its fused inference
        padded = {name: mask for name, mask in masks.items() if name != "tgt_mask"}
        actual, expected = ours.eval()(source, target, **padded), original.train()(source, target, **padded)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    recwarn.clear()
    encoder = compat.TransformerEncoder(compat.TransformerEncoderLayer(8, 2), 2, enable_nested_tensor=True)
    assert not recwarn and isinstance(encoder, nn.TransformerEncoder)
    custom = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2), 1)
    kept = compat.Transformer(8, 2, 1, 1, custom_encoder=custom)
    assert kept.encoder is custom and type(custom.layers[0].self_attn) is nn.MultiheadAttention


def test_the_parts_of_an_encoder_layer_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """By modules that take torch's arguments, and by other steps of a class."""
    class Own(nn.Module):
        batch_first = True

        def forward(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any, key_padding_mask: Any, need_weights: bool,
                    is_causal: bool) -> tuple[Tensor, None]:
            return q + 1, None

    ours, theirs = (kind.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True) for kind in (compat, nn))
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 5, 8)
    for kind in (nn.LayerNorm, nn.Linear, nn.Dropout):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", lambda self, x, before=kind.forward: 2 * before(self, x))
            torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-4)
    ours.self_attn = theirs.self_attn = Own()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
@pytest.mark.parametrize("need_weights", [False, True])
def test_samples_without_keys_are_zero(kind: torch.dtype, need_weights: bool) -> None:
    layer = compat.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(3, 4, 8, requires_grad=True)
    padding = torch.tensor([[False] * 4, [True] * 4, [False, False, True, True]])
    padding = padding if kind is torch.bool else torch.zeros(3, 4).masked_fill(padding, -torch.inf)
    y, _ = layer(x, x, x, key_padding_mask=padding, need_weights=need_weights)
    leaves = [x, *layer.parameters()]
    grad, *others = torch.autograd.grad(y.square().sum(), leaves, retain_graph=True)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert y[1].eq(0).all() and grad[1].eq(0).all() and not grad[0].eq(0).any()
    assert all(t[1].eq(0).all() and t[0].ne(0).any() for t in (first, second))
    assert all(t.isfinite().all() for t in (y, grad, *others, first, second))
    original = nn.MultiheadAttention(8, 2, batch_first=True)
    assert original(x, x, x, key_padding_mask=padding, need_weights=True)[0][1].isnan().all()  # what this mends


@pytest.mark.parametrize("need_weights", [False, True])
def test_keys_and_values_that_are_left_out_may_be_anything(need_weights: bool) -> None:
    original, ours = _pair("MultiheadAttention", torch.float32, 8, 2, batch_first=True)
    query, padding = torch.randn(2, 4, 8), torch.tensor([[False] * 5, [False, False, True, False, True]])
    key = torch.randn(2, 5, 8).masked_fill(padding.unsqueeze(-1), 0.0)
    expected, weights = original(query, key, key, key_padding_mask=padding)
    for number in (torch.nan, torch.inf):
        q = query.clone().requires_grad_()
        k = key.masked_fill(padding.unsqueeze(-1), number)
        y, own = ours(q, k, k, key_padding_mask=padding, need_weights=need_weights)
        torch.testing.assert_close(y, expected)
        assert own is None or torch.allclose(own, weights)
        (gradient,) = torch.autograd.grad(y.square().sum(), q)
        assert gradient.isfinite().all()


NARROW = [torch.arange(5) % 3 != 1, torch.arange(5.0), torch.tensor(True), torch.tensor(0.5)]
KEEP = (torch.rand(5, 1, 4, 5) < 0.6).index_fill(-1, torch.tensor(0), True)


@pytest.mark.parametrize(("axes", "mask"), [
    *((axes, mask) for axes in ((), (3,), (2, 3)) for mask in NARROW),
    *(((1, 2), mask) for mask in (KEEP, torch.randn(5, 1, 4, 5), *NARROW))])
def test_masks_broadcast(axes: tuple[int, ...], mask: Tensor) -> None:
    q, k, v = (torch.randn(*axes, rows, 8) for rows in (4, 5, 5))
    lead = torch.broadcast_shapes(axes, mask.shape[:-2])
    expected = F.scaled_dot_product_attention(*(t.expand(*lead, *t.shape[-2:]) for t in (q, k, v)),
                                              mask.expand(*lead, 4, 5))
    torch.testing.assert_close(compat.scaled_dot_product_attention(q, k, v, mask), expected)


def test_a_layer_is_written_without_what_its_calls_found_out() -> None:
    layer, image = compat.Conv2d(2, 3, 3), torch.randn(2, 2, 6, 6)
    expected = layer(image)
    assert vars(layer).keys() - layer.__getstate__().keys() == {"_mechanism"}
    torch.testing.assert_close(copy.deepcopy(layer)(image), expected)


@pytest.mark.parametrize("kind", [compat.Conv2d, OwnConv2d])
def test_images_of_any_size_have_one_error(kind: Any) -> None:
    for rows, columns in ((2, 20), (2, 20_000)):
        with pytest.raises(StructureError, match="the window must not be larger than the grid with its padding"):
            kind(4, 8, 3)(torch.randn(1, 4, rows, columns))
    layer = kind(4, 8, 3)
    with pytest.raises(ShapeError, match=r"to_dense"):
        layer(torch.randn(1, 4, 200, 200).to_sparse())
    layer.weight.data = layer.weight.data[:, :, :2]
    with pytest.raises(ShapeError, match=r"size K=9; got K=6"):
        layer(torch.randn(1, 4, 200, 200))


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_falls_on_the_weights_and_is_seeded(need_weights: bool) -> None:
    layer, x = compat.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), torch.randn(2, 6, 8)
    calls = []
    for _ in range(2):
        torch.manual_seed(1)
        calls.append(layer(x, x, x, need_weights=need_weights, average_attn_weights=False))
    torch.testing.assert_close(*calls)
    expected, whole = layer.eval()(x, x, x, average_attn_weights=False)
    weights = calls[0][1]
    if weights is not None:
        dropped = weights == 0
        assert 0.3 < dropped.float().mean() < 0.7
        torch.testing.assert_close(weights[~dropped], 2 * whole[~dropped])
    layer.train()
    mean = torch.stack([layer(x, x, x, need_weights=need_weights)[0] for _ in range(400)]).mean(0)
    assert (mean - expected).abs().max() < 0.1 * expected.abs().max()


def _program(name: str) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]:
    """A layer, its inputs and options."""
    if name == "TransformerEncoderLayer":
        padding = torch.arange(6) >= torch.tensor([[6], [4]])
        return (compat.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True), (torch.randn(2, 6, 8),),
                {"src_key_padding_mask": padding})
    if name == "MultiheadAttention":
        mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -torch.inf)
        return compat.MultiheadAttention(8, 2), (torch.randn(6, 2, 8),) * 3, {"attn_mask": mask}
    layer = {"Conv2d": lambda: compat.Conv2d(4, 3, 3, padding=1), "AvgPool2d": lambda: compat.AvgPool2d(2),
             "ConvTranspose2d": lambda: compat.ConvTranspose2d(4, 3, 3, stride=2)}[name]()
    return layer, (torch.randn(2, 4, 6, 6),), {}


@pytest.mark.parametrize("name", drawn(["Conv2d", "ConvTranspose2d", "MultiheadAttention", "AvgPool2d",
                                        "TransformerEncoderLayer"], 4))
def test_compiled_and_exported(name: str) -> None:
    layer, inputs, options = _program(name)
    expected = layer(*inputs, **options)
    expected = expected[0] if isinstance(expected, tuple) else expected
    first = _program(name)[0]  # not called before
    first.load_state_dict(layer.state_dict())
    programs = [*(torch.compile(one, fullgraph=True, backend="aot_eager")
                  for one in (layer, first, copy.deepcopy(first))),
                torch.export.export(layer, inputs, options).module()]
    for program in programs:
        actual = program(*inputs, **options)
        torch.testing.assert_close(actual[0] if isinstance(actual, tuple) else actual, expected)
    torch.testing.assert_close(copy.deepcopy(layer)(*inputs, **options), layer(*inputs, **options))


class Twice(nn.Module):
    """A module that hands its input to a layer or function as often as this takes tensors."""

    def __init__(self, layer: Callable[..., Any], times: int) -> None:
        super().__init__()
        self.layer, self.times = layer, times

    def forward(self, x: Tensor) -> Any:
        return self.layer(*[x] * self.times)


_SIZES: Any = {"d_model": 8, "nhead": 2, "dim_feedforward": 16, "dropout": 0.0}
_RECORDED: dict[str, tuple[Callable[..., Any], int]] = {
    "Conv1d": (compat.Conv1d(8, 4, 3), 1), "ConvTranspose1d": (compat.ConvTranspose1d(8, 4, 3), 1),
    "AvgPool1d": (compat.AvgPool1d(2), 1), "MultiheadAttention": (compat.MultiheadAttention(8, 2), 3),
    "scaled_dot_product_attention": (compat.scaled_dot_product_attention, 3),
    "encoder layer": (compat.TransformerEncoderLayer(**_SIZES), 1),
    "decoder layer": (compat.TransformerDecoderLayer(**_SIZES), 2),
    "encoder": (compat.TransformerEncoder(compat.TransformerEncoderLayer(**_SIZES), 2), 1),
    "Transformer": (compat.Transformer(num_encoder_layers=1, num_decoder_layers=1, **_SIZES), 2)}


@pytest.mark.parametrize("name", _RECORDED)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_recorded_by_fx_and_by_a_trace(name: str) -> None:
    model, x = Twice(*_RECORDED[name]), torch.randn(5, 8, 8)
    symbolic = torch.fx.symbolic_trace(model)
    assert len(list(symbolic.graph.nodes)) == 3
    for training in (True, False):
        traced = torch.jit.trace(model.train(training), (x,))
        for program in (symbolic, traced):
            torch.testing.assert_close(program(x), model(x))


@pytest.mark.parametrize(("name", "dynamic"), drawn(
    itertools.product([name for name in compat.__all__ if name.endswith("d")], [None, True]), 5))
def test_layers_over_grids_compile_before_their_first_call(name: str, dynamic: bool | None) -> None:
    axes = int(name[-2])
    first = getattr(compat, f"AvgPool{axes}d")(1)
    layer = getattr(compat, name)(*((2,) if "Pool" in name else (4, 6, 3)))
    torch.compiler.reset()
    compiled = torch.compile(nn.Sequential(first, layer), fullgraph=True, backend="eager", dynamic=dynamic)
    for size, stride in ((6, 1), (7, 1), (7, 2)):
        layer.stride = (stride,) * axes
        image = torch.randn(2, 4, *(size,) * axes)
        torch.testing.assert_close(compiled(image), copy.deepcopy(layer)(image))
    assert "_mechanism" not in layer.__dict__  # no call without the compiler


@pytest.mark.parametrize("kind", ["a batch", "an image", "autocast"])
@pytest.mark.parametrize("name", [name for name in compat.__all__ if name.endswith("d")])
def test_compiled_layers_over_grids_are_one_operator_of_torch(name: str, kind: str) -> None:
    programs: list[list[str]] = []

    def compiler(program: torch.fx.GraphModule, _: Any) -> Any:
        programs.append([str(node.target) for node in program.graph.nodes if node.op.startswith("call")])
        return program

    axes, args = int(name[-2]), (3, 2, 1, False, False) if "Pool" in name else (4, 6, 3)
    args = args[:4] if name == "AvgPool1d" else args
    autocast = kind == "autocast"
    x = torch.randn(*(2,) * (kind != "an image"), 4, *(7,) * axes)
    x = x.bfloat16() if autocast and name != "AvgPool3d" else x  # what the layer before it gives
    for library in (nn, compat):
        torch.compiler.reset()
        layer = getattr(library, name)(*args)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            torch.compile(layer, fullgraph=True, backend=compiler)(x)
    assert programs[0] == programs[1] and len(programs[0]) == 1


@pytest.mark.parametrize("name", [name for name in compat.__all__ if name.startswith("Conv")])
def test_lazy_convolutions_become_ours(name: str) -> None:
    x, layers = torch.randn(2, 4, *(7,) * int(name[-2])), []
    for library in (nn, compat):
        torch.manual_seed(0)
        lazy = getattr(library, f"Lazy{name}")(6, 3, stride=2)
        assert isinstance(lazy, getattr(library, name))
        layers.append(copy.deepcopy(lazy))
        torch.manual_seed(0)
        layers[-1](x)
        assert type(layers[-1]) is getattr(library, name)
    _check_alike(*layers, (x,))
    unused = getattr(compat, f"Lazy{name}")(6, 3, stride=2)
    unused.load_state_dict(layers[0].state_dict())
    torch.testing.assert_close(unused(x), layers[0](x))
    assert repr(layers[0]) == repr(layers[1])
    assert type(pickle.loads(pickle.dumps(getattr(compat, f"Lazy{name}")(6, 3)))) is getattr(compat, f"Lazy{name}")


@pytest.mark.parametrize("name", ["AvgPool1d", "AvgPool2d", "AvgPool3d"])
@pytest.mark.parametrize("size", [5, 40])
def test_pools_with_ceil_mode(name: str, size: int) -> None:
    options = {"ceil_mode": True, "count_include_pad": False, "padding": 1}
    original, ours = getattr(nn, name)(3, 2, **options), getattr(compat, name)(3, 2, **options)
    x = torch.randn(2, 3, *(size if axis == 0 else 6 for axis in range(int(name[-2]))))
    _check_alike(original, ours, (x,))
    converted, report = convert(nn.Sequential(original))
    assert report.converted == {"0": (name, f"structconv.compat.torch.{name}", "")} and not report.refused
    torch.testing.assert_close(converted(x), original(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("outputs", [2, 5, 16])
@pytest.mark.parametrize("shape", [None, (1, 9), (-1, 9), (2, 1, 1, 9), (2, 1, -1, 9), (6, 1, 9), (2, 6, -1, 9)])
def test_few_outputs_of_shared_keys_need_no_plan(shape: tuple[int, ...] | None, outputs: int, dtype: torch.dtype,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor copies of the keys: heads that share keys are computed as outputs of one head."""
    monkeypatch.delattr("structconv.compat.attending.apply")
    q, (k, v) = torch.randn(2, outputs, 6, 8).to(dtype).transpose(1, 2), torch.randn(2, 2, 3, 9, 8).to(dtype)
    mask = None if shape is None else torch.rand([outputs if size < 0 else size for size in shape]) > 0.3
    wide = [t.double().repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (q, k, v)]
    for table in [mask] if mask is None else [mask, torch.randn(mask.shape).to(dtype)]:
        if table is not None and table.dtype == torch.bool:
            table[..., 0] = True  # torch gives NaN to an output without keys
        numbers = table.double() if table is not None and table.is_floating_point() else table
        with torch.no_grad():
            expected = F.scaled_dot_product_attention(*wide, numbers)
            actual = compat.scaled_dot_product_attention(q, k, v, table, enable_gqa=True)
        tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual, expected.to(dtype), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", ["none", "causal", "booleans", "numbers", "padding", "added padding", "of heads"])
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_compiled_attention_is_traced_without_a_plan(kind: str, groups: int, dropout: float,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of a plan takes ten times as long, and one that looks at the seed is broken in two."""
    q, (k, v) = torch.randn(2, 4, 6, 8), torch.randn(2, 2, groups, 6, 8)
    table, padding = torch.ones(2, 1, 6, 6).tril().bool(), torch.arange(6) < torch.tensor([6, 4]).view(2, 1, 1, 1)
    table[1, :, 2] = False  # which leaves the output at zero
    if "padding" in kind:
        k[1, :, 4:], v[1, :, 4:] = torch.nan, torch.nan
    mask = {"booleans": table, "numbers": torch.randn(1, 1, 6, 6), "padding": padding, "of heads": torch.rand(4, 6, 6),
            "added padding": torch.zeros(2, 1, 1, 6).masked_fill(~padding, -torch.inf)}.get(kind)
    if kind == "of heads":
        mask = mask[None] > 0.3  # type: ignore[index]
    options: dict[str, Any] = {"attn_mask": mask, "is_causal": kind == "causal", "enable_gqa": True}
    q.requires_grad_()

    def results(attention: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        y = attention(q, k, v, dropout_p=dropout, **options)
        return y, torch.autograd.grad(y.square().sum(), q)[0]

    expected = results(compat.scaled_dot_product_attention)
    monkeypatch.delattr("structconv.compat.attending.apply")
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    actual = results(torch.compile(compat.scaled_dot_product_attention, fullgraph=not dropout, backend="eager"))
    if dropout and kind in ("numbers", "added padding"):  # by torch's operator, which draws other weights
        assert (actual[0] - expected[0]).abs().max() > 0.1
    else:
        torch.testing.assert_close(actual, expected)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.parametrize(("name", "dynamic"), drawn(
    itertools.product([name for name in _RECORDED if not name.endswith("d")], [None, True]), 5))
def test_layers_of_attention_compile_before_their_first_call(name: str, dynamic: bool | None) -> None:
    layer, times = _RECORDED[name]
    model = Twice(copy.deepcopy(layer), times)
    torch.compiler.reset()
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=dynamic)
    for size in (5, 6):
        x = torch.randn(size, 8, 8)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize("weights", [False, True])
def test_attention_with_dropout_is_one_graph(weights: bool) -> None:
    """Without `fullgraph=True`, which would trace the value of a seed, too."""
    layer, x = compat.MultiheadAttention(8, 2, dropout=0.5, batch_first=True), torch.randn(2, 5, 8)
    torch.compiler.reset()
    assert torch._dynamo.explain(lambda x: layer(x, x, x, need_weights=weights))(x).graph_break_count == 0


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 2)])
@pytest.mark.parametrize("mask", [None, torch.ones(5, 5).tril() > 0, torch.zeros(5, 5)])
def test_attention_without_heads_or_samples(lead: tuple[int, ...], mask: Tensor | None) -> None:
    x = torch.randn(*lead, 5, 8, requires_grad=True)
    for own in (mask, None if mask is None else mask.expand(*lead, 5, 5)):
        y = compat.scaled_dot_product_attention(x, x, x, own)
        assert y.shape == x.shape
        assert torch.autograd.grad(y.sum(), x)[0].shape == x.shape


@pytest.mark.parametrize("shape", [(0, 2, 5, 4), (2, 0, 5, 4), (2, 2, 0, 4), (0, 5, 4)], ids=str)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_mask_of_an_empty_batch_has_a_gradient(shape: tuple[int, ...], dropout: float) -> None:
    """torch 2.13 leaves it out of the graph."""
    query, key = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-2], 5, 4)
    for lead in ((), shape[:-2]):
        mask = torch.randn(*lead, shape[-2], 5, requires_grad=True)
        compat.scaled_dot_product_attention(query, key, key, mask, dropout).sum().backward()
        torch.testing.assert_close(mask.grad, torch.zeros_like(mask))


@pytest.mark.parametrize("layer", [compat.Conv2d(3, 8, 3), compat.ConvTranspose1d(3, 4, 2), compat.AvgPool2d(2),
                                   compat.MultiheadAttention(8, 2), compat.TransformerEncoderLayer(8, 2, 16),
                                   OwnConv2d(3, 8, 3)], ids=lambda layer: type(layer).__name__)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated")
def test_a_script_is_refused(layer: nn.Module) -> None:
    kind = type(layer).__name__
    with pytest.raises(ConfigError, match=f"{kind}: the model must be compiled by torch.compile or torch.export; got "
                                          "torch.jit.script"):
        torch.jit.script(nn.Sequential(layer))


@pytest.mark.parametrize("call, expected", [
    (lambda: compat.Conv2d(3, 4, 3)(torch.randn(1, 3, 2, 2)), "Conv2d: the window must not be larger"),
    (lambda: compat.Conv2d(3, 4, 3)(torch.randn(1, 3, 8, 8).double()), "Conv2d: x and theta must share one dtype"),
    (lambda: compat.ConvTranspose1d(3, 4, 3)(torch.randn(1, 3, 8).double()), "ConvTranspose1d: x and theta must share"),
    (lambda: compat.AvgPool2d(3, padding=2)(torch.randn(1, 1, 8, 8)), "AvgPool2d: padding must be at most half"),
    (lambda: compat.MultiheadAttention(16, 4)(*torch.randn(3, 5, 2, 8)),
     r"MultiheadAttention: query must have shape \(L, 16\), or a batch of these; got \(5, 2, 8\)"),
])
def test_errors_name_the_layer_of_the_program(call: Callable[[], Tensor], expected: str) -> None:
    with pytest.raises(ValueError, match=f"^{expected}"):
        call()


def test_what_is_refused() -> None:
    x = torch.randn(3, 2, 8)
    layer = compat.MultiheadAttention(8, 2)
    check_refused(
        (ConfigError, "attn_mask must be given", lambda: layer(x, x, x, is_causal=True)),
        (ShapeError, "key_padding_mask", lambda: layer(x, x, x, key_padding_mask=torch.zeros(3, 2, dtype=torch.bool))),
        (RuntimeError, "", lambda: layer(x, x, x, attn_mask=torch.zeros(3, 3, device="meta"))),
        (ShapeError, "key must have shape", lambda: layer(x, x[..., :5], x)))
    for layout in (torch.jagged, torch.strided):
        with pytest.raises(ConfigError, match="nested"):
            layer(*[torch.nested.nested_tensor([x[0], x[1]], layout=layout)] * 3)
    check_refused(
        (ConfigError, "a mask must be boolean or floating",
         lambda: compat.scaled_dot_product_attention(x, x, x, torch.ones(2, 2, dtype=torch.int64), is_causal=True)),
        (ShapeError, "enable_gqa",
         lambda: compat.scaled_dot_product_attention(torch.randn(4, 2, 8), torch.randn(2, 2, 8), torch.randn(2, 2, 8))),
        (ShapeError, "C=4", lambda: compat.Conv2d(4, 3, 3)(torch.randn(2, 5, 6, 6))),
        (ShapeError, r"2 axes S.*\(5, 5\)", lambda: compat.AvgPool2d(2)(torch.randn(5, 5))),
        (RuntimeError, "not zero", lambda: compat.AvgPool2d(2, divisor_override=0)(torch.randn(2, 4, 5, 5))),
        (ConfigError, "window must be an integer", lambda: compat.AvgPool1d("a")(torch.randn(4, 5))))


def test_heads_that_share_keys_of_an_empty_batch_and_of_values_by_themselves():
    from structconv.compat.attending import attend

    key, value = torch.randn(0, 2, 5, 4), torch.randn(0, 2, 5, 4)
    for outputs in (1, 3):
        y, weights = attend(torch.randn(0, 8, outputs, 4), key, value, weights=True)
        assert y.shape == (0, 8, outputs, 4)
        assert weights is not None
        assert weights.shape == (0, 8, outputs, 5)
    query = torch.randn(2, 4, 5, 8)
    with pytest.raises(ShapeError, match="value must have as many axes as key, and its heads or K=4; got"):
        attend(query, query, torch.randn(2, 2, 5, 8))


def test_one_head_of_queries_is_that_of_all_keys() -> None:
    query, key, mask = torch.randn(2, 1, 6, 8), torch.randn(2, 4, 5, 8), torch.rand(6, 5) < 0.8
    mask[:, 0] = True
    for options in ({}, {"attn_mask": mask}, {"is_causal": True}):
        torch.testing.assert_close(compat.scaled_dot_product_attention(query, key, key, **options),
                                   F.scaled_dot_product_attention(query, key, key, **options))


@pytest.mark.parametrize(("name", "args", "options", "shape"), [
    ("AvgPool1d", (3, 2, 1), {}, (2, 4, 9)), ("AvgPool2d", (2,), {}, (2, 4, 6, 7)),
    ("AvgPool3d", (2,), {}, (2, 4, 4, 5, 6)),
    ("ConvTranspose1d", (4, 6, 3), {"stride": 2, "output_padding": 1}, (2, 4, 9)),
    ("ConvTranspose2d", (4, 6, 3), {"padding": 1, "groups": 2}, (2, 4, 6, 7)),
    ("ConvTranspose3d", (4, 6, 3), {"dilation": 2, "bias": False}, (2, 4, 4, 5, 6)),
    *[(name, (4, 6, 3), {"padding": 1, "dtype": dtype}, (2, 4, 6, 7)) for name in ("Conv2d", "ConvTranspose2d")
      for dtype in (torch.float64, torch.bfloat16, torch.float16)]])
def test_small_images_need_no_plan(monkeypatch, name, args, options, shape):
    def planned(*args, **options):
        raise AssertionError("a plan was asked for")

    monkeypatch.setattr("structconv.compat.torch.plan_for", planned)
    ours, theirs = (getattr(module, name)(*args, **options) for module in (compat, nn))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(shape).to(options.get("dtype", torch.float32))
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize("need_weights", [False, True])
def test_a_hook_of_the_last_linear_layer_is_called(need_weights: bool) -> None:
    layer, x = compat.MultiheadAttention(8, 2, batch_first=True), torch.randn(2, 5, 8)
    y = layer(x, x, x, need_weights=need_weights)[0]
    layer.out_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    torch.testing.assert_close(layer(x, x, x, need_weights=need_weights)[0], 2 * y)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_attention_exports_for_any_batch_and_length(need_weights, strict):
    class Itself(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = compat.MultiheadAttention(16, 2, batch_first=True)

        def forward(self, x):
            return self.attention(x, x, x, need_weights=need_weights)

    model, sizes = Itself().eval(), {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
    program = torch.export.export(model, (torch.randn(2, 5, 16),), dynamic_shapes=(sizes,), strict=strict).module()
    for shape in ((3, 7, 16), (1, 200, 16), (4, 1, 16)):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("axes, side", [(1, 256), (1, 4), (2, 16), (2, 3), (3, 6), (3, 3)])
def test_means_of_few_numbers(axes, side, dtype):
    """By our kernel or by torch's, whichever takes less time, for windows side by side and for others."""
    ours, theirs = (getattr(library, f"AvgPool{axes}d") for library in (compat, nn))
    for options in ({}, {"stride": 1}, {"padding": 1}, {"padding": 1, "count_include_pad": False}):
        for shape in ((2, 8, *[side] * axes), (16, *[side] * axes), (2, 8, *[side + 1] * axes)):
            x = torch.randn(shape).to(dtype)
            for image in (x, x.clone().requires_grad_(), x.transpose(0, 1)):
                expected = theirs(2, **options)(image.double()).to(dtype)
                atol = 1e-2 if dtype is torch.bfloat16 else 1e-6
                torch.testing.assert_close(ours(2, **options)(image), expected, rtol=0, atol=atol)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")
@pytest.mark.parametrize("side", [4, 64])
def test_pools_take_tensors_of_onednn(side):
    x = torch.randn(2, 4, side, side)
    torch.testing.assert_close(compat.AvgPool2d(2)(x.to_mkldnn()).to_dense(), nn.AvgPool2d(2)(x))


def test_a_program_changes_its_import_line_only():
    """Names that we do not compute are torch's own."""
    x, results, layers = torch.randn(2, 3, 8, 8), [], cast(Any, compat)
    for own in (nn, layers):
        torch.manual_seed(0)
        model = own.Sequential(own.Conv2d(3, 4, 3), own.ReLU(), own.AvgPool2d(2), own.Flatten(), own.Linear(36, 2))
        y = model(x)
        results.append([y, own.functional.cross_entropy(y, own.Parameter(y.new_ones(2, 2)).softmax(-1))])
    assert type(model[0]) is compat.Conv2d and type(model[-1]) is nn.Linear
    torch.testing.assert_close(*results)
    with pytest.raises(AttributeError, match=r"'structconv.compat.torch' has no attribute 'Lineer'"):
        _ = layers.Lineer


@pytest.mark.parametrize(("name", "options", "shape"), [
    ("Conv1d", (4, 8, 3), (4, 9)), ("Conv2d", (4, 8, 3), (4, 9, 9)), ("Conv3d", (4, 8, 3), (4, 5, 5, 5)),
    ("ConvTranspose2d", (4, 8, 3, 2), (4, 5, 5)), ("ConvTranspose2d", (4, 8, 3), (4, 5, 5)),
    ("AvgPool1d", (2,), (4, 9)), ("AvgPool2d", (3, 2), (4, 40, 90))])
@pytest.mark.parametrize("trains", [False, True])
def test_images_without_a_batch_need_no_plan(name: str, options: tuple[int, ...], shape: tuple[int, ...], trains: bool,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    original, ours = (getattr(module, name)(*options) for module in (nn, compat))
    ours.load_state_dict(original.state_dict())
    image = torch.randn(shape, requires_grad=trains)
    ours(image)
    monkeypatch.setattr(compat, "_computed", lambda *args, **place: pytest.fail("a plan was made"))
    y, expected = ours(image), original(image)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    assert y.is_contiguous()
    y.mul_(2)  # as a user may
    if trains:
        (gradient,), (wanted,) = (torch.autograd.grad(t.square().sum(), image) for t in (y, expected * 2))
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [
    {"padding": 1, "padding_mode": "circular"}, {"padding": (2, 1), "padding_mode": "reflect"},
    {"padding": (1, 2), "padding_mode": "replicate", "stride": (2, 1)}, {"padding": "same", "dilation": (1, 3)}])
@pytest.mark.parametrize("shape", [(2, 4, 9, 8), (1, 4, 9, 8), (4, 9, 8)])
def test_padding_by_torch_needs_no_plan(options: dict[str, Any], shape: tuple[int, ...],
                                        monkeypatch: pytest.MonkeyPatch) -> None:
    size = (3, 2) if options["padding"] == "same" else 3
    original, ours = _pair("Conv2d", torch.float32, 4, 8, size, **options)
    image = torch.randn(shape, requires_grad=True)
    with monkeypatch.context() as patch:
        patch.setattr(compat, "_computed", lambda *args, **place: pytest.fail("a plan was made"))
        _check_alike(original, ours, (image,))
    with pytest.raises(ShapeError):
        ours(image[..., :0, :, :])
