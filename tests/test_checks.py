"""`structconv.testing`: each mistake of a basis, a mechanism or a kernel, made on purpose, fails the check for it."""

from contextlib import contextmanager
from functools import partial

import pytest
import torch
from torch import nn

from structconv import ConfigError, DotProduct, Graph, Grid, Mechanism
from structconv.bases import Basis, Bilinear, Dense, Sparse, value
from structconv.bases.tree import getter
from structconv.kernels.orders import Application, Applied
from structconv.planning import Cost, register
from structconv.testing import CHECKS, TRAITS, Setup, Specimen, add, suite
from tests.support.library import SPECIMENS
from tests.support.registered import own_register

F64 = torch.float64


class Right(Basis):
    """A circulant matrix of 5 entries, with nothing but what a basis must have."""

    size = num_inputs = num_outputs = 0

    def __init__(self, kernel=None):
        self.kernel = torch.randn(2, 5, dtype=F64) if kernel is None else kernel
        self.size, self.num_inputs, self.num_outputs = self.kernel.shape[0], 5, 5
        self.grid = Grid(5, periodic=True)

    def dense(self, dtype=None):
        i = torch.arange(5)
        return self.kernel.to(dtype or self.kernel.dtype)[:, (i[:, None] - i) % 5]


class Bent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a.clone()

    @staticmethod
    def backward(ctx, g):
        return 1.5 * g


analysis, dense = Right.analysis, Right.dense
#: What is wrong, the method that is wrong, and the checks that find it.
WRONG = [
    ("sizes", {"batch_shape": (3,)}, "contract"),
    ("a dtype", {"dense": lambda a, dtype=None: dense(a, F64)}, "contract"),
    ("a long repr", {"__repr__": object.__repr__}, "contract"),
    ("any input", {"analysis": lambda a, x: analysis(a, x[..., :5, :])}, "contract"),
    ("rounding", {"analysis": lambda a, x: analysis(a, x) * (1 + 1e-8)}, "reference paths"),
    ("a mean", {"synthesis": lambda a, r: a.apply(r).mean(-3)}, "reference"),
    ("a shape", {"apply": lambda a, r: Right.apply(a, r)[None]}, "reference"),
    ("the transpose", {"_transposed": lambda a: Right(a.kernel)}, "reference adjoint"),
    ("no gradient", {"analysis": lambda a, x: analysis(Right(a.kernel.detach()), x)}, "reference gradcheck"),
    ("a gradient", {"analysis": lambda a, x: analysis(a, Bent.apply(x))}, "reference gradcheck"),
    ("a gradient of all", {"dense": lambda a, dtype=None: Bent.apply(dense(a, dtype))}, "gradcheck"),
    ("entries", {"evaluate": lambda a, pairs: Right.evaluate(a, pairs) + 1}, "entries"),
    ("a pattern", {"pattern": lambda a: Graph(torch.tensor([[0], [0]]), num_nodes=5)}, "entries"),
    ("mixed samples", {"analysis": lambda a, x: analysis(a, x + 1e-3 * x.mean(0, keepdim=x.dim() > 2))}, "batching"),
    ("another dtype", {"analysis": lambda a, x: analysis(a, x.float()).to(
        F64 if x.dtype == torch.bfloat16 else x.dtype)}, "dtypes"),
    ("low precision", {"analysis": lambda a, x: analysis(
        a, x.to(torch.bfloat16).to(x.dtype) if x.dtype == torch.float32 else x)}, "dtypes"),
    ("raw memory", {"analysis": lambda a, x: analysis(
        a, x.as_strided(x.shape, torch.empty(x.shape).stride()))}, "noncontiguous"),
    ("a copy", {"__deepcopy__": lambda a, memo: Right(torch.zeros_like(a.kernel))}, "copies"),
    ("no circle", {"dense": lambda a, dtype=None: dense(a, dtype) * torch.arange(5)}, "translation"),
    ("masks", {}, "masking"),
]


@pytest.mark.parametrize(("methods", "checks"), [pytest.param(*rest, id=name) for name, *rest in WRONG])
def test_a_mistaken_basis_fails_its_checks(methods, checks):
    for check in checks.split():
        with pytest.raises(AssertionError):
            CHECKS[check](Specimen("wrong", type("Wrong", (Right,), methods)))


class Broken(Mechanism):
    """A mechanism whose matrix is what `fn(self, inputs, ones)` says."""

    size = 1

    def __init__(self, fn, reads):
        super().__init__()
        self.fn, self.reads = fn, reads
        self.linear = nn.Linear(3, 3, dtype=F64)

    def forward(self, inputs):
        return Dense(self.fn(self, inputs, torch.ones(1, int(inputs.num_inputs), int(inputs.num_outputs), dtype=F64)))


