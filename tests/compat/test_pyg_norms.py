"""Normalizations against PyTorch Geometric's own: values, gradients, running statistics, state_dict both ways, repr."""

import copy

import pytest
import torch

import structconv.compat.pyg as ours
from structconv.errors import ConfigError
from tests.support.threads import on_threads

theirs = pytest.importorskip("torch_geometric.nn")
P = 4
BATCHES = {"none": None, "sorted": torch.tensor([0, 0, 0, 2, 2, 3]), "mixed": torch.tensor([2, 0, 1, 0, 2, 2])}
NORMS = [("GraphNorm", (P,), {}), ("InstanceNorm", (P,), {}), ("InstanceNorm", (P,), {"affine": True}),
         ("InstanceNorm", (P,), {"affine": True, "track_running_stats": True, "momentum": 0.3}),
         ("LayerNorm", (P,), {}), ("LayerNorm", (P,), {"affine": False}), ("LayerNorm", (P,), {"mode": "node"}),
         ("PairNorm", (), {}), ("PairNorm", (2.0,), {"scale_individually": True}), ("GraphSizeNorm", (), {}),
         ("MeanSubtractionNorm", (), {})]
DTYPES = pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-10)])
#: Those that read no `batch`.
OF_ROWS = [("MessageNorm", (True,), {}), ("DiffGroupNorm", (P, 3), {"lamda": 0.5}),
           ("DiffGroupNorm", (P, 2), {"affine": False, "momentum": None}),
           ("DiffGroupNorm", (P, 2), {"track_running_stats": False})]


def pair(name, args, options, dtype):
    layer, peer = (getattr(library, name)(*args, **options).to(dtype) for library in (ours, theirs))
    for parameter in layer.parameters():
        torch.nn.init.uniform_(parameter, 0.5, 1.5)
    peer.load_state_dict(layer.state_dict())
    layer.load_state_dict(peer.state_dict())
    assert repr(layer) == repr(peer)
    return layer, peer


def results(layer, x, *args):
    y = layer(x, *args)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [y, *torch.autograd.grad((y * y.detach().cos()).sum(), leaves)]


@DTYPES
@pytest.mark.parametrize("size", [None, 5])
@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("name, args, options", NORMS)
def test_norms_of_graphs_are_theirs(name, args, options, batch, size, dtype, tolerance):
    layer, peer = pair(name, args, options, dtype)
    x = (3 + 2 * torch.randn(6, P, dtype=dtype)).requires_grad_()
    for mode in (True, True, False):
        layer.train(mode), peer.train(mode)
        torch.testing.assert_close(results(layer, x, batch, size), results(peer, x, batch, size), rtol=tolerance,
                                   atol=tolerance)
        for name, buffer in peer.named_buffers():  # theirs keep the graph of each step
            setattr(peer, name, buffer.detach())
        torch.testing.assert_close(layer.state_dict(), peer.state_dict(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name, args, options", [
    ("GraphNorm", (70,), {}), ("InstanceNorm", (70,), {"affine": True}), ("InstanceNorm", (70,), {}),
    ("LayerNorm", (70,), {}), ("LayerNorm", (70,), {"affine": False}), ("PairNorm", (), {}),
    ("MeanSubtractionNorm", (), {})])
def test_norms_of_large_and_empty_graphs_are_no_less_exact(name, args, options):
    """Two rows of about one number leave a gradient of few digits."""
    layer, peer = pair(name, args, options, torch.float32)
    batch = torch.arange(9).repeat_interleave(torch.tensor([0, 1, 700, 0, 3, 17, 300, 2, 0]))
    x = (5 + torch.randn(len(batch), 70)).requires_grad_()
    actual, same = results(layer, x, batch, 9), results(peer, x, batch, 9)
    expected = results(peer.double(), x.detach().double().requires_grad_(), batch, 9)
    for a, s, e in zip(actual, same, expected, strict=True):
        torch.testing.assert_close(a, s, rtol=1e-4, atol=1e-3)
        assert (a - e).norm() <= 2 * (s - e).norm() + 1e-6 * e.norm()


