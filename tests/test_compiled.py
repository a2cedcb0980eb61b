"""Programs that torch compiles whole: layers with masks of every kind, and layers on batches of samples."""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from structconv import STRUCTURE, Causal, Dense, DotProduct, Graph, Grid, Padding, Samples, Window, batch
from structconv.mechanisms import Context, Cuboid, EdgeBias, Given, Identity, Incidence, LearnedEncoding, RelativeBias
from structconv.nn import Conv, GATConv, GCNConv, MultiheadAttention
from structconv.primitives.native.dispatch import Loaded
from structconv.structures import Blocks, DenseMask, EdgeSupport, Global
from structconv.testing.checks import same
from structconv.testing.layers import larger, side_by_side, takes_samples
from structconv.testing.use import Use
from structconv.weights import Full, LowRank, Separable
from tests.support import library
from tests.support.drawn import EVERY, drawn
from tests.support.layers import COMPAT, LAYERS, in_float32, over_specimens, use

M, P, Q = library.M, library.P, library.Q
DOT = DotProduct(heads=2, dim=3).scaled()
KEPT, OF_EACH = torch.arange(M) < 4, torch.arange(M) < torch.tensor([[4], [5]])
MASKS = {
    "causal_window": lambda: Causal() & Window(3), "causal_padding": lambda: Causal() & Padding(KEPT),
    "window_padding_of_each": lambda: Window(1) & Padding(OF_EACH), "blocks_padding": lambda: Blocks(2) & Padding(KEPT),
    "edges_causal": lambda: EdgeSupport(library.random_graph()) & Causal(),
    "global_padding_of_each": lambda: (Window(1) | Global(1)) & Padding(OF_EACH),
    "table_window": lambda: DenseMask(torch.eye(M) > -1) & Window(2), "not_window": lambda: Causal() & ~Window(1),
    "turned": lambda: (Causal() & Window(2)).transpose(), "on_a_grid": lambda: Window((3,), grid=Grid(M)) & Causal(),
    "three": lambda: Causal() & Window(2) & Padding(KEPT)}
PLACES = {
    "kept": lambda mask: use(Conv(DOT.masked(keep=mask).softmax(), P, Q), library.random(2, M, P)),
    "dropped": lambda mask: use(Conv(DOT.masked(drop=mask).softmax(), P, Q), library.random(2, M, P)),
    "second": lambda mask: use(Conv((DOT + RelativeBias(2)).masked(keep=Window(4)).masked(keep=mask).softmax(), P, Q),
                               library.random(2, M, P)),
    "of_the_call": lambda mask: use(MultiheadAttention(P, 2), library.random(2, M, P), keep=mask)}


dear = pytest.mark.skipif(not EVERY, reason="runs with STRUCTCONV_EVERY_TEST=1 (make test-every)")
#: Each mask in one place.
PAIRS = [*zip(MASKS, itertools.cycle(PLACES), strict=False)]


def check_compiled(use: Use, dynamic: bool | None = None) -> None:
    """A layer is compiled as one graph without breaks, before its first call, and gives the eager numbers."""
    torch.compiler.reset()
    actual = use.run(torch.compile(use.layer, fullgraph=True, backend="eager", dynamic=dynamic))
    same(actual, use(), "compiled")


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", drawn([*LAYERS, *COMPAT], 12))
def test_layers_compile_whole(name, dynamic):
    check_compiled({**LAYERS, **COMPAT}[name](), dynamic)


@pytest.mark.parametrize("name", ["compat_pyg_RGCNConv", *drawn([*LAYERS, *COMPAT], 24)])
def test_layers_compile_before_kernels_are_loaded(name, monkeypatch):
    """A compiler cannot trace how they are loaded."""
    alike = in_float32({**LAYERS, **COMPAT}[name])
    monkeypatch.setattr(Loaded, "asked", False)
    check_compiled(alike)


@pytest.mark.parametrize(("mask", "place"), drawn(PAIRS, 5))
def test_masks_compile_whole(mask, place):
    check_compiled(PLACES[place](MASKS[mask]()))


#: Masks and bases that are made for one number of entries, and say nothing of a batch.
REFUSED = {"mha_padded", "masked_by_graph"}
#: Where a compiler would have to know how many edges each graph of the batch has.
BY_EDGES = {"edge_update", "node_update", "edges_to_given_outputs", "users", "users_masked", "named_users"}
BATCHES = {name: make for name, make in LAYERS.items() if name not in REFUSED | BY_EDGES and takes_samples(make())}


def batched(make):
    one = make()
    return side_by_side(one, larger(one))


#: Layers whose batches once compiled wrongly.
ONCE_WRONG = {"mha", "named_heads", "mixed"} & BATCHES.keys()


@pytest.mark.parametrize("name", sorted({*drawn(sorted(BATCHES), 100), *drawn(sorted(ONCE_WRONG, reverse=True), 3)}))
def test_batches_compile_whole(name):
    check_compiled(batched(BATCHES[name]))


@pytest.mark.parametrize("name", drawn(["context_attention", "chebyshev", "global_tokens", "learned"], 4))
def test_specimens_on_batches_compile_whole(name):
    check_compiled(batched(over_specimens()[f"over_{name}"]))


@pytest.mark.parametrize(("layer", "graphs", "dynamic"), drawn([
    (lambda: Conv(Incidence("sample"), P, Q), True, True), (lambda: MultiheadAttention(P, 2), False, None),
    (lambda: Conv(Context(1).softmax(), P, Q), False, None), (lambda: Conv(Cuboid(3), P, Q), True, True)], 4))
