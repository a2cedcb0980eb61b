"""The layer: the formula, weights for the parts, masks, returned weights, initial variance, copies, errors."""

import copy
from functools import partial

import pytest
import torch
from torch.export import Dim

import structconv
from structconv import STRUCTURE, Additive, Adjacency, ALiBi, ConfigError, ShapeError, StructureError
from structconv import nn as layers
from structconv.mechanisms import (
    BiAffine,
    Chebyshev,
    Context,
    Cuboid,
    Deformable,
    DotProduct,
    EdgeBias,
    General,
    Identity,
    Incidence,
    LearnedEncoding,
    Location,
    Pool,
    PredictedPosition,
    RelativeKey,
    Shifts,
)
from structconv.nn import Conv, Conv2d, GATConv, GCNConv, MultiheadAttention, NonLocalBlock, to_entries
from structconv.structures import Causal, DenseMask, Graph, Grid, Padding, Window
from structconv.weights import Depthwise, DepthwiseSeparable, Eye, Full, Grouped, HeadBlocks, LowRank, Separable
from tests.support.errors import check_refused
from tests.support.layers import drawn

F64 = torch.float64
close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)
M, P, Q = 6, 4, 8
GRAPH = Graph(torch.tensor([[0, 1, 1, 2, 3, 3, 4, 0], [1, 0, 2, 1, 2, 0, 0, 3]]), num_nodes=M)
ATTENTION = DotProduct(heads=2, dim=3).scaled().softmax()


def test_a_weight_for_each_part():
    layer = Conv(ATTENTION | Shifts([1, -1]) | Identity(), Q, Q, weight=[LowRank(3), Depthwise(), Eye()]).to(F64)
    x = torch.randn(M, Q, dtype=F64)
    a, theta = layer.basis(x).dense(F64), layer.weight().dense()
    close(layer(x), torch.einsum("kmn,mp,kpq->nq", a, x, theta) + layer.bias)
    close(theta[4], torch.eye(Q, dtype=F64))
    assert sum(p.numel() for p in layer.weight.parameters()) == 2 * 3 * (Q + Q) + 2 * Q


@pytest.mark.parametrize("mechanism", [
    Cuboid((3, 3)) | Cuboid((5, 5)), ATTENTION | Cuboid((3, 3)), Cuboid((3, 3)) | Identity(),
    Shifts([(0, 1)]) | Shifts([(1, 0)]),
    Pool(2) | Pool(2), Cuboid((3, 3)) + Identity(9), Cuboid((3, 3)) @ Shifts([(0, 1)]), Cuboid((3, 3)).transpose()])
def test_images_are_their_pixels(mechanism):
    layer = Conv(mechanism, P, P).to(F64)
    image = torch.randn(P, P, 4, 6, dtype=F64)
    entries, grid = to_entries(image, 2)
    expected = layer(entries, structure=grid).mT
    close(layer(image, axes=2).flatten(2), expected)


def test_returned_weights():
    x = torch.randn(2, M, P)
    layer = Conv(ATTENTION, P, Q)
    y, a = layer(x, z=x[:, :3], return_weights=True)
    torch.testing.assert_close(y, layer(x, z=x[:, :3]))
    assert a.shape == (2, 2, M, 3)
    torch.testing.assert_close(a.sum(-2), torch.ones(2, 2, 3))
    layer = Conv(DotProduct(heads=2, dim=3).masked(keep=STRUCTURE).softmax(), P, Q)
    _, a = layer(x, structure=GRAPH, return_weights=True)
    assert a.shape == (2, 2, GRAPH.num_edges)
    into_0 = GRAPH.target == 0
    torch.testing.assert_close(a[..., into_0].sum(-1), torch.ones(2, 2))


def test_an_input_that_no_output_sees_is_still_an_output():
    earlier = torch.ones(M, M, dtype=torch.bool).triu(1)
    layer = Conv(DotProduct(dim=3).masked(keep=DenseMask(earlier)).softmax(), P, Q).to(F64)
    x = torch.randn(M, P, dtype=F64)
    dot = layer.mechanism.operands[0]
    scores = (dot.keys(x)[0] @ dot.queries(x)[0].mT).masked_fill(~earlier, -torch.inf)
    expected = scores.softmax(0).nan_to_num(0.0).mT @ x @ layer.weight.theta[0] + layer.bias
    close(layer(x), expected)


@pytest.mark.parametrize("mechanism", [Identity(), Shifts([1], "circular"), Shifts([1, 0, -1], "circular")])
@pytest.mark.parametrize("weight", [Full(), Separable(2), LowRank(32), DepthwiseSeparable(), Grouped(4)],
                         ids=lambda weight: type(weight).__name__)
