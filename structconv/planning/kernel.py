"""The register of kernels: each computes eq. 8 for some specs, in some orders, at a stated cost.

A kernel is one class with three methods, in one file, and one line that registers it::

    class GridConvolution(Kernel):
        name, types, before = "torch.conv", (Shift,), ("structconv.slices",)

        def match(self, problem): ...                  # once for each plan: what it recognizes in the spec, or None
        def cost(self, match, problem, path): ...      # flops and bytes, forward and backward, and bytes held
        def compile(self, match, problem, path): ...   # (call) -> y, b included

    register(GridConvolution())

If a kernel matches on a path, the kernels that it lists in `before` are not considered. A kernel that only applies a
basis, without Theta, derives from `kernels.orders.Applied` and defines `application` instead of `compile`.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from structconv.bases.base import Basis
from structconv.bases.pairwise import weights_at
from structconv.errors import ConfigError, class_remedy
from structconv.planning.cost import Cost
from structconv.planning.problem import BoundRun, Call, Problem, Run
from structconv.planning.tables import PLANS, Plan

__all__ = ["OF_USERS", "Kernel", "Registrations", "complete", "matching", "ordered", "register", "registered"]


class Kernel(abc.ABC):
    """One way to compute eq. 8, or several orders of it.

    The function that `compile` returns must hold no tensor and no object of a call. It reads them from its argument:
    `call.basis`, by `bases.tree.getter` of a part of the spec, or `call.materialized()`, with all products computed.

    Example: the identity, by one product. `register(Copy())` adds it; see `docs/your-own-kernel.md`.

        >>> from structconv.bases import Identity
        >>> from structconv.planning import Cost, Kernel
        >>> class Copy(Kernel):
        ...     name, types, orders = "copy", (Identity,), ("channels_first",)
        ...     def match(self, problem):
        ...         return problem.theta.size == 1
        ...     def cost(self, match, problem, path):
        ...         return Cost(2.0 * problem.theta.theta.numel() * problem.inputs, calls=1)
        ...     def compile(self, match, problem, path):
        ...         return lambda call: call.x @ call.theta.theta[0] + (0 if call.bias is None else call.bias)
        >>> Copy().label("channels_first")
        'copy'
    """

    name: ClassVar[str]
    #: Types of basis at the root of a spec.
    types: ClassVar[tuple[type, ...]] = (Basis,)
    #: Names of kernels that are not considered on a path on which this one matches.
    before: ClassVar[tuple[str, ...]] = ()
    #: The orders of the products in which it can compute some problem.
    orders: ClassVar[tuple[str, ...]] = ()
    #: True if x and y may be images (..., C, *S).
    images: ClassVar[bool] = False
    #: True if the heads may be projected before, and values may have relative terms.
    by_heads: ClassVar[bool] = False
    #: True if each part of the basis may have its own x, in calls whose x is `PartInputs`.
    separate: ClassVar[bool] = False
    #: True if entries may be pending: other kernels run after these were computed.
    pending: ClassVar[bool] = False

    @abc.abstractmethod
    def match(self, problem: Problem) -> Any:
        """Return the parts of the spec that the kernel recognizes; they are passed to the other methods.

        `None` or `False` means no match. Any other value is a match, also an empty one or zero.
        """

    def paths(self, match: Any, problem: Problem) -> tuple[str, ...]:
        """Those of `orders` in which it can compute the problem."""
        return self.orders

    @abc.abstractmethod
    def cost(self, match: Any, problem: Problem, path: str) -> Cost:
        """Return the cost of the path, forward and, if gradients are required, backward."""

    @abc.abstractmethod
    def compile(self, match: Any, problem: Problem, path: str) -> Run:
        """(call) -> y for all calls of such problems: bias, and values that do not suit the kernel, included."""

    def automatic(self, match: Any, problem: Problem, path: str) -> bool:
        """Return True if the planner may choose the path when the user names none."""
        return True

    def parts(self, match: Any, problem: Problem) -> tuple[Plan, ...]:
        """Plans of the parts, where the kernel runs a basis in parts."""
        return ()

    def weights(self, match: Any, problem: Problem) -> Run:
        """(call) -> the basis's entries where they count: (..., K, E) along its edges, else (..., K, M, N)."""
        return lambda call: weights_at(call.materialized(), call.x.dtype)

    def bind(self, match: Any, call: Call) -> BoundRun | None:
        """Return (entry x, its position) -> y for the later steps of a prepared x, whose operands do not change. It
        computes the pending parts of x and may hold tensors of the call. `None` if it would not be faster."""
        return None

    def label(self, path: str) -> str:
        """Return its name in a plan."""
        return self.name