def leaking(mechanism, inputs, ones):
    """Masks by multiplying with zero."""
    a = torch.softmax(mechanism.linear(inputs.x) @ inputs.z.mT, -2).unsqueeze(0)
    return a * torch.tensor([[1.0], [1.0], [0.0], [1.0]], dtype=F64)


def nearly_masked(mechanism, inputs, ones):
    """Scores of masked-out pairs are very small instead of absent."""
    scores = inputs.x @ inputs.z.mT
    return torch.where(torch.arange(4)[:, None] < 3, scores, -1e4).softmax(-2).unsqueeze(0)


def forgets_state(mechanism, inputs, ones):
    """A number outside of the state dict."""
    if not hasattr(mechanism, "hidden"):
        mechanism.hidden = torch.randn((), dtype=F64)
    return mechanism.hidden * ones


READS_X, BY_SIZE = (lambda m, inputs, ones: ones * inputs.x.sum()), {4: 1, 8: 2, 12: 3}


@pytest.mark.parametrize(("fn", "checks"), [
    (lambda m, inputs, ones: torch.cat([2 * ones[:, :1], ones[:, 1:]], 1), "permutation"),
    (READS_X, "contract batching blockwise"), (leaking, "masking"), (nearly_masked, "masking"),
    (lambda m, inputs, ones: ones if inputs.x.sum() > 0 else -ones, "compile export"),
    (lambda m, inputs, ones: ones * (1.0 + BY_SIZE[int(inputs.num_inputs)]), "compile export"),
    (forgets_state, "copies")],
    ids=["by position", "reads x", "leaks", "nearly masked", "branches", "constant", "hidden"])
def test_a_mistaken_mechanism_fails_its_checks(fn, checks):
    def make(check):
        graph = Graph(torch.tensor([[0, 1, 2], [1, 2, 3]]), num_nodes=4) if check == "blockwise" else None
        broken = Broken(fn, ("structure",) if check == "contract" else ("content",))
        broken.batching = "structure"  # as if the structure of a batch told it all
        return Setup(broken, torch.randn(4, 3, dtype=F64), structure=graph)

    for check in checks.split():
        compiles = (RuntimeError, torch._dynamo.exc.Unsupported) if check in ("compile", "export") else ()
        with pytest.raises((AssertionError, *compiles)):
            CHECKS[check](Specimen("wrong", partial(make, check), frozenset({"resizes"})))


LEAKS = {"mean": lambda m, inputs, ones: ones * (1 + 0.01 * inputs.x.mean()),
         "mean of scores": lambda m, inputs, ones: (inputs.x @ inputs.z.mT).unsqueeze(-3) - 0.01 * inputs.x.mean(),
         "other samples": lambda m, inputs, ones: (inputs.x @ inputs.z.roll(1, 0).mT).unsqueeze(-3),
         "number of samples": lambda m, inputs, ones: (inputs.x @ inputs.z.mT).unsqueeze(-3) / inputs.x.numel()}


@pytest.mark.parametrize("lead", [(2,), (1,), (2, 3)])
@pytest.mark.parametrize("leak", LEAKS)
def test_a_mechanism_that_leaks_between_samples_of_x_fails_its_check(leak, lead):
    with pytest.raises(AssertionError, match="sample"):
        CHECKS["batching"](Specimen("wrong", lambda: Setup(
            Broken(LEAKS[leak], ("content",)), torch.randn(*lead, 4, 3, dtype=F64))))


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


@value
class Factors(Basis):
    """A diagonal matrix a head, known to the kernels of this file alone."""

    values: torch.Tensor
    size = property(lambda self: self.values.shape[-2])
    num_inputs = num_outputs = property(lambda self: self.values.shape[-1])

    def dense(self, dtype=None):
        return torch.diag_embed(self.values).to(dtype or self.values.dtype)


class ByEntry(Mechanism):
    """Two factors for each entry, made of its channels."""

    size = 2

    def forward(self, inputs):
        return Factors(inputs.x[..., :2].mT)


class Kernel(Applied):
    """Multiplies rows by factors."""

    name, types = "right", (Factors,)

    def match(self, problem):
        return getter(problem.basis.values)

    def application(self, match, problem):
        return Application(lambda r, call: match(call.basis).unsqueeze(-1) * r)


class NoBias(Kernel):
    def compile(self, match, problem, path):
        run = super().compile(match, problem, path)
        return lambda call: run(call._replace(bias=None))


class Captures(Kernel):
    """Keeps the tensor of the call that it met first."""

    def application(self, match, problem):
        first = []

        def apply(r, call):
            first.append(match(call.basis))
            return first[0].unsqueeze(-1) * r

        return Application(apply)


class LosesGradient(Kernel):
    def application(self, match, problem):
        return Application(lambda r, call: match(call.basis).detach().unsqueeze(-1) * r)


class WrongWhere(Kernel):
    """Is wrong for the calls for which `where(r)` is true."""

    def __init__(self, where):
        self.where = where

    def application(self, match, problem):
        return Application(lambda r, call: match(call.basis).unsqueeze(-1) * r * (1.01 if self.where(r) else 1.0))