def test_a_new_layer_keeps_the_variance(mechanism, weight):
    layer = Conv(mechanism, 64, 64, weight=weight)
    assert layer(torch.randn(64, 32, 64)).var().item() == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("mechanism", [Pool(2), Adjacency(normalize=None), Chebyshev(2),
                                       DotProduct(heads=4, dim=8).scaled().softmax() | Shifts([(0, 1)])], ids=repr)
@pytest.mark.parametrize("weight", [Full(), Separable(2), LowRank(8), DepthwiseSeparable(), Grouped(4)],
                         ids=lambda weight: type(weight).__name__)
def test_calibration_keeps_the_variance_for_any_basis(mechanism, weight):
    grid = Grid((8, 8))
    structure = grid.graph() if isinstance(mechanism, Adjacency | Chebyshev) else grid
    x = 3 * torch.randn(8, 64, 32)
    layer = Conv(mechanism, 32, 48, weight=weight).calibrate(x, structure=structure)
    assert layer(x, structure=structure).var().item() == pytest.approx(x.var().item(), rel=1e-3)
    assert layer.bias is not None


def test_a_shared_part_stays_shared():
    predictor = PredictedPosition()
    one = Conv(General().masked(keep=Window(2, center=predictor)).softmax()
               | General().masked(keep=Window(1, center=predictor)).softmax(), P, Q)
    assert sum(isinstance(module, PredictedPosition) for module in one.modules()) == 1
    other = copy.deepcopy(one)
    x = torch.randn(M, P)
    assert torch.equal(one(x), other(x))
    assert not set(map(id, one.parameters())) & set(map(id, other.parameters()))


def test_a_window_takes_the_grid_of_the_call():
    layer = Conv(DotProduct(dim=3).masked(keep=Causal() & Window((3, 3))).softmax(), P, Q).to(F64)
    grid = Grid((2, 3))
    fixed = Conv(DotProduct(dim=3).masked(keep=Causal() & Window((3, 3), grid=grid)).softmax(), P, Q).to(F64)
    fixed.load_state_dict(layer.state_dict())
    x = torch.randn(M, P, dtype=F64)
    close(layer(x, structure=grid), fixed(x))


@pytest.mark.parametrize(("layer", "x", "moving", "other"), drawn([
    (MultiheadAttention(P, 2), (2, M, P), {1: Dim("m")}, (2, 9, P)),
    (Conv2d(P, Q, 3, padding=1), (2, P, 5, 6), {0: Dim("b"), 2: Dim("h"), 3: Dim("w")}, (3, P, 9, 8)),
    (NonLocalBlock(P, 2, zero_init=False), (2, P, 5, 6), {2: Dim("h"), 3: Dim("w")}, (2, P, 9, 8)),
    (Conv(ATTENTION | Shifts([1, -1]), P, Q), (2, M, P), {1: Dim("m")}, (2, 9, P)),
], 3))
def test_exports_for_any_number_of_entries(layer, x, moving, other):
    program = torch.export.export(layer, (torch.randn(x),), dynamic_shapes=(moving,)).module()
    for shape in (x, other):
        x = torch.randn(shape)
        torch.testing.assert_close(program(x), layer(x))


def x_of(*shape: int, **options) -> torch.Tensor:
    return torch.zeros(shape, **options)


