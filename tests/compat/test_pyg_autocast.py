"""Each layer under autocast: dtypes are PyTorch Geometric's, and numbers as near to those of float32 as theirs."""

from typing import Any

import pytest
import torch

import structconv.compat.pyg as ours
from tests.compat.test_pyg import ATTENTIVE, EDGES, KINDS, MATRICES, InTurn, P, Q, of_layers, setup, theirs
from tests.support.narrow import NARROW, Errors, results

#: Examples of each layer, which have each value of most options.
EXAMPLES = 8


@of_layers
@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_a_layer_has_the_dtype_and_precision_of_pyg(name, dtype):
    in_turn, errors = InTurn(name), Errors()
    for _ in range(EXAMPLES):
        one = setup(lambda values, label: torch.float32 if label == "dtype" else in_turn(values, label), name)
        pair = one.layer, one.peer
        for layer in pair:  # a lazy layer knows its channels now
            one.run(layer)
        one.peer.load_state_dict(one.layer.state_dict())
        for training in (True, False):
            exact = [results(one.run, layer.train(training), one.inputs) for layer in pair]
            try:
                peer = results(one.run, one.peer, one.inputs, dtype)
            except (NotImplementedError, RuntimeError):
                if one.choices["form"] in MATRICES:  # torch multiplies those of one dtype only, some not at all
                    continue
                raise
            errors.add(results(one.run, one.layer, one.inputs, dtype), peer, *exact)
    errors.check()


_DRAW = torch.Generator().manual_seed(0)
X, SORTED = torch.randn(30, 8, generator=_DRAW), torch.arange(30) // 4
MIXED = torch.randint(8, (30,), generator=_DRAW)
AGGREGATIONS: list[tuple[str, Any, dict[str, Any]]] = [
    *[(f"{kind}Aggregation", (), {}) for kind in ("Sum", "Mean", "Max", "Min", "Var", "Std", "PowerMean", "Softmax")],
    ("SoftmaxAggregation", (0.5,), {}), ("SoftmaxAggregation", (), {"learn": True}),
    ("PowerMeanAggregation", (2.0,), {}), ("PowerMeanAggregation", (), {"learn": True}),
    ("MultiAggregation", (["mean", "max", "std"],), {}),
    *[("MultiAggregation", (["mean", "max"],), {"mode": mode, "mode_kwargs": {"in_channels": 8, "out_channels": 6}})
      for mode in ("proj", "attn")]]
NORMS: list[tuple[str, Any, dict[str, Any]]] = [
    ("DiffGroupNorm", (8, 3), {}), *[(name, (8,), {}) for name in ("GraphNorm", "InstanceNorm", "LayerNorm")],
    *[(name, (), {}) for name in ("GraphSizeNorm", "MeanSubtractionNorm", "PairNorm")], ("Linear", (8, 6), {})]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("name, args, options", AGGREGATIONS + NORMS, ids=str)
def test_aggregations_and_norms_have_the_dtype_and_precision_of_pyg(name, args, options, dtype):
    layer, peer = (getattr(library, name)(*args, **options) for library in (ours, theirs))
    peer.load_state_dict(layer.state_dict())
    errors = Errors()
    for index in (SORTED, MIXED):
        more = () if name in ("DiffGroupNorm", "Linear") else (index,)
        for kind in (torch.float32, torch.bfloat16)[:1 + (dtype is torch.bfloat16)]:
            x = (X.abs() + 0.1).to(kind).requires_grad_()
            errors.compare(layer, peer, lambda one, x, more=more: one(x, *more), [x], dtype)
    errors.check()


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("pool", ["global_add_pool", "global_mean_pool", "global_max_pool"])
def test_readouts_have_the_dtype_of_their_rows(pool, needs_grad):
    with torch.autocast("cpu", torch.bfloat16):
        for index in (SORTED, MIXED):
            for dtype in (torch.float32, torch.bfloat16):
                x = X.to(dtype).requires_grad_(needs_grad)
                assert getattr(ours, pool)(x, index).dtype == getattr(theirs, pool)(x, index).dtype == dtype


@pytest.mark.parametrize("name, args", [*((name, (P, Q, 2)) for name in ATTENTIVE), ("FAConv", (P,))])
def test_weights_have_the_dtype_of_pyg(name, args):
    x, found = torch.randn(5, P), []
    for library in (ours, theirs):
        torch.manual_seed(0)
        layer = getattr(library, name)(*args)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(layer(*(x, x) if name == "FAConv" else (x,), EDGES, return_attention_weights=True))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("name, aggr, args", [
    ("GCNConv", "add", (64, 32)), ("GCNConv", "mean", (64, 32)), ("GCNConv", "std", (64, 32)),
    ("SAGEConv", "mean", (64, 32)), ("GATConv", "add", (64, 16, 2)), ("GATv2Conv", "add", (64, 16, 2)),
    ("TransformerConv", "add", (64, 16, 2)), ("TAGConv", "add", (64, 32)), ("ChebConv", "add", (64, 32, 3)),
    ("FeaStConv", "mean", (64, 32, 3)), ("RGCNConv", "mean", (64, 32, 2)),
    ("ARMAConv", "add", (64, 32, 2, 2)), ("MixHopConv", "add", (64, 32))])
def test_many_neighbors_are_summed_as_precisely_as_there(name, aggr, args):
    """Rows that have a mean, whose sums over about 40 neighbors average what roundings of the rows do."""
    torch.manual_seed(0)
    x, edges = 1 + torch.randn(100, 64), torch.randint(100, (2, 4000))
    layer, peer = (getattr(library, name)(*args, aggr=aggr) for library in (ours, theirs))
    peer.load_state_dict(layer.state_dict())
    errors = Errors()
    kinds = (torch.randint(2, (4000,)),) if name == "RGCNConv" else ()
    errors.compare(layer, peer, lambda one: one(x, edges, *kinds), [], torch.bfloat16)
    errors.check()


@pytest.mark.parametrize("aggr", ["mean", "add", "max"])
@pytest.mark.parametrize("options", [{"bias": False}, {"num_bases": 2}, {"num_blocks": 2}], ids=str)
def test_numbers_of_entities_and_blocks_have_the_dtype_and_precision_of_pyg(options, aggr):
    layer, peer = (library.RGCNConv(4, 6, 3, aggr=aggr, **options) for library in (ours, theirs))
    peer.load_state_dict(layer.state_dict())
    errors, kind, edges = Errors(), torch.tensor([0, 1, 2, 0, 1, 2, 0]), EDGES.remainder(4)
    for x in (X[:4, :4], None):
        if x is not None or "num_blocks" not in options:
            errors.compare(layer, peer, lambda one, x=x: one(x, edges, kind), [], torch.bfloat16)
    errors.check()
