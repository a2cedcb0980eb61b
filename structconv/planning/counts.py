"""Count the nonzeros of a basis and the cost of applying it: a register by type, with a dense default."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from structconv.bases.base import Basis
from structconv.bases.dense import Identity
from structconv.bases.entrywise import Binary, Masked, Unary
from structconv.bases.linear import Composed, Concat, LinearSum, Mixed, Repeated, Scaled
from structconv.bases.pairwise import Pairwise, nodes
from structconv.bases.polynomial import Polynomial
from structconv.bases.pooling import Pooling
from structconv.bases.scores import EdgeScore
from structconv.bases.shift import Shift, ShiftTransposed
from structconv.bases.sparse import Sparse
from structconv.bases.taps import Taps
from structconv.bases.typed import Typed
from structconv.planning.cost import Cost, lost_flops
from structconv.planning.fitted import DENSE_CALLS, FUSED_SHARE, REPEAT_CALLS, SPARSE_CALLS
from structconv.shapes import check_not_traced
from structconv.structures.masks import joined_by_and
from structconv.structures.samples import Samples
from structconv.structures.values import size_class

__all__ = ["APPLICATIONS", "NOMINAL_DEGREE", "NOMINAL_ENTRIES", "NONZEROS", "Application", "Count", "Sizes",
           "application", "application_cost", "fused_application", "nonzero_count", "nonzeros", "product_cost",
           "rows_gathered", "samples_in"]

NOMINAL_ENTRIES = 1024
NOMINAL_DEGREE = 8


@dataclass(frozen=True)
class Sizes:
    """Read sizes for costs. Each counts as the greatest of its class, so that the plan does not depend on which call
    comes first, and a resumed training computes the same numbers. Nominal sizes, `NOMINAL_ENTRIES` and `NOMINAL_DEGREE`
    times that of edges, make a traced program independent of the number of entries. `batch`: product of the leading
    dimensions."""

    batch: int
    itemsize: int
    nominal: bool = False

    def entries(self, basis: Basis) -> tuple[int, int]:
        """(M, N) of a basis."""
        if self.nominal:
            return NOMINAL_ENTRIES, NOMINAL_ENTRIES
        return size_class(int(basis.num_inputs)), size_class(int(basis.num_outputs))  # tensors under torch.jit.trace

    def edges(self, count: int) -> int:
        """A number of edges, or of pairs."""
        return NOMINAL_DEGREE * NOMINAL_ENTRIES if self.nominal else size_class(count)


Count = Callable[[Any, Sizes], "int | None"]
Application = Callable[[Any, Sizes, int, str], Cost]
NONZEROS: dict[type, Count] = {}
APPLICATIONS: dict[type, Application] = {}
_Function = TypeVar("_Function", bound=Callable[..., Any])


def nonzero_count(*types: type) -> Callable[[_Function], _Function]:
    """Register `fn(basis, sizes)`: pairs at which one of the matrices may differ from zero, `None` for all M N."""
    def register(fn: _Function) -> _Function:
        NONZEROS.update(dict.fromkeys(types, fn))
        return fn
    return register


def application_cost(*types: type) -> Callable[[_Function], _Function]:
    """Register `fn(basis, sizes, channels, mode)`, the `Cost` of a primitive, "analysis", "synthesis" or "apply", at a
    number of channels: for a type whose primitives are not K products of its nonzeros."""
    def register(fn: _Function) -> _Function:
        APPLICATIONS.update(dict.fromkeys(types, fn))
        return fn
    return register


def nonzeros(basis: Basis, sizes: Sizes) -> int | None:
    """Pairs at which one matrix of the basis may differ from zero; `None` for all of them."""
    count = _registered(NONZEROS, type(basis))
    return None if count is None else count(basis, sizes)


def application(basis: Basis, sizes: Sizes, channels: int, mode: str = "apply") -> Cost:
    """Return the forward cost of `analysis`, `synthesis` or `apply` with this number of channels."""
    special = _registered(APPLICATIONS, type(basis))
    if special is not None:
        return special(basis, sizes, channels, mode)
    result = product_cost(basis, sizes, channels, nonzeros(basis, sizes)) + _listing(basis, sizes)
    repeats = isinstance(basis, Pairwise) and mode != "apply"  # x for each head, or their sum
    return result + Cost(calls=REPEAT_CALLS) if repeats else result


def fused_application(basis: Basis, sizes: Sizes, channels: int, mode: str) -> Cost:
    """The cost of one kernel that reads the scores once; listing the pairs costs the same. Native kernels take numbers
    of at most 4 bytes; wider ones gather the rows of each pair by separate operators."""
    listed = _listing(basis, sizes)
    if sizes.itemsize > 4:
        return application(basis, sizes, channels, mode) + rows_gathered(basis, sizes)
    return application(basis, sizes, channels, mode).repeated(FUSED_SHARE) + listed.repeated(1 - FUSED_SHARE)


def rows_gathered(basis: Basis, sizes: Sizes) -> Cost:
    """Return the cost of evaluating an expression along a list: gathering the rows of both entries of each pair."""
    pairs = nonzeros(basis, sizes) if isinstance(basis, Pairwise) else None
    rows = sum(node._terms for node in nodes(basis) if isinstance(node, Pairwise) and node._terms > 1)
    return Cost(gathered=2 * sizes.batch * basis.size * (pairs or 0) * rows * sizes.itemsize)


def _listing(basis: Basis, sizes: Sizes) -> Cost:
    """Return the cost of listing the pairs within the samples of a batch, which change with each call. A pair passes
    through about 16 numbers of 8 bytes, and 3 are read at indices, in 20 operators."""
    samples = None if sizes.nominal else samples_in(basis)
    if samples is None:
        return Cost()
    pairs = sizes.edges(samples.pair_count)
    return Cost(bytes=128 * pairs, gathered=24 * pairs, calls=20)


def samples_in(basis: Basis) -> Samples | None:
    """The samples of a batch by which pairs of a basis are left out."""
    for node in nodes(basis):
        result = [term for term in joined_by_and(node.support()) if isinstance(term, Samples)]
        if result:
            return result[0]
    return None


def product_cost(basis: Basis, sizes: Sizes, channels: int, count: int | None) -> Cost:
    """K products with matrices of `count` nonzeros: 2 K E C flops; dense ones stream, sparse ones gather rows."""
    inputs, outputs = sizes.entries(basis)
    heads = sizes.batch * basis.size
    moved = heads * (inputs + outputs) * channels * sizes.itemsize
    if count is None:
        flops, entries = 2 * heads * inputs * outputs * channels, basis.size * inputs * outputs * sizes.itemsize
        return Cost(flops + _evaluation(basis, heads * inputs * outputs), moved + entries,
                    wasted=lost_flops(flops, channels), calls=DENSE_CALLS)
    gathered = heads * count * channels * sizes.itemsize
    return Cost(2 * heads * count * channels + _evaluation(basis, heads * count), moved, gathered,
                calls=SPARSE_CALLS)


def _evaluation(basis: Basis, pairs: int) -> int:
    """Flops of evaluating an expression at its pairs."""
    if not isinstance(basis, Pairwise):
        return 0
    return 2 * pairs * sum(node._terms if isinstance(node, Pairwise) else 1 for node in nodes(basis))


def _registered(register: dict[type, Any], kind: type) -> Any:
    for base in kind.__mro__:
        if base in register:
            return register[base]
    return None


nonzero_count(Sparse, EdgeScore)(lambda basis, sizes: sizes.edges(basis.graph.num_edges))
#: Of edges of a type the mean number, because the maximum is not known.
nonzero_count(Typed)(lambda basis, sizes: -(-sizes.edges(basis.graph.num_edges) // basis.count))
nonzero_count(Identity, Shift)(lambda basis, sizes: sizes.entries(basis)[1])
nonzero_count(ShiftTransposed)(lambda basis, sizes: sizes.entries(basis)[0])
nonzero_count(Taps)(lambda basis, sizes: basis.taps * sizes.entries(basis)[1])
nonzero_count(Pooling)(lambda basis, sizes: basis.shift.size * (nonzeros(basis.shift, sizes) or 0))
nonzero_count(Unary)(lambda basis, sizes: nonzeros(basis.child, sizes))


@nonzero_count(Masked)
def _masked(basis: Masked, sizes: Sizes) -> int | None:
    bound = basis.mask.edge_bound(*sizes.entries(basis))
    if bound is not None:  # its pairs are listed
        check_not_traced(basis.num_inputs, basis.num_outputs)
    child = nonzeros(basis.child, sizes)
    if bound is None or child is None:
        return child if bound is None else sizes.edges(bound)
    return child if sizes.nominal else min(bound, child)


@nonzero_count(Binary)
def _fewer(basis: Binary, sizes: Sizes) -> int | None:
    counts = [count for count in (nonzeros(basis.first, sizes), nonzeros(basis.second, sizes)) if count is not None]
    return min(counts) if counts else None


@application_cost(Concat)
def _concat(basis: Concat, sizes: Sizes, channels: int, mode: str) -> Cost:
    joined = len(basis.parts) if mode == "synthesis" else basis.size
    cost = Cost(bytes=2 * sizes.batch * joined * sizes.entries(basis)[1] * channels * sizes.itemsize)
    for part in basis.parts:
        cost = cost + application(part, sizes, channels, mode)
    return cost


application_cost(LinearSum)(
    lambda basis, *others: application(basis.first, *others) + application(basis.second, *others))
application_cost(Scaled, Repeated)(lambda basis, *others: application(basis.child, *others))


@application_cost(Mixed)
def _mixed(basis: Mixed, sizes: Sizes, channels: int, mode: str) -> Cost:
    """Return the child's cost, with the channels of all heads in `apply`, and a product over the heads of the argument
    or result."""
    inputs, outputs = sizes.entries(basis)
    work = sizes.batch * basis.child.size * basis.size * channels * (inputs if mode == "synthesis" else outputs)
    inner = channels * basis.size if mode == "apply" else channels
    own = Cost(2 * work, 2 * work * sizes.itemsize / max(1, min(basis.size, basis.child.size)), calls=1)
    return application(basis.child, sizes, inner, "analysis" if mode == "apply" else mode) + own


@application_cost(Composed)
def _composed(basis: Composed, sizes: Sizes, channels: int, mode: str) -> Cost:
    first, second = basis.first, basis.second
    if mode == "analysis":
        return (application(first, sizes, channels, mode)
                + application(second, sizes, first.size * channels, mode))
    inner = application(first, sizes, second.size * channels, mode)
    return inner + application(second, sizes, channels * (1 if mode == "synthesis" else first.size), mode)


@application_cost(Shift)
def _shift(basis: Shift, sizes: Sizes, channels: int, mode: str) -> Cost:
    """Count the rows gathered and written for each offset, after a copy with one more row if there are gaps. A sum over
    the offsets then reads two terms and writes a third; concatenated heads are copied once."""
    inputs, outputs = sizes.entries(basis)
    number = sizes.batch * channels * sizes.itemsize
    copied = 2 * inputs * (1 if mode == "analysis" else basis.size) if basis.padding == "zeros" else 0
    written = basis.size * outputs * (4 if mode == "synthesis" else 3)
    return Cost(sizes.batch * basis.size * outputs * channels, number * (copied + written),
                number * basis.size * outputs)


@application_cost(Polynomial)
def _polynomial(basis: Polynomial, sizes: Sizes, channels: int, mode: str) -> Cost:
    """`order` products with the operator, and each head read or written once. Analysis runs forward over the inputs and
    synthesis (Clenshaw) over the outputs, each with the channels that it is given; `apply` carries all remaining heads
    through each product."""
    step = application(basis.operator, sizes, channels, "analysis")
    heads = 1 if mode != "apply" else (basis.size + 1) / 2
    moved = 2 * sizes.batch * basis.size * sizes.entries(basis)[0] * channels * sizes.itemsize
    return step.repeated(basis.order * heads) + Cost(bytes=moved)


@application_cost(Typed)
def _typed_product(basis: Typed, sizes: Sizes, channels: int, mode: str) -> Cost:
    """One product over all edges; heads are moved where the primitive has them."""
    inputs, outputs = sizes.entries(basis)
    rows = inputs * (1 if mode == "analysis" else basis.size) + outputs * (1 if mode == "synthesis" else basis.size)
    work = sizes.batch * sizes.edges(basis.graph.num_edges) * channels
    return Cost(2 * work, sizes.batch * rows * channels * sizes.itemsize, work * sizes.itemsize)
