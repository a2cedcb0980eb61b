"""Scores in the log domain: -inf where a pair does not exist, logarithms of weights, tables that are added."""

from functools import partial

import pytest
import torch

from structconv import Basis, Causal, ConfigError, Dense, Graph, ShapeError, StructureError, Window
from structconv.bases import Bilinear, Concat, Identity, Sparse

F64, INF, M, N = torch.float64, float("inf"), 6, 5
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
EARLIER = torch.arange(M)[:, None] <= torch.arange(N)


def scores(heads=2):
    return Bilinear(torch.randn(heads, N, 3, dtype=F64), torch.randn(heads, M, 3, dtype=F64))


def test_what_is_absent_shows_as_asked():
    basis = scores()
    raw, masked = basis.dense(), basis.masked(keep=Causal())
    close(masked.dense(absent=-INF), raw.masked_fill(~EARLIER, -INF))
    close(masked.dense(), raw.masked_fill(~EARLIER, 0))
    close(masked.dense(torch.float32, absent=7.0)[:, ~EARLIER], torch.full((2, int((~EARLIER).sum())), 7.0))
    close((2.0 * masked.exp()).dense(absent=-INF), (2 * raw.exp()).masked_fill(~EARLIER, -INF))
    close(masked.transpose().dense(absent=-INF), raw.masked_fill(~EARLIER, -INF).mT)
    close((masked | basis | masked).dense(absent=-INF),
          torch.cat([raw.masked_fill(~EARLIER, -INF), raw, raw.masked_fill(~EARLIER, -INF)]))
    close(masked.softmax().dense(absent=-INF), masked.softmax().dense())
    graph = Graph(torch.tensor([[0, 2], [1, 1]]), num_inputs=M, num_outputs=N)
    assert (basis.masked(keep=graph).dense(absent=-INF) > -INF).sum() == 2 * 2


def test_a_matrix_has_no_absent_pairs_and_a_basis_of_ones_own_needs_no_argument():
    class Mine(Basis):
        size, num_inputs, num_outputs = 1, 2, 3

        def dense(self, dtype=None):
            return torch.ones(1, 2, 3, dtype=dtype)

    for basis in (Mine(), Identity(3), Sparse(Graph(torch.tensor([[0], [1]]), num_nodes=2)), Mine() * 2.0):
        assert torch.equal(basis.dense(absent=-INF), basis.dense())
    assert (Mine().masked(keep=torch.tensor([True, False])).dense(absent=-INF)[0] == -INF).sum() == 3


@pytest.mark.parametrize("over", ["inputs", "outputs"])
@pytest.mark.parametrize("mask", [None, Causal(), Window(1),
                                  Graph(torch.tensor([[0, 2, 2, 5], [1, 1, 4, 0]]), num_inputs=M, num_outputs=N)])
def test_the_logarithm_of_a_softmax(mask, over):
    basis = scores() * 40.0
    basis = basis if mask is None else basis.masked(keep=mask)
    actual = basis.log_softmax(over)
    raw, dim = basis.dense(absent=-INF), -2 if over == "inputs" else -1
    expected = raw.log_softmax(dim)
    close(actual.dense(absent=-INF), torch.where(raw == -INF, -INF, expected))
    close(actual.exp().dense(), basis.softmax(over).dense())
    close(actual.softmax(over).dense(), basis.softmax(over).dense())
    assert actual.has_scores and torch.isfinite(actual.dense()).all()


def test_added_tables_masks_and_both():
    basis = scores()
    raw, bias = basis.dense(), torch.randn(M, N, dtype=F64)
    table = torch.zeros(M, N, dtype=F64).masked_fill(~EARLIER, -INF)
    close((basis + bias).softmax().dense(), (raw + bias).softmax(-2))
    expected = torch.where(EARLIER, (raw + bias + table), -INF).softmax(-2)
    for added in (basis + bias + table, basis + (bias + table), table + (basis + bias), basis + bias + Causal()):
        close(added.softmax().dense(), expected)
        close(added.dense(absent=-INF), raw + bias + table)
    per_head = torch.randn(3, 2, M, N, dtype=F64)
    close((basis + per_head).dense(), raw + per_head)
    batched = torch.randn(3, 1, M, N, dtype=F64).masked_fill(torch.rand(3, 1, M, N) > 0.7, -INF)
    close((basis + batched).dense(absent=-INF), raw + batched)
    graph = Graph(torch.tensor([[0, 2], [1, 1]]), num_inputs=M, num_outputs=N)
    close((basis + graph).softmax().dense(), basis.masked(keep=graph).softmax().dense())


def test_parts_of_a_concatenation_take_a_table_each():
    basis, table = scores(1) | scores(2), torch.randn(1, M, N, dtype=F64)
    assert isinstance(basis + table, Concat)
    close((basis + table).dense(), basis.dense() + table)


@pytest.mark.parametrize(("added", "error"), [
    (torch.ones(M, N, dtype=torch.bool), ConfigError), (torch.ones(M, dtype=F64), ShapeError),
    (torch.ones(N, M, dtype=F64), ShapeError), (1.0, ConfigError), (None, ConfigError),
    (torch.eye(2, dtype=F64).log()[:, :1, None].expand(2, M, N), ConfigError),
    (torch.nn.Parameter(torch.full((M, N), -INF, dtype=F64)), ConfigError),
    (Graph(torch.zeros(2, 0, dtype=torch.int64), num_nodes=3), StructureError)])
def test_what_cannot_be_added(added, error):
    with pytest.raises(error, match=r"; got "):
        scores() + added


def test_a_mask_in_the_log_domain_is_for_scores():
    with pytest.raises(ConfigError, match="must be added to scores"):
        Identity(4) + Causal()
    with pytest.raises(ConfigError, match="log_softmax: its basis must have scores"):
        Identity(4).log_softmax()
    sparse = Sparse(Graph(torch.tensor([[0], [1]]), num_nodes=2))
    close((sparse + torch.ones(2, 2, dtype=F64)).dense(F64), sparse.dense(F64) + 1)
    assert isinstance(Dense(torch.ones(1, 2, 2)) + torch.ones(2, 2), Basis)