_KERNELS: dict[str, Kernel] = {}
_ORDERED: list[Kernel] = []
#: The kernels of the package, once all are registered: from then on an unknown name is an error.
_BUILT_IN: list[Kernel] = []
#: The kernels that were registered after those of the package.
OF_USERS: list[Kernel] = []


class Registrations:
    """Count the registrations in this process; earlier plans compared other kernels."""

    count = 0


def register(kernel: Kernel) -> Kernel:
    """Add a kernel to the register, in the place of one of the same name. Plans made before are made again.

    Raises:
        ConfigError: if it closes a circle of precedences, or comes before a kernel that there is not.

    Example:

        >>> from structconv.planning import register, registered
        >>> kernel = registered()[0]
        >>> register(kernel) is kernel                             # takes the place of itself
        True
    """
    if isinstance(kernel, type):
        raise ConfigError("register", "kernel must be an object", f"the class {kernel.__name__}", class_remedy(kernel))
    kernels = {**_KERNELS, kernel.name: kernel}
    order = ordered(kernels)
    if _BUILT_IN:
        _check_names(kernels)
        OF_USERS[:] = [of_user for of_user in order if of_user not in _BUILT_IN]
    _ORDERED[:] = order
    _KERNELS.update(kernels)
    Registrations.count += 1
    PLANS.clear()
    return kernel


def complete() -> None:
    """Check that every kernel comes before kernels that there are, now and whenever another is registered."""
    _check_names(_KERNELS)
    _BUILT_IN[:] = _ORDERED


def _check_names(kernels: dict[str, Kernel]) -> None:
    for kernel in kernels.values():
        unknown = [name for name in kernel.before if name not in kernels]
        if unknown:
            raise ConfigError("register", f"{kernel.name} must come before kernels among {', '.join(sorted(kernels))}",
                              ", ".join(unknown))


def registered() -> tuple[Kernel, ...]:
    """All kernels, each before those that it declares to come before.

    Example:

        >>> from structconv.planning import registered
        >>> "torch.conv" in [kernel.name for kernel in registered()]
        True
    """
    return tuple(_ORDERED)


def ordered(kernels: dict[str, Kernel]) -> list[Kernel]:
    """The kernels in an order that keeps all precedences.

    Raises:
        ConfigError: the precedences form a circle, which it names.
    """
    left, result = dict(kernels), []
    while left:
        later = {name for kernel in left.values() for name in kernel.before}
        free = [name for name in left if name not in later]
        if not free:
            raise ConfigError("register", "precedences of kernels must not form a circle",
                              " before ".join(_circle(left)))
        result += [left.pop(name) for name in free]
    return result


def _circle(left: dict[str, Kernel]) -> list[str]:
    """Return a cycle of the relation `before`, with the first kernel again at the end."""
    chain = [next(iter(left))]
    while chain[0] not in chain[1:]:
        chain.insert(0, next(name for name, kernel in left.items() if chain[0] in kernel.before))
    return chain[:chain.index(chain[0], 1) + 1]


def matching(problem: Problem, orders: Collection[str] = ()) -> Iterator[tuple[Kernel, Any, str]]:
    """The kernels that may compute a problem, with their matches, on each path on which no other kernel comes before;
    with `orders`, only on these paths."""
    left_out: set[tuple[str, str]] = set()
    special = problem.projected or problem.relative is not None
    for kernel in _ORDERED:
        if not isinstance(problem.basis, kernel.types) or (special and not kernel.by_heads):
            continue
        if kernel.separate is not problem.separate or (orders and not any(one in orders for one in kernel.orders)):
            continue
        match = kernel.match(problem)
        for path in () if match is None or match is False else kernel.paths(match, problem):
            if (kernel.name, path) not in left_out and (not orders or path in orders):
                left_out.update((name, path) for name in kernel.before)
                yield kernel, match, path
