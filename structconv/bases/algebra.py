"""The algebra of bases: `a | b`, `a @ b`, `a + b`, `c * a` and the other operators, for values.

The functions dispatch on type and are registered by name, so that the operators of `Basis` and of mechanisms call the
same functions. Their results are nodes of `linear.py` (which act through their operands' primitives) and of
`entrywise.py` (which act entry by entry).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from structconv.bases.base import BASES, Basis, operator
from structconv.bases.dense import Dense
from structconv.bases.entrywise import (
    Dropped,
    LeakyReLU,
    Mapped,
    Masked,
    Normalized,
    Outer,
    Product,
    Sum,
    check_same_entries,
    check_sizes,
)
from structconv.bases.linear import Composed, Concat, LinearSum, Mixed, Repeated, Scaled, Transposed
from structconv.bases.normalizations import LogSoftmax, NormalizedBy, SinkSoftmax, normalization
from structconv.bases.pairs import NORMALIZATIONS
from structconv.bases.pairwise import both, nodes
from structconv.errors import ConfigError, ShapeError, StructureError, class_remedy
from structconv.shapes import check_choice, check_number
from structconv.structures.graph import Graph
from structconv.structures.masks import inverted
from structconv.structures.supports import DenseMask, EdgeSupport, Padding, Support

__all__ = ["Sizes", "add", "as_support", "check_mask", "check_masks_scores", "check_normalization", "compose", "concat",
           "depth", "draw_seed", "dropout", "entrywise", "leaky_relu", "log_softmax", "mask_and_table", "masked", "mix",
           "multiply", "normalize", "outer", "scaled", "softcap", "softmax_with_sink", "transpose", "with_heads"]


def _check_bases(owner: str, first: Basis, second: Basis) -> None:
    for basis in (first, second):
        if type(basis) not in BASES:
            raise ConfigError(owner, "both operands must be bases", type(basis).__name__)


def _check_same_entries(owner: str, first: Basis, second: Basis) -> None:
    _check_bases(owner, first, second)
    check_same_entries(owner, first, second)


def _over_parts(basis: Basis, fn: Callable[[Basis], Basis]) -> Basis:
    """Apply an entry-wise operator to each part of a `|`, so that each keeps its own support and its own kernel."""
    if isinstance(basis, Concat):
        return Concat(tuple(_over_parts(part, fn) for part in basis.parts))
    return fn(basis)


def _with_numbers(basis: Basis, numbers: Any, fn: Callable[[Basis, Any], Basis]) -> Basis:
    """fn of each part of a `|` and its own of K numbers, or the one number of all."""
    if not isinstance(basis, Concat) or numbers.numel() == 1:
        return _over_parts(basis, lambda part: fn(part, numbers))
    pieces = numbers.split([part.size for part in basis.parts])
    return Concat(tuple(_with_numbers(part, own, fn) for part, own in zip(basis.parts, pieces, strict=True)))


def _part_by_part(owner: str, fn: Callable[[Basis, Basis], Basis], first: Basis, second: Basis) -> Basis:
    """fn of two operands, part by part where they are `|`, so that each part keeps its own mask and its own kernel."""
    joined = [basis for basis in (first, second) if isinstance(basis, Concat)]
    if not joined:
        return fn(first, second)
    if len(joined) == 1 and 1 in (first.size, second.size):
        pairs = [(first, part) if second is joined[0] else (part, second) for part in joined[0].parts]
    elif len(joined) == 2 and [p.size for p in joined[0].parts] == [p.size for p in joined[1].parts]:
        pairs = list(zip(joined[0].parts, joined[1].parts, strict=True))
    elif any(part.support() is not None for basis in joined for part in basis.parts):
        raise ConfigError(owner, "a mask within a | must meet one matrix, or parts of the same sizes",
                          f"K={first.size} and K={second.size}", f"Apply the mask to the result of {owner}.")
    else:
        return fn(first, second)
    return Concat(tuple(fn(one, other) for one, other in pairs))


@operator("concat")
def concat(first: Basis, second: Basis) -> Basis:
    """`a | b`: heads side by side; sizes add up."""
    _check_same_entries("a | b", first, second)
    parts: tuple[Basis, ...] = ()
    for basis in (first, second):
        parts += basis.parts if type(basis) is Concat else (basis,)
    return Concat(parts)


@operator("compose")
def compose(first: Basis, second: Basis) -> Basis:
    """`a @ b`: every product of a matrix of a with one of b."""
    _check_bases("a @ b", first, second)
    return Composed(first, second)


@operator("add")
def add(first: Basis, second: Basis | Tensor | Support | Graph) -> Basis:
    """`a + b`: of scores entry by entry, where both exist; of matrices by linearity.

    A tensor (M, N) or (..., K, M, N) is added as `Dense`, where -inf means that the pair does not exist; a mask adds
    -inf outside it.
    """
    if not isinstance(second, Basis):
        mask, table = mask_and_table("bases", second)
        check_masks_scores(first, mask)
        first = first if mask is None else masked(first, keep=mask)
        return first if table is None else add(first, Dense(table))
    if type(first) is not Concat and type(second) is not Concat and (first.has_scores or second.has_scores):
        return Sum(first, second)  # which checks both
    _check_same_entries("a + b", first, second)
    check_sizes("a + b", first, second)
    return _part_by_part("a + b", Sum if first.has_scores or second.has_scores else _linear_sum, first, second)


def _linear_sum(first: Basis, second: Basis) -> Basis:
    size = max(first.size, second.size)
    first, second = (b if b.size == size else Repeated(b, size) for b in (first, second))
    return LinearSum(first, second)


@operator("multiply")
def multiply(first: Basis, second: Basis | Tensor | float) -> Basis:
    """`a * b` entry by entry, or `c * a` with a number or a tensor of K numbers."""
    if isinstance(second, Basis):
        if type(first) is not Concat and type(second) is not Concat:
            return Product(first, second)  # which checks both
        _check_same_entries("a * b", first, second)
        check_sizes("a * b", first, second)
        return _part_by_part("a * b", Product, first, second)
    if not isinstance(second, Tensor):
        return _over_parts(first, lambda part: Scaled(part, check_number("c * a", "c", second)))
    if second.numel() not in (1, first.size):
        raise ShapeError("c * a", f"a tensor c must have 1 or K={first.size} elements", tuple(second.shape))
    return _with_numbers(first, second.reshape(-1), Scaled)


@operator("mix")
def mix(basis: Basis, matrix: Tensor) -> Basis:
    """Linear combinations of heads; of scores where those of all heads exist."""
    if not isinstance(matrix, Tensor):
        raise ConfigError("mix", "a basis must be given a matrix (K, J); a mechanism takes a number of heads too",
                          type(matrix).__name__)
    if matrix.dim() != 2 or matrix.shape[0] != basis.size or not matrix.is_floating_point():
        raise ShapeError("mix", f"the matrix must be floating, of shape (K={basis.size}, J)", tuple(matrix.shape))
    if not isinstance(basis, Concat) or not basis.has_scores:
        return Mixed(basis, matrix)
    common: Support | None = None
    for part in basis.parts:
        common = both(common, part.support())
    return Mixed(basis, matrix) if common is None else Masked(Mixed(masked(basis, keep=common), matrix), common)


@operator("outer")
def outer(first: Basis, second: Basis) -> Basis:
    """`a.outer(b)`: entry by entry, every pair of heads."""
    _check_same_entries("a.outer(b)", first, second)
    if isinstance(first, Concat):
        return Concat(tuple(outer(part, second) for part in first.parts))
    return _part_by_part("a.outer(b)", Outer, first, second)


@operator("transpose")
def transpose(basis: Basis) -> Basis:
    """A_kmn -> A_knm, through the nodes that a transpose passes."""
    own = getattr(basis, "_transposed", None)
    if own is not None:
        return own()
    if isinstance(basis, Transposed):
        return basis.child
    if isinstance(basis, Scaled):
        return Scaled(transpose(basis.child), basis.factor)
    if isinstance(basis, Repeated):
        return Repeated(transpose(basis.child), basis.times)
    if isinstance(basis, Concat):
        return Concat(tuple(transpose(part) for part in basis.parts))
    if isinstance(basis, LinearSum):
        return LinearSum(transpose(basis.first), transpose(basis.second))
    if isinstance(basis, Normalized):
        over = "outputs" if basis.over == "inputs" else "inputs"
        return Normalized(transpose(basis.child), basis.kind, over)
    return Transposed(basis)


class Sizes(NamedTuple):
    """M and N of a basis that is yet to be made."""

    num_inputs: int
    num_outputs: int


def check_mask(keep: Any, drop: Any, *names: type) -> Any:
    """The one of both masks that is given: a `Support`, a `Graph`, a boolean tensor, or a name of such a type."""
    if (keep is None) == (drop is None):
        got = "neither" if keep is None else "both"
        raise ConfigError("masked", "exactly one of keep= and drop= must be given", got)
    mask = keep if drop is None else drop
    if isinstance(mask, Tensor) and mask.dtype != torch.bool:
        raise StructureError("masked", "a mask must be a tensor of booleans", str(mask.dtype),
                             "Convert it with .bool(); numbers that are added to scores go by scores + bias.")
    if not isinstance(mask, (Support, Graph, Tensor, *names)):
        kinds = "a Support, a Graph, a boolean tensor or a name" if names else "a Support, a Graph or a boolean tensor"
        raise ConfigError("masked", f"a mask must be {kinds}", type(mask).__name__, class_remedy(mask))
    return mask


def as_support(basis: Basis | Sizes, keep: Any, drop: Any) -> Support:
    """The support that `masked(keep=...)` or `masked(drop=...)` means for a basis of M inputs and N outputs."""
    argument = check_mask(keep, drop)
    if isinstance(argument, Tensor) and argument.dim() > 1 and (
            tuple(argument.shape[-2:]) == (basis.num_inputs, basis.num_outputs)):
        raise StructureError("masked", "a boolean mask must be one of inputs, (..., M)", tuple(argument.shape),
                             "Say which it is: DenseMask(mask) for pairs (..., M, N), Padding(mask) for a batch.")
    mask: Support = argument
    if isinstance(argument, Graph):
        mask = EdgeSupport(argument)
    elif isinstance(argument, Tensor):
        mask = Padding(argument)
    mask.check("masked", basis.num_inputs, basis.num_outputs)
    return mask if drop is None else inverted(mask)


@operator("masked")
def masked(basis: Basis, keep: Any = None, drop: Any = None) -> Basis:
    """Only the pairs in `keep`, or not in `drop`, exist."""
    support = as_support(basis, keep, drop)
    return _over_parts(basis, lambda part: Masked(part, support))


@operator("normalize")
def normalize(basis: Basis, kind: Any = "sum", over: str = "inputs") -> Basis:
    """Weights from scores; a softmax needs scores."""
    check_normalization(kind, over, basis)
    if kind == "none":
        return basis
    if kind not in NORMALIZATIONS:
        function = normalization(kind)
        return _over_parts(basis, lambda part: NormalizedBy(part, function, over))
    return _over_parts(basis, lambda part: _normalized(part, kind, over))


def check_normalization(kind: Any, over: str, operand: Any) -> None:
    """Raise `ConfigError` unless there is such a kind, over inputs or outputs, of scores if it takes scores."""
    check_choice("normalize", "over", over, ("inputs", "outputs"))
    if kind not in (*NORMALIZATIONS, "log_softmax"):
        normalization(kind)
    if kind not in ("sum", "count", "none") and not operand.has_scores:
        raise ConfigError(str(kind), "its basis must have scores", repr(operand),
                          "Scores come from a mechanism such as DotProduct; a matrix takes normalize('sum').")


@operator("softmax_with_sink")
def softmax_with_sink(basis: Basis, sink: float | Tensor, over: str = "inputs") -> Basis:
    """A softmax whose denominator has one more term, e^sink."""
    check_normalization("softmax", over, basis)
    if not isinstance(sink, Tensor):
        return _over_parts(basis, lambda part: SinkSoftmax(part, check_number("softmax", "sink", sink), over))
    if sink.numel() not in (1, basis.size):
        raise ShapeError("softmax", f"a tensor as sink must have 1 or K={basis.size} elements", tuple(sink.shape))
    return _with_numbers(basis, sink.reshape(-1), lambda part, own: SinkSoftmax(part, own, over))


@operator("log_softmax")
def log_softmax(basis: Basis, over: str = "inputs") -> Basis:
    """The logarithm of a softmax, in which absent pairs stay absent."""
    check_normalization("log_softmax", over, basis)
    return _over_parts(basis, lambda part: LogSoftmax(part, over))


def _normalized(basis: Basis, kind: str, over: str) -> Basis:
    """Dividing exponentials by their sum is a softmax, which does not overflow."""
    if kind == "sum" and isinstance(basis, Mapped) and basis.fn is torch.exp:
        return Normalized(basis.child, "softmax", over)
    if kind == "sum" and isinstance(basis, Masked) and isinstance(basis.child, Mapped) and basis.child.fn is torch.exp:
        return Normalized(Masked(basis.child.child, basis.mask), "softmax", over)
    return Normalized(basis, kind, over)


@operator("map")
def entrywise(basis: Basis, fn: Callable[[Tensor], Tensor]) -> Basis:
    """fn of every existing entry."""
    if not callable(fn):
        raise ConfigError("map", "fn must be callable", repr(fn))
    return _over_parts(basis, lambda part: Mapped(part, fn))


@operator("leaky_relu")
def leaky_relu(basis: Basis, negative_slope: float = 0.2) -> Basis:
    """max(a, 0) + negative_slope min(a, 0)."""
    slope = check_number("leaky_relu", "negative_slope", negative_slope)
    return _over_parts(basis, lambda part: LeakyReLU(part, slope))


@operator("softcap")
def softcap(basis: Basis, cap: float) -> Basis:
    """cap tanh(a / cap)."""
    if not check_number("softcap", "cap", cap) > 0:
        raise ConfigError("softcap", "cap must be positive", cap)
    return multiply(entrywise(multiply(basis, 1.0 / cap), torch.tanh), cap)


@operator("scaled")
def scaled(basis: Basis, scale: float | None = None) -> Basis:
    """Multiply by `scale`, or by 1/sqrt(D); without a scale, a basis without scores is a `ConfigError`."""
    if scale is None and not basis.has_scores:
        raise ConfigError("scaled", "its basis must have scores", type(basis).__name__,
                          "Scale before the softmax, or give the factor: scaled(0.125).")
    if scale is not None and not isinstance(scale, Tensor):
        check_number("scaled", "scale", scale)
    return multiply(basis, depth(basis) ** -0.5 if scale is None else scale)


def depth(basis: Basis) -> int:
    """D, the number of channels that a score's products run over."""
    depths = [node.depth for node in nodes(basis) if hasattr(node, "depth")]
    result = {int(size) if isinstance(size, Tensor) else size for size in depths}  # tensors under torch.jit.trace
    if len(result) != 1:
        raise ConfigError("scaled", "the scores must be products of one number D of channels", sorted(result) or "none",
                          "Give the factor: scaled(0.125).")
    return result.pop()


