"""Repeated calls of attention: the expression and the kernel's form are known, only the numbers are new.

A call projects x, hands the queries, keys or terms to the form that was recognised in the first call of its kind, and
applies it. Nothing is built from options, no support is listed, no rule is weighed and no tree is searched. The
expression itself, of the new numbers, is there for what a kernel leaves to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from torch import Tensor

from structconv import ops
from structconv.bases.base import Basis
from structconv.bases.chain import Chain
from structconv.bases.scores import ProjectedBilinear
from structconv.kernels.forms import FORMS, Form, FusedRule, fused, recognised
from structconv.kernels.fused import Follow
from structconv.mechanisms.expression import Mechanism, Operation, Setting
from structconv.mechanisms.scores import Additive, BiAffine, Concatenation, DotProduct, General, Score
from structconv.nn.recall import Call, Repeat, grounds, kind_of, may_keep, store
from structconv.planning import Plan
from structconv.theta import HeadBlocksTheta, Theta

if TYPE_CHECKING:
    from structconv.nn.conv import Conv

#: Mechanisms whose basis depends on x and z by its numbers alone; their `ready` is known to be their `build`.
SCORES = frozenset((Additive, BiAffine, Concatenation, DotProduct, General))
#: x Theta and z Theta, head by head.
Projected = tuple[Tensor, Tensor]
#: (x, z or none) -> both with masked-out entries zeroed.
Zeroed = Callable[[Tensor, "Tensor | None"], tuple[Tensor, Tensor]]


class Seen(NamedTuple):
    """A basis, and what it was made of: x with masked-out entries zeroed, Theta, and what each head projected.

    `projected` is there where a mechanism asks for it, `masked` where there may be masked-out entries.
    """

    basis: Basis
    x: Tensor
    theta: Theta
    projected: Projected | None
    masked: Zeroed | None


def keep_attention(layer: Conv, x: Tensor, z: Tensor | None, structure: Any, seen: Seen, plan: Plan | None) -> None:
    """Keep a call that was just computed, if its expression is operators over one score and a kernel knows its form.

    Args:
        plan: what it was computed by, where the mechanism did not ask for what each head projects.
    """
    found = layer.mechanism.chain()
    if found is None or type(found[1]) not in SCORES or not may_keep(x) or (z is not None and not may_keep(z)):
        return
    operators, score = found
    theta, projected = seen.theta, seen.projected
    chain, leaf = Chain.of(seen.basis)
    kernel = _kernel(seen.basis, projected, plan)
    follow = None if kernel is None else kernel[1].follow(kernel[0], leaf)
    rests = grounds(layer, theta, structure, list(score.modules())[1:], _options(operators))
    if kernel is None or follow is None or rests is None:
        return
    deferred = isinstance(leaf, ProjectedBilinear)
    build = _Expression(cast(Score, score).ready(), chain, follow, structure, deferred)
    run = _by_heads(build, kernel[1], cast(HeadBlocksTheta, theta)) if projected is not None else _by_rule(
        build, cast(FusedRule, cast(Plan, plan).rule), theta)
    others = () if z is None else (z,)
    run = run if seen.masked is None else _masked(run, seen.masked)
    store(layer, kind_of(layer, x, *others), Call(structure, rests, run))


class _Expression:
    """(setting) -> (basis, its form)."""

    def __init__(self, scores: Callable[[Setting], Basis], chain: Chain, follow: Follow, structure: Any,
                 deferred: bool) -> None:
        self.scores, self.chain, self.follow = scores, chain, follow
        self.structure, self.deferred = structure, deferred

    def __call__(self, x: Tensor, z: Tensor | None, projected: Projected | None) -> tuple[Basis, Basis]:
        leaf = self.scores(Setting(x, x if z is None else z, self.structure, projected, self.deferred))
        basis, seed = self.chain.over(leaf)
        return basis, self.follow(leaf, basis, seed)


def _kernel(basis: Basis, projected: Projected | None, plan: Plan | None) -> tuple[Basis, Form] | None:
    """The form that computed the call and its kernel; `None` if there is none, or it would not be the first choice."""
    if projected is None:
        rule = plan.rule if plan is not None else None
        form = rule.form.recognise(basis) if isinstance(rule, FusedRule) else None
        return None if form is None else (form, cast(FusedRule, rule).form)
    form, kernel = recognised(basis, projected[0])
    before = FORMS[type(basis)][:FORMS[type(basis)].index(kernel)] if kernel is not None else []
    return None if kernel is None or any(other.recognise(basis) for other in before) else (form, kernel)


def _by_heads(build: _Expression, kernel: Form, theta: HeadBlocksTheta) -> Repeat:
    """Scores of x Theta_k, applied to x Theta_k."""
    shape, suits = (theta.size, theta.head_channels), kernel.suits

    def run(x: Tensor, bias: Tensor | None, z: Tensor | None = None) -> Tensor:
        source = theta.heads(x)
        basis, form = build(x, z, (source, source if z is None else theta.heads(z)))
        form = form if suits(form, source) else fused(basis, source)
        return theta.join(ops.applied(form, source, None if bias is None else bias.view(shape)))

    return run


def _by_rule(build: _Expression, rule: FusedRule, theta: Theta) -> Repeat:
    """Scores of x, on the order of the products that was planned."""
    suits = rule.form.suits

    def run(x: Tensor, bias: Tensor | None, z: Tensor | None = None) -> Tensor:
        basis, form = build(x, z, None)
        return rule.formed(x, form if suits(form, x) else basis, theta, bias)

    return run


def _masked(run: Repeat, masked: Zeroed) -> Repeat:
    def masked_run(x: Tensor, bias: Tensor | None, z: Tensor | None = None) -> Tensor:
        x, z = masked(x, z)
        return run(x, bias, z)

    return masked_run


def _options(operators: list[Mechanism]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """What each operator was given, and whether it is training, as attributes that must stay."""
    for operator in operators:
        if isinstance(operator, Operation):
            yield from ((operator.options, name, value) for name, value in operator.options.items())
        if isinstance(operator, Operation) and operator.name == "dropout":
            yield operator.__dict__, "training", operator.training
