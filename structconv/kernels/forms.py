"""Fused forms: bases that one kernel computes as a whole, recognised from the tree of values.

A kernel gives a function that returns, for an expression that it can compute, an equal basis whose `apply` is that
kernel, and registers it with one line. The planner then weighs the form on each path beside the expression itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from structconv.bases.base import Basis
from structconv.kernels.fused import Follow, FusedAttention
from structconv.planning.cost import Cost
from structconv.planning.rules import Between, ChannelsFirst, Problem, Rule, Run, StructureFirst, joined, rule
from structconv.theta import Theta

#: A fused kernel passes over the scores once, where separate operations pass several times.
FUSED_SHARE = 0.3


class Form(NamedTuple):
    """How to recognise what a kernel computes, whether it is right for the values at hand, and what it costs."""

    kernel: str
    recognise: Callable[[Basis], Basis | None]
    suits: Callable[[Basis, Tensor], bool]
    priced: bool
    projects: bool
    follow: Callable[[Basis, Basis], Follow | None]

    def of(self, basis: Basis, r: Tensor) -> Basis | None:
        """The fused form of a basis where there is one that is right for r."""
        found = self.recognise(basis)
        return found if found is not None and self.suits(found, r) else None


FORMS: dict[type[Basis], list[Form]] = {}


def _always(form: Basis, r: Tensor) -> bool:
    return True


def _alone(form: Basis, leaf: Basis) -> Follow | None:
    return None


def register_form(kernel: str, recognise: Callable[[Basis], Basis | None], *types: type[Basis],
                  suits: Callable[[Basis, Tensor], bool] = _always, priced: bool = False,
                  projects: bool = False,
                  follow: Callable[[Basis, Basis], Follow | None] = _alone) -> None:
    """Register a fused kernel for the types of expression at whose root it may stand.

    Args:
        kernel: its name in plans.
        recognise: basis -> the fused form, or `None`; reads types, sizes and options, never values.
        suits: (form, r) -> whether the kernel is right for these values; else the expression is computed as it is.
        priced: whether the form's type has an `application_cost` of its own, because it does less work than the
            expression; it is then tried before those that do the same.
        projects: whether the form's `projected` also makes the queries and keys of a `ProjectedBilinear`.
        follow: (form, leaf) -> how the same form is made over another leaf, of the same type and shapes, without
            recognising it again; `None` where the form rests on more than the leaf and the seed of a dropout. What
            is returned holds no tensor of the form's.
    """
    form = Form(kernel, recognise, suits, priced, projects, follow)
    for kind in types:
        forms = FORMS.setdefault(kind, [])
        forms.insert(0 if priced else len(forms), form)
        for path in (Between, ChannelsFirst, StructureFirst):
            rule(kind, path.path, kernel=kernel)(_fused_rule(path, form))


def fused(basis: Basis, r: Tensor) -> Basis:
    """The first fused form of a basis that is right for r, or the basis itself."""
    return recognised(basis, r)[0]


def recognised(basis: Basis, r: Tensor) -> tuple[Basis, Form | None]:
    """The same, and which kernel's it is."""
    for form in FORMS.get(type(basis), []):
        found = form.of(basis, r)
        if found is not None:
            return found, form
    return basis, None


class FusedRule(Rule):
    """A path whose structure is applied by a fused kernel: that of `form`, on the order `plain`."""

    form: Form
    plain: Rule

    def formed(self, x: Tensor, found: Basis, theta: Theta, bias: Tensor | None) -> Tensor:
        """`biased` with the form of the basis."""
        if self.projects and isinstance(found, FusedAttention):
            return joined(theta, found.projected(x, theta), bias)
        return self.plain.biased(x, found, theta, bias)


def _fused_rule(path: type[Rule], kernel: Form) -> type[Rule]:
    class Fused(path, FusedRule):  # type: ignore[misc, valid-type]
        """As `FusedRule` says."""

        form, plain, projects = kernel, path(), kernel.projects and path is Between

        def applies(self, basis: Basis, theta: Theta, x: Tensor) -> bool:
            return super().applies(basis, theta, x) and kernel.recognise(basis) is not None

        def cost(self, problem: Problem) -> Cost:
            found = kernel.recognise(problem.basis) if kernel.priced else None
            if found is not None:
                return self.plain.cost(problem.part(found, problem.theta))
            return self.plain.cost(problem).repeated(FUSED_SHARE)

        def run(self, x: Tensor, basis: Basis, theta: Theta) -> Tensor:
            return self.formed(x, kernel.of(basis, x) or basis, theta, None)

        def biased(self, x: Tensor, basis: Basis, theta: Theta, bias: Tensor | None) -> Tensor:
            return self.formed(x, kernel.of(basis, x) or basis, theta, bias)

        def prepared(self, x: Tensor, basis: Basis, theta: Theta) -> Run:
            return lambda x, bias: self.biased(x, basis, theta, bias)

    return Fused