@operator("dropout")
def dropout(basis: Basis, p: float, seed: Tensor | None = None, stream: int = 0) -> Basis:
    """Zero each weight with probability p; the seed is drawn from torch's generator unless it is given."""
    if not 0 <= p < 1:
        raise ConfigError("dropout", "p must be in [0, 1)", p)
    if p == 0:
        return basis
    seed = draw_seed() if seed is None else seed
    if isinstance(basis, Concat):
        return Concat(tuple(dropout(part, p, seed, number) for number, part in enumerate(basis.parts)))
    return Dropped(basis, p, seed, stream)


def draw_seed() -> Tensor:
    """A seed of hashed numbers, by torch's generator."""
    return torch.randint(0, 2**62, (), dtype=torch.int64)


# -- terms added to scores in the log domain (Andreoli 2019, Definition 4) ----------------------------------------
# Adding -inf to a score removes its pair from every later sum of exponentials, like a mask. So a table of -inf and 0 is
# a mask, a table of other numbers is a term, and a table with both is split.

def mask_and_table(kind: str, added: Any) -> tuple[Any, Tensor | None]:
    """The mask, and the finite table (..., K or 1, M, N), that something added to scores stands for: a `Support`, a
    `Graph` or a floating tensor, whose pairs at -inf are a mask of all heads and no parameters. `kind` says in errors
    what else could be added."""
    if isinstance(added, Support | Graph):
        return added, None
    if not isinstance(added, Tensor) or not added.is_floating_point():
        got = f"a tensor of {added.dtype}" if isinstance(added, Tensor) else type(added).__name__
        raise ConfigError("a + b", f"both operands must be {kind}", got, "A floating tensor (M, N) or (..., K, M, N), "
                          "a Support and a Graph may be added too; a boolean mask goes as a.masked(keep=mask).")
    if added.dim() < 2:
        raise ShapeError("a + b", "a tensor that is added must have shape (M, N) or (..., K or 1, M, N)",
                         tuple(added.shape))
    return _split(with_heads(added), isinstance(added, torch.nn.Parameter))


