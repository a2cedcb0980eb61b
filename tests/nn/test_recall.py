"""What a layer keeps from call to call never outlives what it was made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parametrizations

from structconv import Graph, Grid
from structconv.errors import ShapeError
from structconv.mechanisms import Adjacency, DotProduct, Identity, RelativeBias, Shifts
from structconv.nn import Conv, Conv1d, Conv2d, GCNConv, OnGrid, SeparableConv2d
from structconv.nn.recall import KINDS, LARGEST, Calls, recalled, recalled_image


def ring(entries=6, weight=None):
    index = torch.arange(entries)
    return Graph(torch.stack([index, (index + 1) % entries]), num_nodes=entries, edge_weight=weight)


def fresh(layer, x, structure):
    """The layer's result with nothing kept."""
    return copy.deepcopy(layer)(x, structure=structure)


def test_a_repeated_call_is_recalled():
    layer, graph, x = Conv(Adjacency(), 3, 4), ring(), torch.randn(6, 3)
    assert recalled(layer, x, graph) is None
    first = layer(x, structure=graph)
    assert recalled(layer, x, graph) is not None
    other = torch.randn(6, 3)
    assert torch.equal(layer(x, structure=graph), first)
    assert torch.equal(layer(other, structure=graph), fresh(layer, other, graph))


def test_grids_are_compared_by_value():
    layer, x = Conv(Shifts([(0, 1), (1, 0)]), 2, 2), torch.randn(6, 2)
    first = layer(x, structure=Grid((2, 3)))
    assert recalled(layer, x, Grid((2, 3))) is not None
    assert recalled(layer, x, Grid((3, 2))) is None
    assert not torch.equal(layer(x, structure=Grid((3, 2))), first)


def test_another_structure_or_a_changed_one():
    weight, x = torch.ones(6), torch.randn(6, 3)
    layer, graph = Conv(Adjacency(normalize=None), 3, 4), ring(weight=weight)
    first = layer(x, structure=graph)
    assert recalled(layer, x, ring(weight=weight)) is None
    weight.mul_(2)
    assert recalled(layer, x, graph) is None
    torch.testing.assert_close(layer(x, structure=graph), 2 * first)


def test_weights_that_change():
    layer, graph, x = Conv(Adjacency(), 3, 4), ring(), torch.randn(6, 3)
    layer(x, structure=graph)
    with torch.no_grad():
        layer.weight.theta.mul_(2)
    torch.testing.assert_close(layer(x, structure=graph), fresh(layer, x, graph))
    layer.weight.theta = torch.nn.Parameter(torch.randn(1, 3, 4))
    torch.testing.assert_close(layer(x, structure=graph), fresh(layer, x, graph))
    swapped = {"weight.theta": torch.zeros(1, 3, 4), "bias": torch.zeros(4)}
    assert not torch.func.functional_call(layer, swapped, (x,), {"structure": graph}).any()
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    assert not layer(x, structure=graph).requires_grad
    layer.double()
    with pytest.raises(ShapeError, match="dtype"):
        layer(x, structure=graph)


def test_hooks_and_parametrisations_are_run():
    layer, graph, x = Conv(Adjacency(), 3, 4), ring(), torch.randn(6, 3)
    layer(x, structure=graph)
    called = []
    handle = layer.weight.register_forward_hook(lambda *_: called.append(1))
    layer(x, structure=graph)
    handle.remove()
    assert called
    parametrizations.spectral_norm(layer.weight, "theta")
    layer.eval()
    torch.testing.assert_close(layer(x, structure=graph), fresh(layer, x, graph))


def test_gradients_of_repeated_calls():
    layer, graph = Conv(Adjacency(), 3, 4), ring()
    x = torch.randn(6, 3, requires_grad=True)
    with torch.no_grad():
        assert not layer(x, structure=graph).requires_grad
        assert not layer(x, structure=graph).requires_grad
    grads = [torch.autograd.grad(layer(x, structure=graph).square().sum(), [x, *layer.parameters()])
             for _ in range(3)]
    for other in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], other, strict=True))


def test_what_is_not_kept():
    x = torch.randn(6, 3)
    for several in ((DotProduct(dim=2) + RelativeBias(2)).softmax(),
                    DotProduct().softmax() | DotProduct().softmax()):
        attention = Conv(several, 3, 4)
        attention(x)
        assert recalled(attention, x, None) is None
    layer, learnt = Conv(Adjacency(), 3, 4), ring(weight=torch.ones(6, requires_grad=True))
    layer(x, structure=learnt)
    assert recalled(layer, x, learnt) is None
    large = ring(LARGEST)
    layer(torch.randn(LARGEST, 3), structure=large)
    assert not layer._calls
    with torch.inference_mode():
        layer(x, structure=ring())
    assert not layer._calls