@pytest.mark.parametrize(("error", "call"), [
    (ShapeError, lambda: Conv(Identity(), P, Q)(x_of(M, P + 1))),
    (ShapeError, lambda: Conv(Adjacency(), P, Q)(x_of(M + 1, P), structure=GRAPH)),
    (ShapeError, lambda: Conv(Cuboid((3, 3)), P, Q)(x_of(M + 1, P), structure=Grid((2, 3)))),
    (ShapeError, lambda: Conv(Incidence("sender").transpose(), P, Q)(x_of(M, P), structure=GRAPH)),
    (ShapeError, lambda: Conv(ATTENTION, P, Q)(x_of(M, P), z=x_of(M, P + 1))),
    (ShapeError, lambda: Conv(ATTENTION, P, Q)(x_of(M, P), z=x_of(M, P, dtype=F64))),
    (ShapeError, lambda: Conv(Identity(), P, Q)(x_of(M, P, dtype=F64))),
    (ShapeError, lambda: Conv(Identity(), P, Q)(x_of(M, P, device="meta"))),
    (StructureError, lambda: Conv(Adjacency(), P, Q)(x_of(M, P))),
    (StructureError, lambda: Conv(Cuboid((3, 3)), P, Q)(x_of(M, P))),
    (StructureError, lambda: Conv(General().masked(keep=STRUCTURE).softmax(), P, Q)(x_of(M, P))),
    (StructureError, lambda: Conv(General().masked(keep=x_of(M - 1) == 0).softmax(), P, Q)(x_of(M, P))),
    (StructureError, lambda: Conv(EdgeBias(2).softmax(), P, Q)(x_of(M, P), structure=GRAPH)),
    (ConfigError, lambda: DotProduct(heads=0)),
    (ConfigError, lambda: Conv(DotProduct(heads=3), P, 4, weight=HeadBlocks())),
    (ConfigError, lambda: Conv(Identity(), 0, Q)),
    (ConfigError, lambda: Conv(Identity(), P, 2.0)),
    (ConfigError, lambda: Conv(torch.nn.Linear(P, Q), P, Q)),
    (ConfigError, lambda: Conv(Identity() | Identity(), P, Q, weight=[Full()])),
    (ConfigError, lambda: Conv(Identity(), P, Q, weight=Eye())),
    (ConfigError, lambda: Conv(Identity(3), P, Q, weight=HeadBlocks())),
    (ConfigError, lambda: (Adjacency() | Identity()).softmax()),
    (ConfigError, lambda: Adjacency().softmax()),
    (ConfigError, lambda: Conv(Identity(), P, Q, path="backwards")(x_of(M, P))),
])
def test_errors_are_one_line(error, call):
    check_refused((error, r"got .*\.", call))


LAYERS = {
    "ChebConv": lambda **o: layers.ChebConv(P, Q, 3, **o),
    "DiffusionConv": lambda **o: layers.DiffusionConv(P, Q, 2, **o),
    "EdgeConditionedConv": lambda **o: layers.EdgeConditionedConv(P, Q, 2, 3, **o),
    "GATConv": lambda **o: GATConv(P, Q, 2, **o),
    "GATv2Conv": lambda **o: layers.GATv2Conv(P, Q, 2, **o),
    "GCNConv": lambda **o: GCNConv(P, Q, **o),
    "RelationalConv": lambda **o: layers.RelationalConv(P, Q, 2, num_bases=2, **o),
    "MultiheadAttention": lambda **o: MultiheadAttention(P, 2, **o),
    "NonLocalBlock": lambda **o: NonLocalBlock(P, **o),
    "Conv1d": lambda **o: layers.Conv1d(P, Q, 3, **o),
    "Conv2d": lambda **o: Conv2d(P, Q, 3, groups=2, **o),
    "Conv3d": lambda **o: layers.Conv3d(P, Q, 3, **o),
    "SeparableConv2d": lambda **o: layers.SeparableConv2d(P, Q, 3, **o),
    "ConvLSTMCell": lambda **o: layers.ConvLSTMCell(Cuboid(3), P, Q, **o),
    "ConvGRUCell": lambda **o: layers.ConvGRUCell(Cuboid(3), P, Q, weight=Separable(2), **o),
    "Deformable": lambda **o: Conv(Deformable(3), P, Q, **o),
    "ALiBi": lambda **o: Conv((DotProduct(heads=2) + ALiBi()).softmax(), P, Q, weight=Depthwise(2), **o),
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=list(LAYERS))
def test_a_layer_from_empty_memory_is_drawn_as_a_new_one(make):
    with torch.device("meta"):
        layer = make()
    layer.to_empty(device="cpu")
    for p in layer.parameters():
        torch.nn.init.constant_(p, torch.nan)
    layer.reset_parameters()
    fresh = make().state_dict()
    for key, t in layer.state_dict().items():
        assert t.isfinite().all(), key
        assert bool(t.any()) == bool(fresh[key].any()), key


@pytest.mark.parametrize("make", [*LAYERS.values(), lambda **o: LearnedEncoding(M, P, **o)],
                         ids=[*LAYERS, "LearnedEncoding"])
def test_device_and_dtype_of_a_new_layer(make):
    for device, dtype in (("meta", torch.float64), ("cpu", torch.bfloat16), (None, torch.float64), ("meta", None)):
        tensors = make(device=device, dtype=dtype).state_dict()
        assert {t.dtype for t in tensors.values()} == {dtype or torch.float32}
        assert {t.device.type for t in tensors.values()} == {device or "cpu"}
    assert next(iter(make().state_dict().values())).dtype == torch.float32


def assigned(layer, **attributes):
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


