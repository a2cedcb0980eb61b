"""The laws that every basis obeys, as one fixture."""

from __future__ import annotations

import pytest
import torch

from structconv.bases import algebra as _algebra  # noqa: F401 - registers transpose
from structconv.bases.pairs import Edges, full

TIGHT = {"rtol": 0.0, "atol": 1e-12}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, **TIGHT)


def hold(basis):
    """Primitives, entries and transpose of `basis` against its dense tensor in float64."""
    generator = torch.Generator().manual_seed(7)
    a = basis.dense(torch.float64)
    k, m, n = basis.size, basis.num_inputs, basis.num_outputs
    assert a.shape == (*basis.batch_shape, k, m, n)
    x = torch.randn(2, m, 3, generator=generator, dtype=torch.float64)
    r = torch.randn(2, k, m, 3, generator=generator, dtype=torch.float64)
    analysis = basis.analysis(x)
    close(analysis, (a.mT @ x.unsqueeze(-3)).expand_as(analysis))
    close(basis.apply(r), a.mT @ r)
    close(basis.apply(r[:, :1]), a.mT @ r[:, :1])
    close(basis.synthesis(r), (a.mT @ r).sum(-3))
    close(basis.synthesis(r[:, :1]), (a.mT @ r[:, :1]).sum(-3))
    close(basis.evaluate(full(m, n, torch.float64, a.device)), a)
    graph = basis.pattern()
    if graph is not None:
        outside = torch.ones(m, n, dtype=torch.bool)
        outside[graph.source.long(), graph.target.long()] = False
        assert not a[..., outside].any()
        once = torch.unique(graph.edge_index, dim=1).shape[1] == graph.num_edges
        if once:
            close(basis.evaluate(Edges(graph, torch.float64)), a[..., graph.source.long(), graph.target.long()])
    turned = basis.transpose()
    close(turned.dense(torch.float64), a.mT)
    s = torch.randn(2, n, 3, generator=generator, dtype=torch.float64)
    close((analysis * s.unsqueeze(-3)).sum(), (turned.analysis(s) * x.unsqueeze(-3)).sum())
    return turned


@pytest.fixture
def laws():
    """Check a basis and its transpose; returns nothing, raises where a law fails."""
    def check(basis):
        hold(hold(basis))

    return check
