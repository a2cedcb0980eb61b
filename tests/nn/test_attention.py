"""Multi-head attention against torch's, and the non-local block against its formula."""

from functools import partial

import pytest
import torch
from torch import nn

from structconv.errors import ConfigError, ShapeError, StructureError
from structconv.nn import MultiheadAttention, NonLocalBlock
from structconv.structures import Causal, DenseMask, Graph, Padding, Window
from tests.support.derivatives import same
from tests.support.errors import check_refused

F64 = torch.float64
close = partial(torch.testing.assert_close, rtol=0, atol=1e-10)


def torchs(embed: int = 12, heads: int = 3, **options) -> nn.MultiheadAttention:
    """torch's layer with biases that are not zero."""
    layer = nn.MultiheadAttention(embed, heads, batch_first=True, dtype=F64, **options)
    if layer.in_proj_bias is not None:
        nn.init.normal_(layer.in_proj_bias)
        nn.init.normal_(layer.out_proj.bias)
    return layer


def gradients_by_torchs_names(ours: MultiheadAttention) -> dict[str, torch.Tensor]:
    """Our parameters' gradients in the layout of torch's parameters."""
    parameters = dict(ours.named_parameters())
    by_end = {".".join(name.split(".")[-2:]): p.grad for name, p in parameters.items()}
    query, key = by_end["query.weight"], by_end["key.weight"]
    value = ours.weight.value.weight.grad
    return {"in_proj_weight": torch.cat([query, key, value]),
            "in_proj_bias": torch.cat([by_end["query.bias"], by_end["key.bias"], ours.value_bias.grad.flatten()]),
            "out_proj.weight": ours.weight.output.weight.grad,
            "out_proj.bias": ours.bias.grad}


@pytest.mark.parametrize("causal", [False, True])
def test_self_attention_equals_torchs_values_and_gradients(causal):
    theirs = torchs()
    ours = MultiheadAttention.from_torch(theirs)
    x = torch.randn(2, 7, 12, dtype=F64, requires_grad=True)
    x_ = x.detach().clone().requires_grad_()
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=F64) if causal else None
    y_, a_ = theirs(x_, x_, x_, attn_mask=mask, average_attn_weights=False)
    y, a = ours(x, keep=Causal() if causal else None, return_weights=True)
    close(y, y_)
    close(a, a_.mT)
    g = torch.randn_like(y)
    y.backward(g)
    y_.backward(g)
    close(x.grad, x_.grad)
    grads = gradients_by_torchs_names(ours)
    for name, parameter in theirs.named_parameters():
        close(grads[name], parameter.grad)


@pytest.mark.parametrize(("options", "queries", "keys"), [
    ({}, 4, 6), ({"kdim": 5, "vdim": 5}, 6, 4), ({"bias": False}, 1, 7), ({}, 5, 5)])
def test_arguments_are_in_torchs_order(options, queries, keys):
    theirs = torchs(**options)
    ours = MultiheadAttention.from_torch(theirs)
    q = torch.randn(2, queries, 12, dtype=F64, requires_grad=True)
    kv = torch.randn(2, keys, options.get("kdim", 12), dtype=F64, requires_grad=True)
    expected, weights = theirs(q, kv, kv, average_attn_weights=False)
    for y in (ours(q, kv), ours(query=q, key_value=kv), ours(q, ours.prepare(kv))):
        same(y, expected, (q, kv), 0, 1e-10)
    close(ours.basis(q, kv).dense(), weights.mT)
    assert ours.plan(q, kv) is ours.plan(query=q, key_value=kv)


def test_prepared_keys_and_values_stand_where_key_value_stands():
    ours = MultiheadAttention(8, 2).eval().to(F64)
    x, q = torch.randn(2, 6, 8, dtype=F64), torch.randn(2, 3, 8, dtype=F64)
    with torch.no_grad():
        cache = ours.prepare(x)
        close(ours(q, cache), ours(q, x))
        close(ours(cache), ours(x))
        close(ours.step(cache, x[:, :2], query=q[:, :2]), ours(q[:, :2], torch.cat([x, x[:, :2]], 1)))
    with pytest.raises(ConfigError, match=r"query must be a tensor; got Cache.* Say layer\(query, prepared\)"):
        ours(cache, q)