@pytest.mark.parametrize(("message", "call"), [
    (r"key_value must be given, with shape \(..., M, P=6\)", lambda: MultiheadAttention(8, 2, kdim=6)(x_of(2, 5, 8))),
    (r"z must be given, with shape \(..., N, P'=5\)", lambda: Conv(General(), P, Q, other_channels=5)(x_of(M, P))),
    (r"leading dimensions of z must broadcast with those of x, \(2,\); got \(3, 4, 4\)",
     lambda: Conv(ATTENTION, P, Q)(x_of(2, M, P), z=x_of(3, 4, P))),
    (r"leading dimensions of query must broadcast with those of key_value, \(2,\); got \(3, 4, 4\)",
     lambda: MultiheadAttention(P, 2)(x_of(3, 4, P), x_of(2, M, P))),
    (r"leading dimensions of the mask must broadcast",
     lambda: MultiheadAttention(P, 2)(x_of(2, M, P), keep=Padding(x_of(3, M) == 0))),
    (r"must broadcast to \(2,\).*; got \(6,\).* goes as DenseMask\(table\)",
     lambda: MultiheadAttention(P, 2)(x_of(2, M, P), keep=x_of(M, M) == 0)),
    (r"DenseMask\(mask\) for pairs", lambda: Conv(General().masked(keep=x_of(M, M) == 0).softmax(), P, Q)(x_of(M, P))),
    (r"must be bound .*DotProduct.* Make a new layer",
     lambda: assigned(Conv(ATTENTION, P, Q), mechanism=DotProduct(heads=2, dim=4))(x_of(M, P))),
    (r"must be bound", lambda: assigned(Conv(ATTENTION, P, Q), mechanism=ATTENTION).plan(x_of(M, P))),
    (r"must be bound", lambda: assigned(Conv(ATTENTION, P, Q), mechanism=ATTENTION).basis(x_of(M, P))),
    (r"basis: its mechanism must be bound", lambda: ATTENTION.basis(x_of(M, P))),
    (r"x must have shape \(..., M, P=4\); got \(4,\)", lambda: Conv(ATTENTION, P, Q)(x_of(P))),
    (r"query must have shape \(..., M, P=4\); got \(4,\)", lambda: MultiheadAttention(P, 2)(x_of(P), keep=Causal())),
    (r"EdgeBias: the graph must have edge_attr", lambda: GATConv(P, Q, edge_dim=2)(x_of(M, P), GRAPH)),
    (r"path must be of type str \| None; got list of str",
     lambda: Conv(Identity(), P, Q, path=["a"])(x_of(M, P))),
    *[(r"max_bytes must be (a number of bytes|of type int \| None)",
       lambda wrong=wrong: Conv(Identity(), P, Q, max_bytes=wrong)(
        x_of(M, P))) for wrong in ([1], "1MB", float("nan"), -1)],
    (r"torch's layer\(query, key, value\) is layer\(query, key_value\)",
     lambda: MultiheadAttention(P, 2)(*[x_of(2, M, P)] * 3)),
    ("GCNConv: the graph must be given once", lambda: GCNConv(P, Q)(x_of(M, P), GRAPH, structure=GRAPH)),
    ("GATConv: the second argument must be a Graph; got NoneType", lambda: GATConv(P, Q)(x_of(M, P))),
    ("conv: plan must be a Plan; got str", lambda: structconv.conv(x_of(M, P), structconv.Dense(x_of(1, M, M)),
                                                                   x_of(1, P, Q), plan="x")),
])
def test_errors_say_what_to_do(message, call):
    with pytest.raises((ConfigError, ShapeError, StructureError), match=message):
        call()


@pytest.mark.parametrize("weight", [Full(), LowRank(3), Separable(rank=2), [Full(), Full()]])
@pytest.mark.parametrize("swapped", [False, True])
def test_scores_of_projections_beside_another_part_see_their_own_heads(weight, swapped):
    parts = [BiAffine(heads=2, bilinear=False, on="projected").softmax(), Identity()]
    layer = Conv(parts[1] | parts[0] if swapped else parts[0] | parts[1], 4, 6, weight=weight).to(torch.float64)
    x = torch.randn(2, 5, 4, dtype=torch.float64)
    own = slice(1, 3) if swapped else slice(0, 2)
    score = next(part for part in layer.mechanism.modules() if isinstance(part, BiAffine))
    projected = layer.weight().heads(x)[..., own, :, :]
    source, target = ((projected * vector.unsqueeze(1)).sum(-1) for vector in (score.vector_source,
                                                                              score.vector_target))
    attention = (source.unsqueeze(-1) + target.unsqueeze(-2)).softmax(-2)
    identity = torch.eye(5, dtype=torch.float64).expand(2, 1, 5, 5)
    basis = torch.cat([identity, attention] if swapped else [attention, identity], 1)
    torch.testing.assert_close(layer.basis(x).dense(), basis)
    expected = torch.einsum("bkmn,bmp,kpq->bnq", basis, x, layer.weight().dense()) + layer.bias
    torch.testing.assert_close(layer(x), expected)