def test_copies_and_files_begin_with_none():
    layer = Conv(Identity(), 3, 4)
    layer(torch.randn(6, 3))
    assert len(layer._calls) == 1
    assert not copy.deepcopy(layer)._calls and not copy.copy(layer._calls)
    assert layer._calls.__reduce__() == (Calls, ())
    for entries in range(1, 20):
        layer(torch.randn(entries, 3))
    assert len(layer._calls) <= KINDS


def test_wrong_shapes_after_a_right_one():
    layer, graph = Conv(Adjacency(), 3, 4), ring()
    layer(torch.randn(6, 3), structure=graph)
    for x in (torch.randn(5, 3), torch.randn(6, 2), torch.randn(6, 3, dtype=torch.float64)):
        with pytest.raises(ShapeError):
            layer(x, structure=graph)


def test_compile_after_a_kept_call():
    layer, graph, x = Conv(Adjacency(), 3, 4), ring(), torch.randn(2, 6, 3)
    layer(x[0], structure=graph)
    expected = torch.stack([layer(row, structure=graph) for row in x])
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="eager")(x, structure=graph), expected)


@pytest.mark.parametrize("make", [
    lambda: Conv2d(4, 6, 3, padding=1), lambda: Conv2d(4, 6, 3, stride=2, padding="same", padding_mode="circular"),
    lambda: Conv2d(4, 8, (3, 2), groups=2), lambda: Conv2d(4, 6, 3, bias=False), lambda: SeparableConv2d(4, 6, 3),
    lambda: OnGrid(Conv(Shifts([(0, 1), (0, -1), (0, 0)]), 4, 6), 2)])
def test_images_are_recalled_as_they_are(make):
    layer = make()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter)
    image = torch.randn(2, 4, 7, 8, requires_grad=True)

    def computed():
        y = layer(image)
        return y, *torch.autograd.grad(y.square().sum(), [image, *layer.parameters()])

    assert recalled_image(layer.conv, image) is None
    first = computed()
    assert recalled_image(layer.conv, image) is not None
    for one, other in zip(first, computed(), strict=True):
        torch.testing.assert_close(one, other)
    other = torch.randn(2, 4, 7, 8)
    with torch.no_grad():
        torch.testing.assert_close(layer(other), copy.deepcopy(layer)(other))


def test_kept_images_follow_the_layer():
    layer, image = Conv2d(2, 3, 3, padding=1), torch.randn(1, 2, 5, 5)
    layer(image)
    with torch.no_grad():
        layer.conv.weight.theta.zero_()
        layer.conv.bias.fill_(2)
    assert torch.equal(layer(image), torch.full((1, 3, 5, 5), 2.0))
    called = []
    handle = layer.conv.register_forward_hook(lambda *_: called.append(1))
    layer(image)
    handle.remove()
    assert called
    layer.double()
    assert layer(image.double()).dtype == torch.float64
    with pytest.raises(ShapeError):
        layer(image)
    layer.float()
    for wrong in (torch.randn(1, 3, 5, 5), torch.randn(5)):
        with pytest.raises(ShapeError):
            layer(wrong)
    swapped = {name: torch.zeros_like(value) for name, value in layer.named_parameters()}
    assert not torch.func.functional_call(layer, swapped, (image,)).any()
    assert layer(image[0]).shape == (3, 5, 5)


def test_functional_transforms_after_a_kept_call():
    layer, graph, x = GCNConv(3, 4), ring(), torch.randn(5, 6, 3)
    expected = torch.stack([layer(row, graph) for row in x])
    torch.testing.assert_close(torch.func.vmap(lambda row: layer(row, graph))(x), expected)
    conv, images = Conv1d(3, 4, 3), torch.randn(5, 2, 3, 9)
    expected = torch.stack([conv(image) for image in images])
    torch.testing.assert_close(torch.func.vmap(conv)(images), expected)
    image = images[0].clone().requires_grad_()
    wanted = torch.autograd.grad(conv(image).square().sum(), image)[0]
    torch.testing.assert_close(torch.func.grad(lambda image: conv(image).square().sum())(images[0]), wanted)


def test_modes_see_the_operators_of_kept_calls():
    layer, graph, x = GCNConv(3, 4), ring(), torch.randn(6, 3)
    layer(x, graph)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    expected = layer(x, graph)
    with Watch():
        watched = layer(x, graph)
    assert any(name.startswith("structconv.spmm") for name in seen)
    assert torch.equal(watched, expected)
    with torch.profiler.profile() as profile:
        layer(x, graph)
    assert any(event.name == "structconv::spmm" for event in profile.events())