def check_masks_scores(first: Any, mask: Any) -> None:
    """Raise `ConfigError` where a mask is added to a matrix."""
    if mask is not None and not first.has_scores:
        raise ConfigError("a + b", "a mask in the log domain must be added to scores", repr(first),
                          "Of a matrix leave pairs out by a.masked(keep=mask).")


def with_heads(table: Tensor) -> Tensor:
    """A table (M, N) as (1, M, N), others as they are; of a parameter a parameter."""
    if table.dim() != 2:
        return table
    if isinstance(table, torch.nn.Parameter):
        return torch.nn.Parameter(table.detach().unsqueeze(0), requires_grad=table.requires_grad)
    return table.unsqueeze(0)


def _split(table: Tensor, trained: bool) -> tuple[Any, Tensor | None]:
    exists = table.detach() != -torch.inf
    if exists.all():
        return None, table
    if trained:
        raise ConfigError("a + b", "a parameter that is added must be finite", "-inf",
                          "Leave the pairs out by a.masked(keep=mask).")
    if (exists != exists[..., :1, :, :]).any():
        raise ConfigError("a + b", "-inf must be at the same pairs for all heads, which share a mask",
                          "others for some", "Mask heads apart and join them by |.")
    mask = exists[..., 0, :, :]
    finite = table.masked_fill(~exists, 0)
    return DenseMask(mask), finite if finite.any() or finite.requires_grad else None
