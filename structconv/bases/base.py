"""`Basis`: a lazy (..., K, M, N) tensor with methods to apply it.

The class derives everything from `dense()`, so that a user's basis with this one method works with every layer.
Overriding a primitive makes it faster and is never required. The algebra's operators live in `algebra.py`, which
registers them in `OPERATORS`; this module imports no child.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, cast, dataclass_transform

import torch
from torch import Tensor
from torch.nn import Parameter

from structconv.arguments import explained, is_own
from structconv.errors import ShapeError
from structconv.pictures import basis_png
from structconv.shapes import shape_or_type
from structconv.structures.values import NOTED, FrozenValue, field_names, frozen, key_of, size_class, tensors_in

__all__ = ["Algebra", "Basis", "operator", "value"]

if TYPE_CHECKING:
    from structconv.bases.pairs import Pairs
    from structconv.structures.graph import Graph
    from structconv.structures.samples import Restriction
    from structconv.structures.supports import Support

OPERATORS: dict[str, Callable[..., Any]] = {}
#: The subclasses of `Basis`: `isinstance` of an abstract class is slow.
BASES: set[type] = set()
#: Most inputs or outputs, and most numbers, of a basis that a notebook draws; it prints a larger one.
MOST_DRAWN, MOST_NUMBERS = 512, 16 * 512 ** 2
_Class = TypeVar("_Class", bound=type)
#: The result type of the operators: `Basis` or `Mechanism`.
T = TypeVar("T")


def is_basis(value: Any) -> bool:
    """Return True if `value` is a `Basis`."""
    return type(value) in BASES


def operator(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the algebra's operator `name`, for bases and for mechanisms alike.

    Example:

        >>> from structconv.bases import operator
        >>> from structconv.bases.base import OPERATORS
        >>> @operator("double")
        ... def double(a):
        ...     return a + a
        >>> OPERATORS.pop("double") is double
        True
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS[name] = function
        return function

    return register


@dataclass_transform(frozen_default=True, eq_default=False)
def value(cls: _Class) -> _Class:
    """Make `cls` a frozen dataclass compared by identity, and a pytree, so that blocks can be recomputed over it.

    Example:

        >>> from structconv import Basis
        >>> from structconv.bases import value
        >>> @value
        ... class Ones(Basis):
        ...     entries: int
        ...     size = 1
        ...     num_inputs = num_outputs = property(lambda self: self.entries)
        ...     def dense(self, dtype=None):
        ...         return torch.ones(1, self.entries, self.entries, dtype=dtype)
        >>> Ones(3).analysis(torch.ones(3, 1)).flatten()
        tensor([3., 3., 3.])
    """
    return cast(_Class, frozen(cls, eq=False, init=True))


class Algebra(Generic[T]):
    """The operators of the algebra, shared by bases (values) and mechanisms (modules).

    A subclass says in `_operate` what an operator's name and its arguments become.

    Example:

        >>> from structconv import DotProduct, Grid, Shift, Shifts
        >>> shift = Shift(Grid(4), [1])
        >>> (shift | shift @ shift).size                             # of bases
        2
        >>> (DotProduct(heads=2, dim=4).scaled().softmax() | Shifts([-1, 1])).size      # of mechanisms
        4
    """

    def _operate(self, name: str, *args: Any, **options: Any) -> T:
        raise NotImplementedError

    def __or__(self, other: T) -> T:
        return self._operate("concat", self, other)

    def __matmul__(self, other: T) -> T:
        return self._operate("compose", self, other)

    def __add__(self, other: Any) -> T:
        return self._operate("add", self, other)

    __radd__ = __add__

    def __mul__(self, other: T | float | Tensor) -> T:
        return self._operate("multiply", self, other)

    __rmul__ = __mul__

    def __neg__(self) -> T:
        return self._operate("multiply", self, -1.0)

    def __sub__(self, other: T | Tensor) -> T:
        if isinstance(other, Parameter):  # its negative would be none
            return self._operate("multiply", self._operate("add", -self, other), -1.0)
        return self._operate("add", self, -other)  # type: ignore[operator]

    def __truediv__(self, divisor: float | Tensor) -> T:
        return self._operate("multiply", self, 1.0 / divisor)

    @explained
    def outer(self, other: T) -> T:
        """Term by term, every pair of heads: A_(k'K''+k'')mn = A'_k'mn A''_k''mn, K = K' K''."""
        return self._operate("outer", self, other)

    @explained
    def mix(self, heads: int | Tensor) -> T:
        """Linear combinations of heads: A_jmn = sum_k W_kj A_kmn (talking heads, Shazeer et al. 2020, section 3).

        W is a matrix (K, J), trained where it is a parameter; of a mechanism also a number J, for a learned W (K, J)
        that is drawn with the layer, normal with variance 1/K. Before a softmax it maps scores, and a pair exists where
        it does for all heads; after it, weights. J K multiplications a pair before a softmax; after it none, since
        what is mixed is x Theta.

        Raises:
            ShapeError: a matrix of other than K rows.
            ConfigError: a number where a basis, which has no parameters, is to be mixed.
        """
        return self._operate("mix", self, heads)

    @explained
    def transpose(self) -> T:
        """A_kmn -> A_knm: swap inputs and outputs."""
        return self._operate("transpose", self)

    @explained
    def masked(self, *, keep: Any = None, drop: Any = None) -> T:
        """Only the pairs (m, n) in `keep`, or those not in `drop`, exist; the others weigh exactly zero."""
        return self._operate("masked", self, keep=keep, drop=drop)

    @explained
    def scaled(self, scale: float | None = None) -> T:
        """Multiply by `scale`, or by 1/sqrt(D) where the scores are products of D channels."""
        return self._operate("scaled", self, scale=scale)

    @explained
    def softmax(self, over: str = "inputs", *, sink: float | Tensor | None = None) -> T:
        """Softmax over inputs m (the paper's column-wise softmax) or over outputs n; absent pairs weigh zero.

        With a `sink`, a number or a tensor of 1 or K (trained where it is a parameter), the denominator has one more
        term e^sink, so that weights may sum to less than one: `sink=0.0` adds 1.
        """
        if sink is not None:
            return self._operate("softmax_with_sink", self, sink, over=over)
        return self._operate("normalize", self, kind="softmax", over=over)

    @explained
    def log_softmax(self, over: str = "inputs") -> T:
        """The logarithm of the softmax over the pairs that exist; `exp` gives the softmax."""
        return self._operate("log_softmax", self, over=over)

    @explained
    def normalize(self, kind: Any = "sum", over: str = "inputs") -> T:
        """Divide by the sum ("sum"), by the number of existing pairs ("count"), or apply "softmax" or "sigmoid".

        Of scores also "sparsemax", "entmax" (1.5), "hard" (one for the largest), `TopK(k)`, and any function of
        (scores, keep, dim), by itself or by the name that `register_normalization` gave it.
        """
        return self._operate("normalize", self, kind=kind, over=over)

    @explained
    def map(self, fn: Callable[[Tensor], Tensor]) -> T:
        """Apply `fn` to every existing entry; `fn` maps (..., K, *) to the same shape, entry by entry."""
        return self._operate("map", self, fn=fn)

    @explained
    def dropout(self, p: float) -> T:
        """Zero each weight with probability p and scale the others by 1/(1-p), when training."""
        return self._operate("dropout", self, p=p)

    @explained
    def leaky_relu(self, negative_slope: float = 0.2) -> T:
        """max(a, 0) + negative_slope min(a, 0), entry by entry."""
        return self._operate("leaky_relu", self, negative_slope=negative_slope)

    @explained
    def relu(self) -> T:
        """max(a, 0), entry by entry."""
        return self.map(torch.relu)

    @explained
    def tanh(self) -> T:
        """tanh(a), entry by entry."""
        return self.map(torch.tanh)

    @explained
    def exp(self) -> T:
        """e^a, entry by entry; absent pairs stay absent."""
        return self.map(torch.exp)

    @explained
    def softcap(self, cap: float) -> T:
        """cap tanh(a / cap), entry by entry (Gemma 2's bound on logits)."""
        return self._operate("softcap", self, cap=cap)


class Basis(FrozenValue, Algebra["Basis"], abc.ABC):
    """A lazy tensor A of shape (..., K, M, N): K matrices from M inputs to N outputs.

    A subclass gives `size`, `num_inputs`, `num_outputs` and `dense()`; everything else has a default.
    `analysis` and `synthesis` are the two primitives of filter banks, `apply` is the one that both rest on.

    Example:

        >>> from structconv import Basis, Grid, Shift
        >>> shift = Shift(Grid(5), [-1, 2])
        >>> isinstance(shift, Basis), shift.size, shift.num_inputs, shift.num_outputs
        (True, 2, 5, 5)
        >>> (shift | shift.transpose()).size
        4
    """

    #: "inputs" or "outputs" where an entry depends on all others that share its output, or its input.
    normalizes: str = ""
    #: True if its `static_key` is the same in all calls: for bases without tensors that are built once.
    keeps_key: ClassVar[bool] = False
    #: True if the node exchanges inputs and outputs.
    flips: bool = False

    if TYPE_CHECKING:
        dense: Callable[..., Tensor]  # a subclass need not take `absent`

        @property
        def device(self) -> torch.device:
            """The device of the basis; a basis without tensors follows its argument."""
    else:
        device = torch.device("cpu")

        @abc.abstractmethod
        def dense(self, dtype: torch.dtype | None = None, *, absent: float = 0.0) -> Tensor:
            """The tensor itself, (..., K, M, N), built independently of the primitives; O(K M N) memory.

            Pairs that do not exist, in the sense of `masked`, hold `absent`: -inf in the log domain, as scores do. A
            subclass gives `dense(dtype)`, with zeros there.
            """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        BASES.add(cls)
        if "dense" in cls.__dict__:
            cls.dense = _with_absent(cls.__dict__["dense"])

    @property
    @abc.abstractmethod
    def size(self) -> int:
        """K, the number of matrices."""

    @property
    @abc.abstractmethod
    def num_inputs(self) -> int:
        """M, the number of input entries."""

    @property
    @abc.abstractmethod
    def num_outputs(self) -> int:
        """N, the number of output entries."""

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Leading dimensions: empty where one basis serves the whole batch."""
        return ()

    @property
    def has_scores(self) -> bool:
        """True if the entries are scores of pairs, so that a softmax over them has a meaning."""
        return False

    def apply(self, r: Tensor) -> Tensor:
        """A_k^T r_k for each k: (..., K, M, C) -> (..., K, N, C)."""
        return self.dense(r.dtype).to(r.device).mT @ r

    def analysis(self, x: Tensor) -> Tensor:
        """A_k^T x for each k: (..., M, C) -> (..., K, N, C)."""
        return self.apply(x.unsqueeze(-3).expand(*x.shape[:-2], self.size, *x.shape[-2:]))

    def synthesis(self, r: Tensor) -> Tensor:
        """sum_k A_k^T r_k: (..., K, M, C) -> (..., N, C)."""
        return self.apply(r).sum(-3)

    def pattern(self) -> Graph | None:
        """The pairs outside which every entry is zero, listed; `None` where any pair may count."""
        return None

    def support(self) -> Support | None:
        """The pairs that exist at all, in the sense of `masked`; `None` for all of them."""
        return None

    def evaluate(self, pairs: Pairs) -> Tensor:
        """The entries at `pairs`, (..., K, *pairs.shape); arbitrary where `support` says that a pair is absent."""
        return pairs.pick(self.dense(getattr(self, "dtype", None) or pairs.dtype))

    def restricted(self, to: Restriction) -> Basis | None:
        """The basis that some samples of a batch have in a call of their own; `None` where nothing is known of that."""
        return None

    def _present(self) -> Tensor | None:
        """Return booleans (..., K or 1, M, N), True for entries that exist; `None` for all."""
        support = self.support()
        if support is None:
            return None
        m = torch.arange(self.num_inputs, device=self.device).unsqueeze(-1)
        return support.contains(m, torch.arange(self.num_outputs, device=self.device).unsqueeze(0)).unsqueeze(-3)

    def check_input(self, x: Tensor, owner: str = "Basis") -> None:
        """Raise `ShapeError` unless `x` is (..., M, C)."""
        if x.dim() < 2 or x.shape[-2] != self.num_inputs:
            raise ShapeError(owner, f"x must have shape (..., M={self.num_inputs}, C)", tuple(x.shape),
                             "Entries are dim -2, channels dim -1.")

    def _operate(self, name: str, *args: Any, **options: Any) -> Basis:
        return cast(Basis, OPERATORS[name](*args, **options))

    def _static(self) -> Hashable:
        if field_names(self):
            ids = [id(t) for t in tensors_in(self)]  # a tensor held twice has one `Leaf` in a spec
            same = tuple(map(ids.index, ids)) if len(set(ids)) < len(ids) else ()
            return self.size, super()._static(), same
        own: list[Any] = [(name, key_of(value)) for name, value in vars(self).items() if name not in NOTED]
        return type(self), *own, self.size, *map(size_class, (self.num_inputs, self.num_outputs, *self.batch_shape))

    #: The text of the basis, by its attributes.
    _shown: ClassVar[str] = "{0.__class__.__name__}(K={0.size}, M={0.num_inputs}, N={0.num_outputs})"

    def __repr__(self) -> str:
        return self._shown.format(self)

    def _repr_png_(self) -> bytes | None:
        """Return the picture for a notebook; `None` for a large basis, whose `repr` is shown instead."""
        sides = self.num_inputs, self.num_outputs
        if max(sides) > MOST_DRAWN or math.prod((*self.batch_shape, self.size, *sides)) > MOST_NUMBERS:
            return None
        dense = self.dense()
        return basis_png(dense[(0,) * (dense.dim() - 3)])


def _check_dense(basis: Basis, a: Any) -> None:
    """Raise `ShapeError` unless `a` is a tensor (..., K, M, N); its K is checked for all classes."""
    sides = basis.num_inputs, basis.num_outputs
    if not isinstance(a, Tensor) or (a.dim() > 2 and a.shape[-2:] != sides):
        raise ShapeError(type(basis).__name__, f"dense must return a tensor (..., K={basis.size}, M={sides[0]}, "
                         f"N={sides[1]})", shape_or_type(a))


def _with_absent(own: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap `dense(dtype)` of a class as `dense(dtype, absent=...)`, and check that it returns (..., K, M, N)."""
    by_user = not is_own(own)

    def dense(self: Basis, dtype: torch.dtype | None = None, *, absent: float = 0.0) -> Tensor:
        a, present = own(self, dtype), None if absent == 0 else self._present()
        if by_user and not torch.compiler.is_compiling():
            _check_dense(self, a)
        if not a.is_floating_point() and not a.is_complex():
            a = a.to(dtype or torch.get_default_dtype())  # a table of booleans counts as zeros and ones
        if a.dim() < 3 or a.shape[-3] != self.size:
            raise ShapeError(type(self).__name__, f"dense must return (..., K={self.size}, M={self.num_inputs}, "
                             f"N={self.num_outputs})", tuple(a.shape), "One matrix is K = 1: add the axis, a[None].")
        return a if present is None else torch.where(present, a, absent)

    dense.__doc__, dense.__qualname__, dense.__module__ = own.__doc__, own.__qualname__, own.__module__
    return dense
