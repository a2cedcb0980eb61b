"""What recognised forms of attention along edges, and over all pairs, are held to: the expression they stand for."""

from __future__ import annotations

import torch

from structconv.bases.attention import weights_at
from structconv.kernels.forms import fused
from structconv.kernels.sparse_attention import EdgeAttention
from structconv.kernels.weights import weights_of
from structconv.structures import Graph


def built(mechanism, lead=(), dtype=torch.float64):
    """A basis over a graph with duplicate edges, self-loops and isolated nodes, and what to apply it to."""
    edges = torch.randint(0, 25, (2, 200))
    edges[:, 1] = edges[:, 0]
    graph = Graph(edges, num_nodes=30, edge_attr=torch.randn(200, 3))
    module = mechanism.bound(16).to(dtype)
    x = torch.randn(*lead, 30, 16, dtype=dtype, requires_grad=True)
    basis = module(x, structure=graph)
    return basis, [x, *module.parameters()], torch.randn(*lead, basis.size, 30, 8, dtype=dtype, requires_grad=True)


def check_computes_the_same(mechanism, kind, lead, dtype, tolerance):
    """What is applied, and along edges the weights themselves: values and gradients."""
    basis, leaves, r = built(mechanism, lead, dtype)
    form = fused(basis, r)
    assert type(form) is kind
    _compare(form.apply(r), basis.apply(r), [r, *leaves], tolerance)
    if isinstance(form, EdgeAttention):
        _compare(weights_of(basis, dtype), weights_at(basis, dtype), leaves, tolerance)
        _compare(weights_of(0.5 * basis, dtype), 0.5 * weights_at(basis, dtype), leaves, tolerance)


def _compare(got, expected, leaves, tolerance):
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    cotangent = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, leaves, cotangent, retain_graph=True, materialize_grads=True)
    found = torch.autograd.grad(got, leaves, cotangent, retain_graph=True, materialize_grads=True)
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
