"""What the operators of the algebra mean, and what they refuse."""

import subprocess
import sys
from functools import partial

import pytest
import torch

from structconv import Causal, ConfigError, Dense, Graph, Grid, Padding, ShapeError, Shift, StructureError, conv
from structconv.bases import Bilinear, Concat, Identity, LinearSum, Mixture, Normalized, Sparse, Transposed
from tests.support.errors import check_refused
from tests.support.library import random

F64 = torch.float64
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
N = 5


def scores(heads=2, n=N):
    return Bilinear(random(heads, n, 3), random(heads, n, 3))


def sparse(values=None):
    edges = torch.tensor([[0, 1, 3, 4], [1, 2, 0, 4]])
    return Sparse(Graph(edges, num_nodes=N), random(4) if values is None else values)


def test_scores_imported_alone_have_the_operators():
    code = """
import torch
from structconv.bases.scores import Bilinear
from structconv.structures import Causal
scores = Bilinear(torch.ones(2, 4, 3), torch.ones(2, 4, 3))
print(((0.5 * scores).masked(keep=Causal()).softmax() | scores.transpose()).size)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_a_mask_within_parts_that_do_not_meet_is_refused():
    joined = scores(2).masked(keep=Causal()) | scores(1)
    for refused in (lambda: joined + scores(3), lambda: joined * scores(3), lambda: scores(2).outer(joined)):
        with pytest.raises(ConfigError, match=r"a mask within a \| must meet one matrix"):
            refused()


@pytest.mark.parametrize("over", ["inputs", "outputs"])
def test_sums_of_exponentials_and_squares(over):
    a, dim = scores(), -2 if over == "inputs" else -1
    raw = a.dense()
    close(a.exp().normalize("sum", over=over).dense(), raw.softmax(dim))
    close(a.map(torch.square).normalize("sum", over=over).dense(), raw.square() / raw.square().sum(dim, keepdim=True))
    assert a.normalize("none") is a


def test_sums_that_overflow_or_are_zero_divide_nothing():
    a, zero = scores() * 1e4, Dense(torch.zeros(1, 3, 3, dtype=F64)).normalize("sum")
    for powers in (a.exp(), a.exp().masked(keep=Causal())):
        assert powers.normalize("sum").dense().isfinite().all()
    assert not zero.dense().any()


def test_sums_of_matrices_are_linear_and_of_scores_entrywise():
    assert isinstance(sparse() + Identity(N), LinearSum)
    assert not isinstance(scores() + Identity(N), LinearSum)
    x, matrix = random(N, 2), sparse()
    close((Identity(N) - matrix).analysis(x), (x - matrix.dense().mT @ x))


@pytest.mark.parametrize("make", [lambda a, b: a | b, lambda a, b: Mixture((a, b))], ids=["concat", "mixture"])
@pytest.mark.parametrize("path", ["structure_first", "channels_first"])
def test_parts_of_which_one_alone_has_a_batch_apply_to_inputs_without_one(make, path):
    basis = make(Dense(torch.randn(2, 1, 4, 3, dtype=F64)), Dense(torch.randn(2, 4, 3, dtype=F64)))
    x, theta = torch.randn(basis.num_inputs, 5, dtype=F64), torch.randn(3, 5, 2, dtype=F64)
    expected = torch.einsum("bkmn,mp,kpq->bnq", basis.dense(), x, theta)
    torch.testing.assert_close(conv(x, basis, theta, path=path), expected)


def test_structural_bases_do_not_lower_the_dtype():
    a = Dense(random(1, N, N))
    for basis in (Identity(N) | a, Identity(N) @ a, Identity(N) + a, (2.0 * Identity(N)) @ a, Identity(N) * a,
                  Shift(Grid(N), (0, 1)).map(torch.cos) | a):
        assert basis.dense().dtype == F64
    assert (0.1 * Identity(N)).dense().dtype == torch.float32


def test_a_product_over_repeated_edges_counts_them_once_each():
    graph = Graph(torch.tensor([[0, 0, 1], [1, 1, 0]]), num_nodes=2)
    basis = Sparse(graph, torch.tensor([1.0, 2.0, 5.0], dtype=F64)) * Dense(torch.full((1, 2, 2), 10.0, dtype=F64))
    expected = torch.tensor([[[0.0, 30.0], [50.0, 0.0]]], dtype=F64)
    close(basis.dense(), expected)
    close(basis.transpose().dense(), expected.mT)
    x = random(2, 1)
    close(basis.transpose().analysis(x), expected @ x)


def test_transposes_pass_through():
    a = scores()
    assert isinstance(a.softmax().transpose(), Normalized)
    assert a.transpose().transpose() is a
    assert isinstance((a | Identity(N)).transpose(), Concat)
    close(a.masked(keep=Causal()).softmax().transpose().dense(), a.masked(keep=Causal()).softmax().dense().mT)
    assert isinstance(a.transpose(), Transposed)


def test_representations_read_like_the_code():
    basis = (2.0 * Identity(3) | Shift(Grid(3), (0, 1))).masked(keep=Causal())
    assert repr(basis) == ("((2.0 * Identity(3)).masked(keep=Causal()) | Shift(Grid((3,)), offsets=[0, 1], "
                           "padding='zeros').masked(keep=Causal()))")


@pytest.mark.parametrize(("wrong", "error", "message"), [
    (lambda: Identity(N).softmax(), ConfigError, r"softmax: its basis must have scores; got Identity\(5\)"),
    (lambda: sparse().softmax(), ConfigError, "softmax: its basis must have scores"),
    (lambda: scores().softmax().softmax(), ConfigError, "must have scores"),
    (lambda: sparse().normalize("sigmoid"), ConfigError, "sigmoid: its basis must have scores"),
    (lambda: scores().normalize("max"), ConfigError, "kind must be one of 'softmax', 'sum'"),
    (lambda: scores().softmax(over="rows"), ConfigError, "over must be one of 'inputs', 'outputs'"),
    (lambda: scores().masked(), ConfigError, "exactly one of keep= and drop= must be given; got neither"),
    (lambda: scores().masked(keep=Causal(), drop=Causal()), ConfigError, "exactly one of keep= and drop=.*; got both"),
    (lambda: scores().masked(keep=torch.ones(N, N)), StructureError, "a tensor of booleans; got torch.float32"),
    (lambda: scores().masked(keep=torch.ones(N + 1).bool()), StructureError, r"shape \(..., M=5\); got \(6,\)"),
    (lambda: scores().masked(keep=torch.ones(N, N + 1).bool()), StructureError,
     r"shape \(..., M=5\); got \(5, 6\)"),
    (lambda: scores().masked(keep=Padding(torch.ones(2, 3).bool())), StructureError,
     r"shape \(..., M=5\); got \(2, 3\)"),
    (lambda: scores().masked(drop=Graph(torch.zeros(2, 0).long(), num_nodes=4)), StructureError, "M=5; got 4"),
    (lambda: scores().masked(keep=True), ConfigError, "must be a Support, a Graph or a boolean tensor; got bool"),
    (lambda: Identity(3) | Identity(4), ShapeError, "same inputs M and outputs N; got M=3, N=3 and M=4, N=4"),
    (lambda: Identity(3) @ Identity(4), ShapeError, "b must take the N=3 outputs of a; got M=4"),
    (lambda: Identity(3) + Identity(4), ShapeError, r"a \+ b: both bases must have the same"),
    (lambda: scores(2) + scores(3), ShapeError, "sizes K of both bases must be equal, or one of them 1; got 2 and 3"),
    (lambda: scores(2) * scores(3), ShapeError, "sizes K of both bases must be equal, or one of them 1; got 2 and 3"),
    (lambda: scores(2) * torch.ones(3), ShapeError, r"a tensor c must have 1 or K=2 elements; got \(3,\)"),
    (lambda: Identity(3) + 1.0, ConfigError, r"a \+ b: both operands must be bases; got float"),
    (lambda: Identity(3) | None, ConfigError, "both operands must be bases; got NoneType"),
    (lambda: Identity(3) @ torch.ones(3, 3), ConfigError, "both operands must be bases; got Tensor"),
    (lambda: scores().map(2.0), ConfigError, "fn must be callable; got 2.0"),
    (lambda: scores().softcap(0.0), ConfigError, "cap must be positive; got 0.0"),
    (lambda: scores().dropout(1.0), ConfigError, r"p must be in \[0, 1\); got 1.0"),
    (lambda: Dense(torch.zeros(1, 3, 3)).scaled(), ConfigError, "products of one number D of channels; got none"),
    (lambda: Identity(3).scaled(), ConfigError, "scaled: its basis must have scores; got Identity"),
    (lambda: scores().softmax().scaled(), ConfigError, "scaled: its basis must have scores"),
    (lambda: Dense(torch.zeros(2, 3)), ShapeError, r"\(\.\.\., K, M, N\); got \(2, 3\)"),
    (lambda: Dense(torch.zeros(1, 2, 3, dtype=torch.int64)), ShapeError, "floating"),
    (lambda: Dense(torch.zeros(1, 2, 3)).analysis(random(2, 1)), ShapeError, r"float64 and torch\.float32"),
    (lambda: Dense(torch.zeros(1, 2, 3)).analysis(torch.zeros(3, 1)), ShapeError, "M=2"),
    (lambda: Dense(torch.zeros(2, 2, 3)).synthesis(torch.zeros(3, 2, 1)), ShapeError, "K=2"),
    (lambda: Identity(-1), ConfigError, "positive"), (lambda: Identity(3, size=0), ConfigError, "size"),
])
def test_mistakes_are_named(wrong, error, message):
    check_refused((error, message, wrong))
