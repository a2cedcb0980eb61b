"""Every path of every basis gives eq. 8: values and gradients against the definition, in float64."""

import itertools

import pytest
import torch

from structconv import Depthwise, Eye, Full, Graph, Grid, Grouped, LowRank, Separable, ShapeError, Shared, conv
from structconv.bases import Basis, Bilinear, Dense, Identity, Polynomial, Shift, Sparse, cuboid_offsets
from structconv.planning.kernel import matching
from structconv.testing import by_definition
from structconv.testing.specimens import with_leaves
from structconv.weights import DepthwiseSeparable, HeadBlocks, WeightList
from tests.kernels.applied import convolution_of, numbers, problem_of
from tests.support.derivatives import same
from tests.support.drawn import EVERY, part

M, P = 12, 4


def graph(num_inputs=M, num_outputs=M, edges=30):
    generator = torch.Generator().manual_seed(0)
    index = torch.stack([torch.randint(0, n, (edges,), generator=generator) for n in (num_inputs, num_outputs)])
    return Graph(index, num_inputs=num_inputs, num_outputs=num_outputs)


class Wave(Basis):
    """A user's own basis: sizes and entries, nothing else."""

    size, num_inputs, num_outputs = 3, M, 5

    def dense(self, dtype=None):
        index = torch.arange(3 * M * 5, dtype=dtype or torch.float64)
        return torch.sin(index).view(3, M, 5)


BASES = {
    "dense": lambda: Dense(numbers(3, M, 7)),
    "dense, batched": lambda: Dense(numbers(2, 3, M, 7)),
    "identity": lambda: Identity(M),
    "identity, 3 times": lambda: Identity(M, 3),
    "sparse": lambda: Sparse(graph(), numbers(3, 30)),
    "sparse, bipartite": lambda: Sparse(graph(M, 5), numbers(2, 30)),
    "polynomial": lambda: Polynomial(Sparse(graph(), numbers(1, 30)), order=3),
    "monomials": lambda: Polynomial(Sparse(graph(), numbers(1, 30)), order=2, kind="monomial", first=1),
    "cuboid": lambda: Shift(Grid((3, 4)), cuboid_offsets((3, 3), 1, 1), "zeros"),
    "irregular shifts": lambda: Shift(Grid((3, 4)), ((0, 0), (1, -2), (2, 1)), "circular"),
    "attention": lambda: Bilinear(numbers(3, 5, 2), numbers(3, M, 2)).scaled().softmax(),
    "concat": lambda: Identity(M) | Sparse(graph(), numbers(3, 30)) | Shift(Grid(M), ((0,), (1,)), "zeros"),
    "composed": lambda: Sparse(graph(), numbers(2, 30)) @ Dense(numbers(2, M, 7)),
    "scaled": lambda: 0.5 * Sparse(graph(), numbers(3, 30)),
    "transposed": lambda: Dense(numbers(3, 7, M)).transpose(),
    "a user's own": Wave,
}
THETAS = {
    "full": lambda k: Full.of(numbers(k, P, 3)),
    "separable": lambda k: Separable.of(numbers(k, 1), numbers(1, P, 3)),
    "depthwise separable": lambda k: DepthwiseSeparable.of(numbers(k, P), numbers(P, 3)),
    "low rank": lambda k: LowRank.of(numbers(1, P, 2), numbers(k, 2, 3)),
    "depthwise": lambda k: Depthwise.of(numbers(k, P, 2)),
    "grouped": lambda k: Grouped.of(numbers(k, 2, 2, 3)),
    "shared, narrow": lambda k: Shared.of(numbers(P, 3), k),
    "shared, wide": lambda k: Shared.of(numbers(P, 6), k),
    "eye": lambda k: Eye.of(k, P),
    "concatenated heads": lambda k: HeadBlocks.of(numbers(k, P, 2)),
    "concat": lambda k: Full.of(numbers(k, P, 3)) if k == 1 else WeightList.of(
        (Full.of(numbers(1, P, 3)), Shared.of(numbers(P, 3), k - 1))),
}


@pytest.mark.parametrize(("name", "theta_name"), [  # every fifth pair, in which each name is with several others
    pair for number, pair in enumerate(itertools.product(BASES, THETAS)) if EVERY or number % 5 == 0])
def test_every_path_equals_the_definition(name, theta_name):
    basis = BASES[name]()
    theta, leaves = with_leaves(THETAS[theta_name](basis.size))
    x = numbers(2, M, P).requires_grad_()
    expected = by_definition(x, basis, theta)
    paths = {path for _, _, path in matching(problem_of(convolution_of(x, basis, theta)))}
    assert {"channels_first", "structure_first", "operator_first"} <= paths
    assert ("between" in paths) == (theta_name in ("low rank", "concatenated heads"))
    assert ("per_part" in paths) == (name == "concat")
    for path in (None, *sorted(paths)):
        with part(str(path)):
            same(conv(x, basis, theta, path=path), expected, [x, *leaves], 0, 1e-10)


@pytest.mark.parametrize("shape", [(0, M, P), (2, 0, M, P)])
def test_empty_batches(shape):
    x = torch.zeros(shape, dtype=torch.float64)
    for name in ("dense", "sparse", "cuboid", "concat"):
        basis = BASES[name]()
        assert conv(x, basis, numbers(basis.size, P, 3)).shape == (*shape[:-2], basis.num_outputs, 3)


def test_nan_of_an_unrelated_entry_does_not_leak():
    """Only entries that are joined to a NaN see it, whatever the planner chooses."""
    x = numbers(M, P)
    x[5] = torch.nan
    for name in ("identity", "sparse", "cuboid", "irregular shifts", "scaled"):
        basis = BASES[name]()
        reached = (basis.dense(torch.float64)[:, 5] != 0).any(0)
        y = conv(x, basis, numbers(basis.size, P, 3))
        assert y.isnan().any(-1).equal(reached), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["identity", "cuboid", "irregular shifts", "a user's own"])
def test_narrow_dtypes(name, dtype):
    """Error of a sum of K P terms in this dtype, with a margin for the rounding of intermediate results."""
    basis = BASES[name]()
    x, theta = numbers(M, P).to(dtype), numbers(basis.size, P, 3).to(dtype)
    bound = 8 * torch.finfo(dtype).eps * by_definition(
        x.double().abs(), Dense(basis.dense(torch.float64).abs()), theta.double().abs())
    for path in (None, "channels_first", "structure_first", "operator_first"):
        y = conv(x, basis, theta, path=path)
        assert y.dtype == dtype
        assert ((y.double() - by_definition(x.double(), basis, theta.double())).abs() <= bound).all()


@pytest.mark.parametrize("path", [None, "channels_first", "structure_first"])
@pytest.mark.parametrize("name", ["sparse", "polynomial"])
def test_values_along_edges_share_the_dtype_of_x(name, path):
    basis = BASES[name]()
    with pytest.raises(ShapeError, match="x and values must share one dtype"):
        conv(numbers(M, P).float(), basis, numbers(basis.size, P, 3).float(), path=path)