#: Calls, of which a kernel sees r (..., K or 1, M, C).
CALLS = {"float32": lambda r: r.dtype == torch.float32, "no gradients": lambda r: not torch.is_grad_enabled(),
         "no leading dimensions": lambda r: r.dim() == 3, "one leading dimension": lambda r: r.dim() == 4,
         "two leading dimensions": lambda r: r.dim() == 5, "one channel": lambda r: r.shape[-1] == 1,
         "many channels": lambda r: r.shape[-1] >= 8}


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("name", ["factors", "by entry"])
def test_a_kernel_that_is_wrong_for_some_calls_fails_its_check(name, calls):
    with registered(WrongWhere(CALLS[calls])), pytest.raises(AssertionError, match=r"right, .*: off by"):
        CHECKS["kernels"]({"factors": FACTORS, "by entry": BY_ENTRY}[name])


@pytest.mark.parametrize("calls", CALLS)
def test_a_basis_that_is_wrong_for_some_calls_fails_its_check(calls):
    def apply(a, r):
        return Right.apply(a, r) * (1.01 if CALLS[calls](r) else 1.0)

    with pytest.raises(AssertionError, match="off by"):
        CHECKS["reference"](Specimen("wrong", type("Wrong", (Right,), {"apply": apply})))


class Multiplies(Applied):
    """Masks by multiplying with zero, as a kernel does that looks for no NaN."""

    name, types = "multiplies", (Basis,)

    def match(self, problem):
        return True

    def application_cost(self, match, problem, channels, mode):
        return Cost()

    def application(self, match, problem):
        return Application(lambda r, call: call.materialized().dense(r.dtype).mT @ r)


class KeepsGraph(Applied):
    """Holds the edges as they were in its first call."""

    name, types = "keeps", (Sparse,)

    def match(self, problem):
        return {}

    def application(self, match, problem):
        def apply(r, call):
            if not match:
                match["a"] = call.materialized().dense(r.dtype)
            return match["a"].mT @ r

        return Application(apply)


@contextmanager
def registered(one):
    """The kernel beside those of the package, for a while."""
    with own_register():
        register(one)
        yield


FACTORS = Specimen("factors", lambda: Factors(torch.randn(2, 5, dtype=F64)))
BY_ENTRY = Specimen("by entry", lambda: Setup(ByEntry().bound(3), torch.randn(5, 3, dtype=F64)))


@pytest.mark.parametrize(("wrong", "check", "specimen", "message"), [
    (NoBias, "kernels", FACTORS, "structure_first, Full: off"),
    (Captures, "kernels", BY_ENTRY, "in its second call: off"),
    (LosesGradient, "kernels", FACTORS, "gradient of input"),
    (Multiplies, "absent", SPECIMENS["window attention"], r"multiplies.*, which is NaN"),
    (KeepsGraph, "changes", SPECIMENS["bipartite adjacency"], r"keeps, .* after a change in place")])
def test_a_mistaken_kernel_fails_its_check(wrong, check, specimen, message):
    with registered(wrong()), pytest.raises(AssertionError, match=message):
        CHECKS[check](specimen)


def test_names_and_traits_are_checked():
    with pytest.raises(ConfigError, match="name must be new"):
        add(next(iter(SPECIMENS)), Right)
    with pytest.raises(ConfigError, match="traits must be among"):
        Specimen("wrong", Right, frozenset({"flies"}))


@pytest.mark.parametrize("trait", ["permutes", "blockwise", "resizes", "compiles", "exports"])
def test_a_trait_of_mechanisms_is_refused_for_a_basis(trait):
    assert TRAITS[trait].startswith("of a mechanism: ")
    check = [*suite(Specimen("mine", Right, frozenset({trait})))][-1][1]
    with pytest.raises(ConfigError, match=f"mine: the trait '{trait}' needs a mechanism with its inputs; got Right"):
        check()


@pytest.mark.parametrize(("trait", "make"), [("translates", FACTORS.make), ("translates", BY_ENTRY.make),
                                             ("blockwise", BY_ENTRY.make)])
def test_a_trait_of_a_structure_is_refused_without_it(trait, make):
    *_, (_, check) = suite(Specimen("mine", make, frozenset({trait})))
    with pytest.raises(ConfigError, match=f"mine: the trait '{trait}' needs a .*mechanism on a"):
        check()


def test_a_specimen_is_made_alike_each_time_and_leaves_the_generator_alone():
    specimen, state = BY_ENTRY, torch.get_rng_state()
    assert torch.equal(specimen.basis().dense(F64), specimen.basis().dense(F64))
    assert not torch.equal(specimen.basis(1).dense(F64), specimen.basis().dense(F64))
    assert torch.equal(torch.get_rng_state(), state)