def test_one_program_after_the_other_for_samples_of_any_sizes(layer, graphs, dynamic):
    made = layer().to(library.F64)
    torch.compiler.reset()
    compiled = torch.compile(made, fullgraph=True, backend="eager", dynamic=dynamic)
    for sizes in ([4, 5], [3, 2, 6], [5, 2, 2]):
        grids = graphs and isinstance(made.mechanism, Cuboid)
        structure = batch([Grid(n) if grids else Grid(n).graph() for n in sizes]) if graphs else Samples(sizes)
        x = library.random(sum(sizes), P)
        torch.testing.assert_close(compiled(x, structure=structure), made(x, structure=structure))


@dear
def test_weights_of_each_part_compile_whole_under_autocast():
    expression = DOT.softmax() | RelativeBias(2, heads=2).softmax() | DOT.softmax()
    layer = Conv(expression, P, Q, weight=[LowRank(8), Separable(2), Full()])
    x = torch.randn(2, M, P)
    torch.compiler.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        y, expected = compiled(x), layer(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)


@dear
def test_a_given_basis_of_parts_compiles_whole():
    given = Dense(library.random(2, M, M)) | Dense(library.random(1, M, M)) @ Dense(library.random(1, M, M))
    check_compiled(use(Conv(Given(given), P, Q), library.random(2, M, P)))


@pytest.mark.parametrize(("mask", "biased", "dtype", "strict"), drawn([
    (Window(64), True, torch.float32, True), (Window(9) & Causal(), True, torch.float32, False),
    (Window(5, dilation=3), False, torch.float32, False), (Window((31,)), True, torch.float32, False),
    (Window(64), True, torch.float64, False), (Window(5) & Blocks(4), False, torch.float64, False)], 3))
def test_a_window_exports_for_any_number_of_entries(mask, biased, dtype, strict):
    scores = DOT + RelativeBias(3) if biased else DOT
    layer = Conv(scores.masked(keep=mask).softmax(), P, Q).to(dtype)
    free = {"x": {1: torch.export.Dim("entries", min=2, max=4096)}}
    program = torch.export.export(layer, (torch.randn(2, 40, P, dtype=dtype),), dynamic_shapes=free, strict=strict)
    for entries in (2, 10, 64, 66, 150):
        x = torch.randn(2, entries, P, dtype=dtype)
        torch.testing.assert_close(program.module()(x), layer(x))


@pytest.mark.parametrize("layer", [GATConv(6, 4, edge_dim=2), Conv((DotProduct(dim=3) + EdgeBias(2)).softmax(), 6, 4)])
def test_attributes_of_edges_compile_with_dynamic_sizes(layer):
    graph = Graph(Grid((3, 3)).graph().edge_index, num_nodes=9, edge_attr=torch.randn(24, 2))
    x = torch.randn(9, 6)
    y = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)(x, structure=graph)
    torch.testing.assert_close(y, layer(x, structure=graph))


@pytest.mark.parametrize(("layer", "args", "message"), [
    (GCNConv(6, 4), (torch.randn(9, 5), Grid((3, 3)).graph()), r"x must have shape \(..., M=9, P=6\); got \(9, 5\)"),
    (MultiheadAttention(6, 2), (torch.randn(1, 9, 5),), r"query must have shape \(..., M, P=6\); got \(1, 9, 5\)"),
    (LearnedEncoding(9, 6), (torch.randn(6),), r"x must have shape \(..., M, P=6\); got \(6,\)"),
    (LearnedEncoding(9, 6), (torch.randn(9, 6), 3), r"positions must be in \[0, length=9\); got 3 to 11"),
    (Conv(DotProduct(dim=3).masked(keep=STRUCTURE).softmax(), 6, 4),
     (torch.randn(9, 6), DenseMask(torch.ones(9, 8, dtype=torch.bool))), r"pairs must have shape .*; got \(9, 8\)"),
    (Conv(DotProduct(dim=3).softmax(), 6, 4), {"x": torch.randn(2, 5, 6), "z": torch.randn(3, 4, 6)},
     r"Conv: leading dimensions of z must broadcast with those of x, \(2,\); got \(3, 4, 6\)"),
    (MultiheadAttention(6, 2), (torch.randn(4, 3, 5, 6), torch.randn(2, 3, 4, 6)),
     r"leading dimensions of query must broadcast with those of key_value, \(2, 3\); got \(4, 3, 5, 6\)"),
    (Conv(Identity().of("a") | Identity().of("b"), {"a": 6, "b": 2}, 4),
     ({"a": torch.randn(2, 5, 6), "b": torch.randn(3, 5, 2)},), r"leading dimensions of .* must broadcast")])
def test_errors_of_programs_with_dynamic_sizes_keep_their_message(layer, args, message):
    args, named = ((), args) if isinstance(args, dict) else (args, {})
    with pytest.raises(Exception, match=message):
        torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)(*args, **named)


@pytest.mark.parametrize("train", [False, True])
def test_a_checkpoint_compiles_whole(train):
    scores = (DotProduct(heads=2, dim=4).scaled() + RelativeBias(3)).masked(keep=Window(2)).softmax().dropout(0.1)
    layer, x = Conv(scores | Identity(), 8, 8).train(train), torch.randn(2, 6, 8)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: checkpoint(layer, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad(compiled(x).square().sum(), list(layer.parameters()))
    if not train:
        torch.testing.assert_close(grads, torch.autograd.grad(layer(x).square().sum(), list(layer.parameters())))
