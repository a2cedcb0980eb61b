"""The checkers are checked: each mistake, made on purpose, fails the check that is there for it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from structconv.bases.base import Basis, value
from structconv.bases.dense import Dense
from structconv.bases.pairs import full
from structconv.bases.pairwise import Pairwise
from structconv.bases.scores import Bilinear
from structconv.errors import ConfigError
from structconv.mechanisms.expression import Mechanism
from structconv.mechanisms.scores import DotProduct
from structconv.structures import Graph, Grid, Padding
from structconv.testing import CHECKS, Setup, Specimen, add, suite
from tests.support.library import SPECIMENS

F64 = torch.float64


class Right(Basis):
    """A circulant matrix of 5 entries, with nothing but what a basis must have."""

    size = num_inputs = num_outputs = 0

    def __init__(self, kernel: Tensor | None = None) -> None:
        self.kernel = torch.randn(2, 5, dtype=F64) if kernel is None else kernel
        self.size, self.num_inputs, self.num_outputs = self.kernel.shape[0], 5, 5
        self.grid = Grid(5, periodic=True)

    def dense(self, dtype=None):
        i = torch.arange(5)
        return self.kernel.to(dtype or self.kernel.dtype)[:, (i[:, None] - i) % 5]


class WrongSizes(Right):
    batch_shape = (3,)


class DenseOfOneDtype(Right):
    def dense(self, dtype=None):
        return super().dense(F64)


class LongRepr(Right):
    def __repr__(self):
        return object.__repr__(self)


class TakesAnything(Right):
    def analysis(self, x):
        return super().analysis(x[..., :5, :])


class WrongAnalysis(Right):
    def analysis(self, x):
        return super().analysis(x) * (1 + 1e-8)


class WrongSynthesis(Right):
    def synthesis(self, r):
        return self.apply(r).mean(-3)


class WrongShape(Right):
    def apply(self, r):
        return super().apply(r).squeeze(0).unsqueeze(0).unsqueeze(0)


class WrongTranspose(Right):
    def _transposed(self):
        return Right(self.kernel)


class CutsGradient(Right):
    def analysis(self, x):
        return Right(self.kernel.detach()).analysis(x)


class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a.clone()

    @staticmethod
    def backward(ctx, g):
        return 1.5 * g


class WrongGradient(Right):
    def analysis(self, x):
        return super().analysis(Bent.apply(x))


class WrongGradientAlsoOfDense(Right):
    def dense(self, dtype=None):
        return Bent.apply(super().dense(dtype))


class WrongEntries(Right):
    def evaluate(self, pairs):
        return super().evaluate(pairs) + 1


class WrongPattern(Right):
    def pattern(self):
        return Graph(torch.tensor([[0], [0]]), num_nodes=5)


class MixesBatch(Right):
    def analysis(self, x):
        return super().analysis(x + 1e-3 * x.mean(0, keepdim=x.dim() > 2))


class ChangesDtype(Right):
    def analysis(self, x):
        return super().analysis(x.float()).to(F64 if x.dtype == torch.bfloat16 else x.dtype)


class RoundsTooMuch(Right):
    def analysis(self, x):
        return super().analysis(x.to(torch.bfloat16).to(x.dtype) if x.dtype == torch.float32 else x)


class ReadsMemory(Right):
    def analysis(self, x):
        return super().analysis(x.as_strided(x.shape, torch.empty(x.shape).stride()))


class CannotCopy(Right):
    def __deepcopy__(self, memo):
        return Right(torch.zeros_like(self.kernel))


class NotCirculant(Right):
    def dense(self, dtype=None):
        return super().dense(dtype) * torch.arange(5)


@value
class DependsOnBlock(Pairwise):
    """Weights that are normalized over whatever happens to be evaluated together, and do not say so."""

    scores: Tensor
    size, num_inputs, num_outputs = 1, 4, 4

    def evaluate(self, pairs):
        return torch.softmax(pairs.pick(self.scores), -1)


WRONG = [(WrongSizes, "contract"), (DenseOfOneDtype, "contract"), (LongRepr, "contract"), (TakesAnything, "contract"),
         (WrongAnalysis, "reference"), (WrongSynthesis, "reference"), (WrongShape, "reference"),
         (WrongTranspose, "reference"), (WrongTranspose, "adjoint"), (CutsGradient, "reference"),
         (CutsGradient, "gradcheck"), (WrongGradient, "reference"), (WrongGradient, "gradcheck"),
         (WrongGradientAlsoOfDense, "gradcheck"), (WrongEntries, "entries"), (WrongPattern, "entries"),
         (MixesBatch, "batching"), (WrongAnalysis, "paths"), (ChangesDtype, "dtypes"), (RoundsTooMuch, "dtypes"),
         (ReadsMemory, "noncontiguous"), (CannotCopy, "copies"), (NotCirculant, "translation")]


def test_what_is_right_passes_everything():
    for _, check in suite(Specimen("right", Right, frozenset({"translates"}))):
        check()


@pytest.mark.parametrize(("wrong", "check"), WRONG, ids=lambda case: getattr(case, "__name__", case))
def test_a_mistake_fails_its_check(wrong, check):
    with pytest.raises(AssertionError):
        CHECKS[check](Specimen("wrong", wrong))


def test_dependence_on_blocks_is_found():
    with pytest.raises(AssertionError, match="in blocks"):
        CHECKS["blocks"](Specimen("wrong", lambda: DependsOnBlock(torch.randn(1, 4, 4, dtype=F64))))


class Broken(Mechanism):
    """A mechanism whose basis is what `fn(inputs)` says."""

    size = 1

    def __init__(self, fn):
        super().__init__()
        self.fn, self.reads = fn, ("content",) if fn is not by_content else ()
        self.linear = nn.Linear(3, 3, dtype=F64)

    def forward(self, inputs):
        return self.fn(self, inputs)


class Normed(DotProduct):
    """Divides keys by the sum of all their squares, and says that an entry depends on its own pair alone."""

    sources = ("keys",)

    def forward(self, inputs):
        return Bilinear(self.queries(inputs.z), inputs.of_x(self.keys))

    def keys(self, x, start=0):
        key = super().keys(x, start)
        return key / key.square().sum(-2, keepdim=True)


def test_a_mechanism_that_depends_on_more_than_its_pair_is_found():
    with pytest.raises(AssertionError, match="a batch of two samples"):
        CHECKS["samples"](Specimen("wrong", lambda: Setup(
            Normed(2, 3).softmax().bound(4).double(), torch.randn(5, 4, dtype=F64))))


def by_position(mechanism, inputs):
    """Not equivariant: the first input weighs more."""
    a = torch.ones(1, inputs.num_inputs, inputs.num_outputs, dtype=inputs.dtype)
    a[:, 0] = 2
    return Dense(a)


def by_content(mechanism, inputs):
    """Reads x, and says that it does not."""
    mechanism.reads = ("structure",)
    return Dense(torch.ones(1, inputs.num_inputs, inputs.num_outputs, dtype=inputs.dtype) * inputs.x.sum())


def by_total(mechanism, inputs):
    """The weights of one element of a batch, or of one block, depend on the others."""
    a = torch.ones(1, inputs.num_inputs, inputs.num_outputs, dtype=inputs.dtype)
    return Dense(a * inputs.x.sum())


def leaking(mechanism, inputs):
    """Masks by multiplying with zero."""
    keep = torch.tensor([True, True, False, True])
    a = torch.softmax(mechanism.linear(inputs.x) @ inputs.z.mT, -2).unsqueeze(0)
    return Dense(a * keep.unsqueeze(-1))


def nearly_masked(mechanism, inputs):
    """The output that sees nothing still has a gradient."""
    a = torch.ones(1, 4, 4, dtype=inputs.dtype)
    a[..., 0] = 0
    return Dense(a) * mechanism.linear.weight[0, 0]


def breaks_graph(mechanism, inputs):
    """Branches on a value."""
    a = torch.ones(1, inputs.num_inputs, inputs.num_outputs, dtype=inputs.dtype)
    return Dense(a if inputs.x.sum() > 0 else -a)


def by_constant(mechanism, inputs):
    """Another program for each number of entries."""
    a = torch.ones(1, int(inputs.num_inputs), int(inputs.num_outputs), dtype=inputs.dtype)
    return Dense(a * (1.0 + {4: 1, 8: 2, 12: 3}[int(inputs.num_inputs)]))


def forgets_state(mechanism, inputs):
    """A number outside of the state dict."""
    if not hasattr(mechanism, "hidden"):
        mechanism.hidden = torch.randn((), dtype=F64)
    return Dense(mechanism.hidden.expand(1, 4, 4))


@pytest.mark.parametrize(("fn", "check"), [
    (by_position, "permutation"), (by_content, "contract"), (by_total, "batching"), (by_total, "blockwise"),
    (leaking, "masking"), (breaks_graph, "compile"), (by_constant, "compile"), (breaks_graph, "export"),
    (by_constant, "export"), (forgets_state, "copies")])
def test_a_mistaken_mechanism_fails_its_check(fn, check):
    def make():
        graph = Graph(torch.tensor([[0, 1, 2], [1, 2, 3]]), num_nodes=4) if check == "blockwise" else None
        broken = Broken(fn)
        broken.batching = "structure"  # as if the structure of a batch told it all
        return Setup(broken, torch.randn(4, 3, dtype=F64), structure=graph)

    failures = (AssertionError, RuntimeError, torch._dynamo.exc.Unsupported) if check in ("compile", "export") \
        else AssertionError
    with pytest.raises(failures):
        CHECKS[check](Specimen("wrong", make, frozenset({"resizes"})))


def test_a_promise_to_mask_needs_something_masked():
    with pytest.raises(AssertionError, match="masks needs"):
        CHECKS["masking"](Specimen("wrong", Right))


class Warm(Mechanism):
    """Scores of masked-out pairs are very small instead of absent: an output that sees nothing averages."""

    has_scores = True

    def forward(self, inputs):
        scores = Bilinear(inputs.z.unsqueeze(-3), inputs.x.unsqueeze(-3))
        keep = Padding(torch.tensor([True, True, True, False]))
        a = scores.evaluate(full(4, 4, F64, scores.device))
        return Dense(torch.softmax(torch.where(keep.keep.unsqueeze(-1), a, -1e4), -2))


def test_a_finite_minus_infinity_leaks_nan():
    specimen = Specimen("warm", lambda: Setup(Warm(), torch.randn(4, 3, dtype=F64)))
    with pytest.raises(AssertionError):
        CHECKS["masking"](specimen)


def test_names_and_traits_are_checked():
    name = next(iter(SPECIMENS))
    with pytest.raises(ConfigError, match="name must be new"):
        add(name, Right)
    with pytest.raises(ConfigError, match="traits must be among"):
        Specimen("wrong", Right, frozenset({"flies"}))


def test_every_check_is_used_by_some_specimen():
    used = {check.name for specimen in SPECIMENS.values() for _, check in suite(specimen)}
    assert used == set(CHECKS)


def test_a_specimen_is_made_alike_each_time_and_leaves_the_generator_alone():
    specimen = Specimen("attention", lambda: Setup(DotProduct(dim=2).softmax().bound(3).double(),
                                                   torch.randn(4, 3, dtype=F64)))
    state = torch.get_rng_state()
    assert torch.equal(specimen.basis().dense(F64), specimen.basis().dense(F64))
    assert not torch.equal(specimen.basis(1).dense(F64), specimen.basis().dense(F64))
    assert torch.equal(torch.get_rng_state(), state)