def test_padding_equals_torchs():
    theirs = torchs()
    ours = MultiheadAttention.from_torch(theirs)
    x = torch.randn(2, 6, 12, dtype=F64)
    keep = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])
    expected = theirs(x, x, x, key_padding_mask=~keep, need_weights=False)[0]
    close(ours(x, keep=Padding(keep)), expected)
    close(ours(x, drop=Padding(~keep)), expected)
    poisoned = x.masked_fill(~keep.unsqueeze(-1), torch.nan)
    assert ours(x, poisoned, keep=Padding(keep)).isfinite().all()


def test_a_structure_restricts_beside_the_mask():
    ours = MultiheadAttention(8, 2).to(F64)
    x = torch.randn(5, 8, dtype=F64)
    m, n = torch.meshgrid(torch.arange(5), torch.arange(5), indexing="ij")
    band = (m <= n) & ((m - n).abs() <= 1)
    expected = ours(x, keep=DenseMask(band))
    close(ours(x, keep=Causal(), structure=Window(1)), expected)
    close(ours(x, structure=Graph(band.nonzero().mT, num_nodes=5)), expected)
    close(ours(x, keep=Causal(), structure=Graph(((m - n).abs() <= 1).nonzero().mT, num_nodes=5)), expected)


def test_a_new_non_local_block_is_the_identity():
    image = torch.randn(2, 4, 3, 5)
    assert torch.equal(NonLocalBlock(4)(image), image)
    assert torch.equal(NonLocalBlock(4, axes=1)(image[..., 0]), image[..., 0])


@pytest.mark.parametrize(("error", "call"), [
    (ConfigError, lambda: MultiheadAttention(8, 0)),
    (ConfigError, lambda: MultiheadAttention(8, 3)),
    (ConfigError, lambda: MultiheadAttention(8, 4, num_kv_heads=3)),
    (ConfigError, lambda: MultiheadAttention.from_torch(nn.MultiheadAttention(8, 2, add_bias_kv=True))),
    (ConfigError, lambda: MultiheadAttention.from_torch(nn.MultiheadAttention(8, 2, kdim=3, vdim=4))),
    (ConfigError, lambda: NonLocalBlock(4, function="cosine")),
    (ConfigError, lambda: MultiheadAttention(8, 2)(torch.randn(3, 8), structure="graph")),
    (ShapeError, lambda: MultiheadAttention(8, 2)(torch.randn(3, 7))),
    (ShapeError, lambda: MultiheadAttention(8, 2)(torch.randn(3, 7), torch.randn(3, 8))),
    (ShapeError, lambda: MultiheadAttention(8, 2)(torch.randn(3, 8, dtype=F64))),
    (StructureError, lambda: MultiheadAttention(8, 2)(torch.randn(3, 8), keep=torch.ones(4, dtype=torch.bool))),
    (StructureError, lambda: MultiheadAttention(8, 2)(torch.randn(3, 8), keep=torch.ones(3))),
])
def test_errors(error, call):
    check_refused((error, r"got .*\.", call))


def test_a_mask_has_the_batch_of_x_or_of_z():
    layer, x, z = MultiheadAttention(12, 3), torch.randn(6, 12), torch.randn(2, 4, 12)
    keep = torch.arange(6) < torch.tensor([[4], [6]])
    y = layer(z, x, keep=Padding(keep))
    torch.testing.assert_close(y[0], layer(z[0], x[:4]))
    with pytest.raises(StructureError, match="leading dimensions of the mask"):
        layer(x, keep=Padding(keep))


@pytest.mark.parametrize("name", ["dropout", "num_heads", "embed_dim", "head_dim", "kdim"])
def test_arguments_can_be_read_and_are_refused_where_they_would_do_nothing(name):
    theirs = nn.MultiheadAttention(12, 3, dropout=0.5)
    ours = MultiheadAttention.from_torch(theirs)
    assert getattr(ours, name) == getattr(theirs, name)
    with pytest.raises(ConfigError, match=f"{name} is fixed .* Make a new layer"):
        setattr(ours, name, 0)


@pytest.mark.parametrize("options", [{}, {"kdim": 5, "vdim": 5}])
def test_from_torch_keeps_what_is_frozen_and_the_mode(options):
    theirs = torchs(**options).eval()
    theirs.out_proj.requires_grad_(False)
    theirs.in_proj_bias.requires_grad_(False)
    ours = MultiheadAttention.from_torch(theirs)
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert not ours.training
    assert trained == {f"{name}.weight" for name in ("attention.query", "attention.key", "weight.value")}
    theirs.requires_grad_(False)
    assert not any(p.requires_grad for p in MultiheadAttention.from_torch(theirs).parameters())
