"""torch's layers under autocast: dtypes are torch's, and numbers as near to those of float32 as torch's."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import structconv.compat.torch as compat
from tests.support.narrow import NARROW, Errors

LINES = {"d_model": 16, "nhead": 4, "dim_feedforward": 24, "dropout": 0.0, "batch_first": True}
_DRAW = torch.Generator().manual_seed(0)
X, Z = torch.randn(2, 9, 16, generator=_DRAW), torch.randn(2, 5, 16, generator=_DRAW)
CAUSAL = nn.Transformer.generate_square_subsequent_mask(9)
PADDING = torch.arange(9).ge(7).expand(2, 9)
CALLS: dict[str, list[Any]] = {
    "MultiheadAttention": [lambda one, x, mask=mask, weights=weights: tuple(
        t for t in one(x, x, x, attn_mask=mask, need_weights=weights) if t is not None)
        for mask in (None, CAUSAL) for weights in (True, False)] + [lambda one, x: one(x, Z, Z, need_weights=False)[0]],
    "TransformerEncoderLayer": [lambda one, x: one(x), lambda one, x: one(x, CAUSAL, is_causal=True),
                                lambda one, x: one(x, src_key_padding_mask=PADDING)],
    "TransformerDecoderLayer": [lambda one, x: one(x, Z), lambda one, x: one(x, Z, CAUSAL)],
    "Transformer": [lambda one, x: one(x, x)]}
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "MultiheadAttention": [{"embed_dim": 16, "num_heads": 4, "batch_first": True, **more}
                           for more in ({}, {"add_zero_attn": True}, {"bias": False})],
    **{f"Transformer{kind}": [{**LINES, "norm_first": first} for first in (False, True)]
       for kind in ("EncoderLayer", "DecoderLayer")},
    "Transformer": [{**LINES, "num_encoder_layers": 1, "num_decoder_layers": 1}]}


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_attention_has_the_dtype_and_precision_of_torch(name, training, dtype):
    """With gradients: without these torch's encoder takes an operator that gives another dtype, on a CPU alone."""
    errors = Errors()
    for options in OPTIONS[name]:
        layer, peer = (getattr(library, name)(**options).train(training) for library in (compat, nn))
        peer.load_state_dict(layer.state_dict())
        for call in CALLS[name]:
            errors.compare(layer, peer, call, [X.clone().requires_grad_()], dtype)
    errors.check()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("name", ["Conv", "ConvTranspose", "AvgPool"])
def test_images_have_the_dtype_and_precision_of_torch(name, axes, dtype):
    errors, image = Errors(), torch.randn(2, 8, *[9] * axes)
    options: list[dict[str, Any]] = [{}, {"stride": 2}, {"padding": 1}]
    options += ([{"padding": 1, "count_include_pad": False}] if name == "AvgPool" else
                [{"groups": 4}, {"bias": False, "dilation": 2}])
    for more in options:
        args = (2,) if name == "AvgPool" else (8, 12, 3)
        layer, peer = (getattr(library, f"{name}{axes}d")(*args, **more) for library in (compat, nn))
        peer.load_state_dict(layer.state_dict())
        for needs_grad in (True, False):
            with torch.set_grad_enabled(needs_grad):
                errors.compare(layer, peer, lambda one, x: one(x), [image.clone().requires_grad_(needs_grad)], dtype)
    errors.check()


@pytest.mark.parametrize("dtype", NARROW, ids=str)
@pytest.mark.parametrize("mask", [None, torch.ones(6, 6).tril(1).bool(), torch.randn(6, 6, generator=_DRAW)],
                         ids=["none", "boolean", "floating"])
def test_scaled_dot_product_attention_has_the_dtype_of_torch(mask, dtype):
    x = torch.randn(2, 4, 6, 8)
    with torch.autocast("cpu", dtype):
        got, want = (attend(x.to(dtype), x, x, mask)
                     for attend in (compat.scaled_dot_product_attention, F.scaled_dot_product_attention))
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
