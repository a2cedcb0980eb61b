"""The laws of every basis, as functions that raise `AssertionError`: values, gradients, adjoints, paths.

All compare with the einsum of the definition over `dense()`, in float64. The laws that only some bases obey are in
`laws.py`; dtypes, copies, compilers and exporters in `programs.py`; `suite` picks the checks for a specimen.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from unittest import mock

import torch
from torch import Tensor

from structconv import ops
from structconv.bases import pairs, pairwise
from structconv.bases.base import Basis
from structconv.bases.pairs import Edges, full
from structconv.bases.pairwise import entries
from structconv.testing.specimens import Draw, Rounded, Setup, Specimen, as_basis, draws, with_leaves
from structconv.weights import Weight
from structconv.weights.whole import as_weight

__all__ = ["CHANNELS", "F64", "TOLERANCE", "absent_pairs", "arguments", "by_definition", "check_adjoint",
           "check_blocks", "check_contract", "check_entries", "check_gradcheck", "check_paths", "check_reference",
           "same", "same_gradients", "with_batch"]

F64 = torch.float64
TOLERANCE = 1e-10
CHANNELS = 3


def absent_pairs(basis: Basis) -> Tensor:
    """Return the pairs that are masked out in all matrices, (M, N) booleans; without a mask, the pairs whose entries
    are zero."""
    present = basis._present()
    absent = basis.dense(F64) == 0 if present is None else ~present
    return absent.flatten(0, -3).all(0)


def same(actual: Tensor, expected: Tensor, what: str, tolerance: float | Tensor | None = None) -> None:
    """Assert that two tensors have one shape and differ by at most `tolerance`, relative to the larger of 1 and max: by
    default that of float64, or a thousand units in the last place of a narrower dtype."""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}: shape {tuple(actual.shape)} instead of {tuple(expected.shape)}")
    if expected.numel() == 0:
        return
    if tolerance is None:
        tolerance = TOLERANCE if actual.dtype == F64 else 1e3 * torch.finfo(actual.dtype).eps
    actual, expected = actual.detach().to(F64), expected.detach().to(F64)
    error = (actual - expected).abs()
    if isinstance(tolerance, float):
        tolerance = tolerance * expected.abs().max().clamp(min=1.0)
    if not bool((error <= tolerance).all()):  # NaN is no match either
        allowed = float(torch.as_tensor(tolerance).max())
        raise AssertionError(f"{what}: off by {float(error.max()):.2e}; rounding explains at most {allowed:.1e}")


def same_gradients(actual: Tensor, expected: Tensor, inputs: Sequence[Tensor], what: str,
                   of_expected: Sequence[Tensor] | None = None) -> None:
    """Assert equal values, and equal gradients of one random linear function of them with respect to `inputs`, those of
    `expected` being `of_expected`."""
    same(actual.detach(), expected.detach(), what)
    weight = torch.randn(expected.shape, dtype=actual.dtype, generator=torch.Generator().manual_seed(1))
    result = _gradients(actual, weight, inputs)
    expected_gradients = _gradients(expected, weight.to(expected.dtype), inputs if of_expected is None else of_expected)
    for position, (one, other) in enumerate(zip(result, expected_gradients, strict=True)):
        same(one, other, f"{what}: gradient of input {position}, of shape {tuple(other.shape)}")


def _gradients(y: Tensor, weight: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    if not y.requires_grad:
        return [torch.zeros_like(t) for t in inputs]
    result = torch.autograd.grad((y * weight).sum(), inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(t) if g is None else g for g, t in zip(result, inputs, strict=True)]


def by_definition(x: Tensor, basis: Basis, theta: Weight | Tensor) -> Tensor:
    """y_nq = sum_kmp A_kmn x_mp Theta_kpq, eq. 8 as one einsum over `basis.dense()` and the whole Theta: (..., M, P),
    (..., K, M, N) and (K, P, Q) -> (..., N, Q). O(K M N) memory and more: for small sizes."""
    whole = as_weight(theta).dense().to(dtype=x.dtype, device=x.device)
    return torch.einsum("...kmn,...mp,kpq->...nq", basis.dense(x.dtype).to(dtype=x.dtype, device=x.device), x, whole)


def with_batch(basis: Basis) -> tuple[int, ...]:
    """Leading dimensions of x that the basis broadcasts to: two samples, or the batch that it has."""
    own = tuple(basis.batch_shape)
    return (2,) if own in ((), (1,)) else own


def arguments(basis: Basis, *, heads: bool) -> Tensor:
    """Random x (2, M, C), or r (2, K, M, C), in float64, that requires a gradient."""
    lead = with_batch(basis)
    shape = (*lead, basis.size, basis.num_inputs) if heads else (*lead, basis.num_inputs)
    generator = torch.Generator().manual_seed(2)
    return torch.randn(*shape, CHANNELS, dtype=F64, generator=generator).requires_grad_()


def check_contract(specimen: Specimen) -> None:
    """Sizes, shapes and dtypes agree; the repr is one readable line; a wrong number of entries is an error."""
    basis = specimen.basis()
    sizes = (basis.size, basis.num_inputs, basis.num_outputs)
    assert all(type(size) is int for size in sizes), f"sizes K, M, N must be integers, not {sizes}"
    for dtype in (torch.float64, torch.float32):
        a = basis.dense(dtype)
        assert a.dtype == dtype, f"dense({dtype}) has dtype {a.dtype}"
        assert tuple(a.shape) == (*basis.batch_shape, *sizes), \
            f"dense() has shape {tuple(a.shape)}, not (*batch_shape, K, M, N) = {(*basis.batch_shape, *sizes)}"
    _check_reads_content(specimen)
    text = repr(basis)
    assert text and "\n" not in text and " at 0x" not in text, f"repr must be one readable line, not {text!r}"
    for primitive, heads in ((basis.analysis, False), (basis.synthesis, True), (basis.apply, True)):
        x = arguments(basis, heads=heads).detach()
        wrong = torch.cat([x, x[..., :1, :], x[..., :1, :]], -2) if basis.num_inputs else x.new_zeros(
            *x.shape[:-2], 2, CHANNELS)
        try:
            primitive(wrong)
        except (ValueError, RuntimeError, IndexError):
            continue
        raise AssertionError(f"{primitive.__name__} takes {wrong.shape[-2]} entries where M = {basis.num_inputs}: call "
                             "self.check_input(r) first in apply")


def _check_reads_content(specimen: Specimen) -> None:
    """A mechanism without "content" in `reads` makes the same basis of other numbers in x and z."""
    subject = specimen.subject()
    if isinstance(subject, Setup) and "content" not in subject.mechanism.reads:
        other = Setup(subject.mechanism, subject.x + 1, None if subject.z is None else subject.z + 1, subject.structure)
        same(other.basis().dense(F64), subject.basis().dense(F64), "the basis of other x, whose content is not read")


def check_reference(specimen: Specimen) -> None:
    """The primitives of the basis and of its transpose equal the einsum over `dense()`, gradients included; also in
    float32, without gradients, with 0 to 2 leading dimensions and other numbers of channels (`draws`)."""
    for turned in (False, True):
        subject, leaves = with_leaves(specimen.subject())
        basis = as_basis(subject)
        a = basis.dense(F64)
        if turned:
            basis = basis.transpose()
            same(basis.dense(F64).detach(), a.mT.detach(), "transpose().dense()")
            a = a.mT
        name = "transpose()." if turned else ""
        x, r = arguments(basis, heads=False), arguments(basis, heads=True)
        same_gradients(basis.analysis(x), torch.einsum("...kmn,...mc->...knc", a, x), [x, *leaves], f"{name}analysis")
        same_gradients(basis.apply(r), torch.einsum("...kmn,...kmc->...knc", a, r), [r, *leaves], f"{name}apply")
        same_gradients(basis.synthesis(r), torch.einsum("...kmn,...kmc->...nc", a, r), [r, *leaves],
                       f"{name}synthesis")
    rounded = Rounded.of(specimen.subject())
    for turned in (False, True):
        for draw in draws(turned):
            _check_drawn(rounded, draw, turned)


def _check_drawn(rounded: Rounded, draw: Draw, turned: bool) -> None:
    """The primitives of one draw equal the einsum over `dense()` in float64."""
    with torch.set_grad_enabled(draw.gradients):
        subject = rounded.like(draw, draw.dtype)
        basis = as_basis(subject)
        a = as_basis(rounded.like(draw, F64)).dense(F64)
        lead = tuple(subject.x.shape[:-2]) if isinstance(subject, Setup) else draw.lead(tuple(basis.batch_shape))
        a, basis = (a.mT, basis.transpose()) if turned else (a, basis)
        generator = torch.Generator().manual_seed(6)
        x = torch.randn(*lead, basis.num_inputs, draw.channels, generator=generator).to(F64)
        r = torch.randn(*lead, basis.size, basis.num_inputs, draw.channels, generator=generator).to(F64)
        for primitive, argument, equation in (
                (basis.analysis, x, "...kmn,...mc->...knc"), (basis.apply, r, "...kmn,...kmc->...knc"),
                (basis.synthesis, r, "...kmn,...kmc->...nc")):
            y = primitive(argument.to(draw.dtype).requires_grad_(draw.gradients))
            same(y, torch.einsum(equation, a, argument), f"{'transpose().' * turned}{primitive.__name__}, {draw}")


def check_adjoint(specimen: Specimen) -> None:
    """<A^T x, g> = <x, A g> for all k at once, and head by head."""
    basis = specimen.basis()
    turned = basis.transpose()
    x, r = arguments(basis, heads=False).detach(), arguments(basis, heads=True).detach()
    g = torch.randn(*x.shape[:-2], basis.size, basis.num_outputs, CHANNELS, dtype=F64,
                    generator=torch.Generator().manual_seed(4))
    same((basis.analysis(x) * g).sum(), (x * turned.synthesis(g)).sum(), "<analysis(x), g> = <x, A g>")
    same((basis.apply(r) * g).sum(), (r * turned.apply(g)).sum(), "<apply(r), g> = <r, A g>")


def check_gradcheck(specimen: Specimen) -> None:
    """Gradients of analysis equal finite differences, with respect to x and to every floating tensor that counts."""
    subject, leaves = with_leaves(specimen.subject())
    x = arguments(as_basis(subject), heads=False).detach()[..., :1].requires_grad_()

    def run(*_: Tensor) -> Tensor:
        return as_basis(subject).analysis(x)

    if run().numel():
        try:
            torch.autograd.gradcheck(run, (x, *leaves), fast_mode=True, atol=1e-6)
        except RuntimeError as error:
            raise AssertionError(f"analysis: {error}") from error


def check_entries(specimen: Specimen) -> None:
    """Entries evaluated over the rectangle, or along the edges of the pattern, are those of `dense()`; others are 0."""
    basis = specimen.basis()
    a = basis.dense(F64)
    m, n = basis.num_inputs, basis.num_outputs
    if "repeats" not in specimen.traits:
        same(entries(basis, full(m, n, F64, a.device)).expand_as(a), a, "evaluate over the rectangle")
    graph = basis.pattern()
    if graph is None:
        return
    outside = torch.ones(m, n, dtype=torch.bool)
    outside[graph.source.long(), graph.target.long()] = False
    assert not a[..., outside].any(), "an entry outside pattern() is not zero"
    along = entries(basis, Edges(graph, F64))
    if "repeats" not in specimen.traits:
        same(along.expand(*a.shape[:-2], -1), a[..., graph.source.long(), graph.target.long()], "evaluate along edges")


def check_blocks(specimen: Specimen) -> None:
    """An expression evaluated in many small blocks gives what it gives at once, gradients included."""
    results = []
    for elements in (1 << 24, 1):
        subject, leaves = with_leaves(specimen.subject())
        with ExitStack() as stack:
            for module, limit in ((pairs, "EDGE_BLOCK_ELEMENTS"), (pairwise, "BLOCK_ELEMENTS")):
                stack.enter_context(mock.patch.object(module, limit, elements))
            basis = as_basis(subject)
            x, r = arguments(basis, heads=False), arguments(basis, heads=True)
            turned = basis.transpose()
            ys = basis.analysis(x), basis.synthesis(r), turned.analysis(arguments(turned, heads=False))
            result = [(y, *_gradients(y, torch.cos(y.detach()), [x, r, *leaves])) for y in ys]
            results.append([t.detach() for group in result for t in group])
    for one, other in zip(*results, strict=True):
        same(one, other, "in blocks of one element")


def check_paths(specimen: Specimen) -> None:
    """The three orders of the product A^T x Theta, and the planner's choice, equal the einsum of eq. 8."""
    subject, leaves = with_leaves(specimen.subject())
    basis = as_basis(subject)
    x = arguments(basis, heads=False)
    theta = torch.randn(basis.size, CHANNELS, 2, dtype=F64, generator=torch.Generator().manual_seed(5))
    theta.requires_grad_()
    expected = by_definition(x, basis, theta)
    for path in ("channels_first", "structure_first", "operator_first", None):
        same_gradients(ops.conv(x, basis, theta, path=path), expected, [x, theta, *leaves], f"path={path}")
