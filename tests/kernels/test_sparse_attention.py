"""Attention along edges by one operator equals the expression evaluated node by node, values and gradients."""

from __future__ import annotations

import pytest
import torch

from structconv.kernels.forms import fused
from structconv.kernels.sparse_attention import AffineEdges, BilinearEdges, recognise
from structconv.mechanisms import STRUCTURE, Additive, BiAffine, DotProduct, EdgeBias, RelativeBias
from structconv.structures import Causal, Window
from tests.kernels.fused_forms import built, check_computes_the_same

AFFINE = BiAffine(heads=4, bilinear=False)
DOT = DotProduct(heads=4).scaled()
FUSED = {
    "gat": (AFFINE.leaky_relu(0.2).masked(keep=STRUCTURE).softmax(), AffineEdges),
    "gat, masked first": (AFFINE.masked(keep=STRUCTURE).leaky_relu(0.2).softmax(), AffineEdges),
    "affine": (AFFINE.masked(keep=STRUCTURE).softmax(), AffineEdges),
    "gat with dropout": (AFFINE.leaky_relu(0.2).masked(keep=STRUCTURE).softmax().dropout(0.4), AffineEdges),
    "dot": (DOT.masked(keep=STRUCTURE).softmax(), BilinearEdges),
    "dot with dropout": (DOT.masked(keep=STRUCTURE).softmax().dropout(0.4), BilinearEdges),
    "dot with edge bias": ((DOT + EdgeBias(3)).masked(keep=STRUCTURE).softmax(), BilinearEdges),
    "dot with edge bias alone": ((EdgeBias(3) + DOT).softmax(), BilinearEdges),
    "window": (DOT.masked(keep=Window(3)).softmax(), BilinearEdges),
}
OTHERS = {
    "causal": DOT.masked(keep=Causal()).softmax(),
    "additive": Additive(4).masked(keep=STRUCTURE).softmax(),
    "over outputs": DOT.masked(keep=STRUCTURE).softmax(over="outputs"),
    "sum": AFFINE.masked(keep=STRUCTURE).normalize("sum"),
    "relative bias": (DOT + RelativeBias(2)).masked(keep=STRUCTURE).softmax(),
    "negative slope below zero": AFFINE.leaky_relu(-0.2).masked(keep=STRUCTURE).softmax(),
    "leaky dot": DOT.leaky_relu(0.2).masked(keep=STRUCTURE).softmax(),
}


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_the_fused_form_computes_the_same(name, lead, dtype, tolerance):
    check_computes_the_same(*FUSED[name], lead, dtype, tolerance)


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_operators_cannot_compute_is_left_alone(name):
    assert recognise(built(OTHERS[name])[0]) is None


@pytest.mark.parametrize("name", ["gat", "dot"])
def test_isolated_outputs_are_zero_and_strangers_do_not_leak(name):
    basis, _, r = built(FUSED[name][0])
    dirty = r.detach().clone()
    dirty[:, 25:] = torch.nan
    y = fused(basis, dirty).apply(dirty)
    assert not y[:, 25:].any()
    assert y.isfinite().all()
