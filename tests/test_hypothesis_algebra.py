"""Random expressions of the algebra against the tensors they mean."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from structconv.testing.checks import same
from tests.support.expressions import expressions

F64 = torch.float64
SETTINGS = settings(max_examples=100, deadline=None, derandomize=True,
                    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
SIZES = st.integers(0, 5)


@SETTINGS
@given(st.data(), SIZES, SIZES)
def test_expressions_are_the_tensors_they_mean(data, m, n):
    drawn = data.draw(expressions(m, n))
    basis, a = drawn.basis, drawn.dense
    generator = torch.Generator().manual_seed(1)
    assert basis.has_scores == drawn.scored
    assert (basis.size, basis.num_inputs, basis.num_outputs) == tuple(a.shape)
    same(basis.dense(F64), a, "dense")
    x = torch.randn(m, 2, dtype=F64, generator=generator)
    r = torch.randn(a.shape[0], m, 2, dtype=F64, generator=generator)
    g = torch.randn(a.shape[0], n, 2, dtype=F64, generator=generator)
    same(basis.analysis(x), a.mT @ x, "analysis")
    same(basis.apply(r), a.mT @ r, "apply")
    same(basis.synthesis(r), (a.mT @ r).sum(0), "synthesis")
    turned = basis.transpose()
    same(turned.dense(F64), a.mT, "transpose().dense()")
    same(turned.synthesis(g), (a @ g).sum(0), "transpose().synthesis")