@pytest.mark.parametrize("name", ["GraphNorm", "LayerNorm", "PairNorm", "MeanSubtractionNorm"])
def test_second_derivatives_of_norms_are_theirs_and_the_batch_is_that_of_the_call(name):
    layer, peer = pair(name, (P,) if name in ("GraphNorm", "LayerNorm") else (), {}, torch.float32)
    x, batch, found = torch.randn(6, P, requires_grad=True), BATCHES["sorted"].clone(), []
    for norm in (layer, peer):
        (first,) = torch.autograd.grad(norm(x, batch).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, *norm.parameters()], allow_unused=True))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)
    y = layer(x, batch)
    batch.zero_()
    with pytest.raises(RuntimeError, match="changed"):
        torch.autograd.grad(y.sum(), x, create_graph=True)


def test_gradients_of_norms_are_equal_for_any_number_of_threads():
    layer, batch = ours.GraphNorm(64), torch.arange(900).repeat_interleave(10)
    x = torch.randn(9000, 64, requires_grad=True)
    assert all(map(torch.equal, *on_threads(lambda: results(layer, x, batch), (1, 2))))


@DTYPES
@pytest.mark.parametrize("name, args, options", OF_ROWS)
def test_norms_of_rows_are_theirs(name, args, options, dtype, tolerance):
    layer, peer = pair(name, args, options, dtype)
    x, more = torch.randn(6, P, dtype=dtype, requires_grad=True), torch.randn(6, P, dtype=dtype)
    more = (more,) if name == "MessageNorm" else ()
    for mode in (True, True, False):
        layer.train(mode), peer.train(mode)
        torch.testing.assert_close(results(layer, x, *more), results(peer, x, *more), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(layer.state_dict(), peer.state_dict(), rtol=tolerance, atol=tolerance)
    layer.reset_parameters(), peer.reset_parameters()
    if name == "MessageNorm":
        torch.testing.assert_close(layer.state_dict(), peer.state_dict())


def test_parameters_are_drawn_as_theirs():
    for name, args, options in (*NORMS, *OF_ROWS):
        states = []
        for library in (ours, theirs):
            torch.manual_seed(3)
            states.append(getattr(library, name)(*args, **options).state_dict())
        torch.testing.assert_close(*states)


def test_group_norms_with_a_hook_or_another_norm_call_it():
    layer, calls = ours.DiffGroupNorm(P, 2), []
    layer.norm.register_forward_hook(lambda module, args, y: calls.append(y.shape))
    layer(torch.randn(6, P))
    assert calls == [(6, 2 * P)]
    with pytest.raises(ValueError, match="more than 1 value"):
        ours.DiffGroupNorm(P, 2)(torch.randn(1, P))


@pytest.mark.parametrize("options", [{}, {"affine": False, "momentum": None}, {"track_running_stats": False}])
@pytest.mark.parametrize("rows, dtype", [(2, torch.float32), (30, torch.float64), (3000, torch.float32)])
def test_norms_of_groups_of_large_numbers_are_as_exact(rows, dtype, options):
    layer, peer = pair("DiffGroupNorm", (16, 3), options, dtype)
    x = (30 + torch.randn(rows, 16, dtype=dtype)).requires_grad_()
    exact = copy.deepcopy(peer).double()
    actual, same = results(layer, x), results(peer, x)
    expected = results(exact, x.detach().double().requires_grad_())
    for a, s, e in zip(actual, same, expected, strict=True):
        assert (a - e).norm() <= 5 * (s - e).norm() + (1e-10 if dtype is torch.float64 else 1e-6) * e.norm()


def test_the_group_distance_ratio_is_theirs():
    x, y = torch.randn(9, P), torch.arange(9) % 3
    ratios = [library.DiffGroupNorm.group_distance_ratio(x, y) for library in (ours, theirs)]
    assert ratios[0] == pytest.approx(ratios[1], rel=1e-5)


def test_running_statistics_keep_no_graph():
    """Theirs do: each step then holds those before it."""
    layer = ours.InstanceNorm(P, track_running_stats=True)
    layer(torch.randn(6, P, requires_grad=True), BATCHES["sorted"])
    assert not layer.running_mean.requires_grad and not layer.running_var.requires_grad


@pytest.mark.parametrize("batch, size", [(None, None), (BATCHES["sorted"][:0], None), (BATCHES["sorted"][:0], 0),
                                         (BATCHES["sorted"][:0], 2)])
def test_running_statistics_of_an_empty_batch_are_theirs(batch, size):
    layer, peer = pair("InstanceNorm", (P,), {"track_running_stats": True}, torch.float32)
    for one in (layer, peer):
        one(torch.arange(6.0 * P).view(6, P), BATCHES["sorted"])
    x = torch.empty(0, P)
    assert layer(x, batch, size).shape == x.shape
    if batch is None or size is not None:  # else theirs asks for the largest of no numbers
        peer(x, batch, size)
    torch.testing.assert_close(layer.state_dict(), peer.state_dict(), equal_nan=True)


@pytest.mark.parametrize("name", ["GraphNorm", "InstanceNorm", "LayerNorm", "PairNorm", "MeanSubtractionNorm"])
def test_norms_take_rows_of_more_axes_and_compile(name):
    layer, peer = pair(name, (P,) if name in ("GraphNorm", "InstanceNorm", "LayerNorm") else (), {}, torch.float32)
    batch = BATCHES["mixed"]
    if name in ("GraphNorm", "MeanSubtractionNorm"):
        x = torch.randn(6, 3, P)
        torch.testing.assert_close(layer(x, batch), peer(x, batch), rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()
    compiled, x = torch.compile(layer, fullgraph=True, backend="aot_eager"), torch.randn(6, P, requires_grad=True)
    torch.testing.assert_close(results(compiled, x, batch, 3), results(layer, x, batch, 3), rtol=1e-5, atol=1e-5)


def test_an_unknown_mode_is_an_error():
    with pytest.raises(ConfigError, match=r"LayerNorm: mode must be .*graph.*node"):
        ours.LayerNorm(P, mode="batch")


@pytest.mark.parametrize("name, options", [("GraphNorm", {}), ("LayerNorm", {}), ("InstanceNorm", {"affine": True})])
def test_a_bias_may_change_between_both_passes(name, options):
    layer, peer = pair(name, (P,), options, torch.float32)
    x, gradients = (3 + 2 * torch.randn(6, P)).requires_grad_(), []
    for norm in (layer, peer):
        y = norm(x, BATCHES["sorted"])
        with torch.no_grad():
            norm.bias.add_(1)
        gradients.append(torch.autograd.grad((y * y.detach().cos()).sum(), [x, norm.weight, norm.bias]))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)
    y = layer(x, BATCHES["sorted"])
    with torch.no_grad():
        layer.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("name", ["InstanceNorm", "PairNorm", "GraphNorm"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_graphs_of_one_row_have_finite_gradients_in_half_precision(name, dtype):
    results = []
    for library in (ours, theirs):
        layer = getattr(library, name)(*([] if name == "PairNorm" else [3])).to(dtype)
        x = torch.linspace(-1, 1, 9, dtype=dtype).view(3, 3).requires_grad_()
        y = layer(x, torch.tensor([0, 1, 1]))
        results.append([y, *torch.autograd.grad((y * torch.linspace(1, 2, 9).view(3, 3).to(dtype)).sum(), x)])
    assert all(t.isfinite().all() for t in results[0])
    torch.testing.assert_close(*results, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name", ["GraphNorm", "InstanceNorm", "SumAggregation", "MaxAggregation"])
def test_groups_that_nobody_counted_compile_in_one_graph(name):
    layer = getattr(ours, name)(*[4] if "Norm" in name else [])
    x, batch = torch.randn(5, 4), torch.tensor([0, 0, 0, 1, 1])
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, batch), layer(x, batch))
