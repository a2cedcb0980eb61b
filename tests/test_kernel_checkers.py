"""The checks of kernels are checked: each mistake that a kernel can make fails the check that is there for it."""

from __future__ import annotations

from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from structconv.bases.base import Basis, value
from structconv.bases.pairwise import weights_at
from structconv.bases.sparse import Sparse
from structconv.bases.spec import getter
from structconv.kernels.orders import Application, Applied
from structconv.mechanisms.expression import Mechanism
from structconv.planning import Cost, kernel, register
from structconv.testing import CHECKS, Setup, Specimen
from tests.support.library import SPECIMENS

F64 = torch.float64


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


class Right(Applied):
    """Multiplies rows by factors."""

    name, types = "right", (Factors,)

    def match(self, problem):
        return getter(problem.basis.values)

    def application(self, match, problem):
        return Application(lambda r, call: match(call.basis).unsqueeze(-1) * r)


class NoBias(Right):
    def compile(self, match, problem, path):
        run = super().compile(match, problem, path)
        return lambda call: run(call._replace(bias=None))


class Captures(Right):
    """Keeps the tensor of the call that it met first."""

    def application(self, match, problem):
        first = []

        def apply(r, call):
            first.append(match(call.basis))
            return first[0].unsqueeze(-1) * r

        return Application(apply)


class CapturesEntries(Right):
    """Takes the number of entries for that of all calls."""

    def application(self, match, problem):
        scale = problem.inputs

        def apply(r, call):
            return match(call.basis).unsqueeze(-1) * r * (r.shape[-2] / scale)

        return Application(apply)


class WrongBetween(Right):
    def application(self, match, problem):
        right = super().application(match, problem)
        return right._replace(apply=lambda r, call: right.apply(r, call).flip(-3),
                              analysis=lambda x, call: right.apply(x.unsqueeze(-3), call),
                              synthesis=lambda r, call: right.apply(r, call).sum(-3))


class WrongWeights(Right):
    def weights(self, match, problem):
        return lambda call: weights_at(call.materialized(), call.x.dtype).flip(-3)


class LosesGradient(Right):
    def application(self, match, problem):
        return Application(lambda r, call: match(call.basis).detach().unsqueeze(-1) * r)


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
    with mock.patch.object(kernel, "_KERNELS", dict(kernel._KERNELS)), \
            mock.patch.object(kernel, "_ORDERED", list(kernel._ORDERED)):
        try:
            register(one)
            yield
        finally:
            for forget in kernel.FORGET:
                forget()


def factors():
    return Factors(torch.randn(2, 5, dtype=F64))


def by_entry():
    return Setup(ByEntry().bound(3), torch.randn(5, 3, dtype=F64))


@pytest.mark.parametrize("make", [factors, by_entry], ids=["a basis", "a mechanism"])
@pytest.mark.parametrize(("wrong", "told"), [
    (NoBias, "structure_first, Full: off"), (Captures, "in its second call: off"),
    (WrongBetween, "between, .*: off"), (WrongWeights, "weights of"), (LosesGradient, "gradient of input")])
def test_a_mistake_fails_the_check_of_kernels(make, wrong, told):
    with registered(wrong()), pytest.raises(AssertionError, match=told):
        CHECKS["kernels"](Specimen("wrong", make))


def test_a_number_of_entries_that_is_kept_fails_the_check_of_sizes():
    with registered(CapturesEntries()):
        CHECKS["kernels"](Specimen("wrong", by_entry))
        with pytest.raises(AssertionError, match=r"compiled for .* entries"):
            CHECKS["sizes"](Specimen("wrong", by_entry))


@pytest.mark.parametrize("name", ["causal attention", "causal over outputs", "window attention", "masked matrix",
                                  "padded"])
def test_a_nan_behind_a_mask_fails_the_check_of_absent_pairs(name):
    if name != "padded":  # whose x is cleaned before any kernel sees it
        with registered(Multiplies()), pytest.raises(AssertionError, match=r"multiplies.*, which is NaN"):
            CHECKS["absent"](SPECIMENS[name])
    CHECKS["absent"](SPECIMENS[name])


def test_what_is_right_passes():
    with registered(Right()):
        for make in (factors, by_entry):
            CHECKS["kernels"](Specimen("right", make))
        CHECKS["sizes"](Specimen("right", by_entry))




def test_a_kernel_that_keeps_the_graph_fails_the_check_of_changes():
    with registered(KeepsGraph()), pytest.raises(AssertionError, match=r"keeps, .* after a change in place"):
        CHECKS["changes"](SPECIMENS["bipartite adjacency"])