def test_scores_of_projections_need_a_theta_a_head():
    score = BiAffine(heads=2, bilinear=False, on="projected").softmax()
    for join in (lambda: score @ Shifts([0, 1]), lambda: Shifts([0, 1]).outer(score)):
        with pytest.raises(ConfigError, match="a Theta_k of its own"):
            join()
    assert (score @ Identity()).size == 2


@pytest.mark.parametrize("score", [lambda: DotProduct(heads=2, dim=3).scaled(), lambda: Additive(dim=3, heads=2),
                                   lambda: General(),
                                   lambda: Additive(dim=3).masked(keep=Padding(torch.arange(7) < 5))])
def test_learned_queries_are_scored_by_any_function(score):
    layer = Conv(Context(3, score=score()).softmax(), 4, 6).to(torch.float64)
    plain = Conv(score().softmax(), 4, 6).to(torch.float64)
    context = layer.mechanism.operands[0]
    own = list(context.score.parameters())
    with torch.no_grad():
        for parameter, number in zip(plain.mechanism.parameters(), own, strict=True):
            parameter.copy_(number)
        plain.weight.theta.copy_(layer.weight.theta)
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    expected = plain(x, z=context.query.expand(2, 3, 4))
    assert expected.shape == (2, 3, 6)
    for _ in range(2):
        torch.testing.assert_close(layer(x), expected)
    layer(x).sum().backward()
    assert context.query.grad.any()
    with pytest.raises(ConfigError, match="which tells the heads"):
        Context(3, 2, score=score())


@pytest.mark.parametrize("size", [1, 2, 5, 9, 10])
def test_scores_by_location_are_for_any_length_up_to_theirs(size):
    layer = Conv(Location(10, heads=2).softmax(), 4, 6).to(torch.float64)
    for m in (10, size):
        x, z = torch.randn(2, m, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
        raw = layer.mechanism.operands[0].table(z).unflatten(-1, (2, 10)).permute(0, 2, 3, 1)[:, :, :m]
        torch.testing.assert_close(layer.basis(x, z=z).dense(), raw.softmax(-2))
        torch.testing.assert_close(layer(x, z=z), torch.einsum("bkmn,bmp,kpq->bnq", raw.softmax(-2), x,
                                                             layer.weight.theta) + layer.bias)
    with pytest.raises(ShapeError, match="at most length=10"):
        layer(torch.randn(11, 4, dtype=torch.float64), z=torch.randn(3, 4, dtype=torch.float64))


def test_dot_products_of_projections():
    layer = Conv(DotProduct(2, on="projected").scaled().softmax(), 4, 6).to(torch.float64)
    assert not list(layer.mechanism.parameters())
    x, z = torch.randn(2, 5, 4, dtype=torch.float64), torch.randn(2, 3, 4, dtype=torch.float64)
    keys, queries = layer.weight().heads(x), layer.weight().heads(z)
    attention = (queries @ keys.mT / 6**0.5).softmax(-1)
    torch.testing.assert_close(layer(x, z=z), (attention @ keys).sum(1) + layer.bias)
    for wrong in ({"dim": 3}, {"shared_by": 2}, {"bias": True}, {"on": "x"}):
        with pytest.raises(ConfigError, match="DotProduct"):
            DotProduct(2, **{"on": "projected", **wrong})
    with pytest.raises(ConfigError, match="queries of its own"):
        Conv((DotProduct(2, on="projected") + RelativeKey(1)).softmax(), 4, 6).to(torch.float64)(x)


def test_an_image_lies_on_the_grid_that_is_given_or_on_none_but_its_own():
    layer, image = layers.Conv(Shifts([1]), 3, 2), torch.randn(2, 3, 6)
    ring = Grid(6, periodic=True)
    torch.testing.assert_close(layer(image, axes=1, structure=ring), layer(image.mT, structure=ring).mT)
    torch.testing.assert_close(layer(image, axes=1, structure=Grid(6)), layer(image, axes=1))
    for other in (Grid(5), Graph.complete(6), "ring"):
        with pytest.raises(StructureError, match=r"a Grid of the image's shape \(6,\), or left out"):
            layer(image, axes=1, structure=other)
