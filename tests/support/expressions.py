"""Random expressions of the algebra, each with the tensor it means, computed by plain torch beside it.

The tensor never passes through a basis: every operator is written out here a second time, over dense arrays and a
table of which pairs exist. `bases(...)` and `scores(...)` are Hypothesis strategies of `Drawn`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from structconv.bases import Basis, Concat, Dense, Identity, Shift, Sparse, positions, scores
from structconv.bases import algebra as _algebra  # noqa: F401 - registers the operators
from structconv.structures import Blocks, Causal, DenseMask, Global, Graph, Grid, Padding, Window

F64 = torch.float64
_FUNCTIONS: tuple[Callable[[Tensor], Tensor], ...] = (torch.tanh, torch.square, torch.cos)


@dataclass(frozen=True, eq=False)
class Drawn:
    """A basis, the tensor (K, M, N) it means, which pairs exist (K or 1, M, N), and whether its entries are scores.

    Absent pairs are zero in `dense`; `raw` holds what they would be if they existed.
    """

    basis: Basis
    raw: Tensor
    exists: Tensor
    scored: bool

    @property
    def dense(self) -> Tensor:
        """The tensor with zeros at absent pairs."""
        return torch.where(self.exists, self.raw, 0.0)

    def __repr__(self) -> str:
        return repr(self.basis)


def _numbers(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def _everything(m: int, n: int) -> Tensor:
    return torch.ones(1, m, n, dtype=torch.bool)


@st.composite
def matrices(draw: st.DrawFn, m: int, n: int) -> Drawn:
    """A leaf without scores: a dense tensor, a graph with values, shifts or identities."""
    seed, k = draw(st.integers(0, 999)), draw(st.integers(1, 2))
    kinds = ["dense", "sparse", *(["identity", "shift"] if m == n else [])]
    kind = draw(st.sampled_from(kinds))
    if kind == "identity":
        return Drawn(Identity(n, k), torch.eye(n, dtype=F64).expand(k, n, n), _everything(m, n), False)
    if kind == "shift":
        offsets = draw(st.lists(st.integers(-n, n), min_size=1, max_size=2))
        i = torch.arange(n)
        raw = torch.stack([(i[:, None] == (i - offset)).to(F64) for offset in offsets])
        return Drawn(Shift(Grid(n), tuple(offsets)), raw, _everything(m, n), False)
    values = _numbers(seed, k, m, n)
    if kind == "dense":
        return Drawn(Dense(values), values, _everything(m, n), True)
    present = _numbers(seed + 1, m, n) > 0.3
    source, target = present.nonzero(as_tuple=True)
    graph = Graph(torch.stack([source, target]), num_inputs=m, num_outputs=n)
    return Drawn(Sparse(graph, values[:, source, target]), torch.where(present, values, 0.0), _everything(m, n), False)


@st.composite
def leaves_of_scores(draw: st.DrawFn, m: int, n: int) -> Drawn:
    """A leaf of scores: products, sums of two terms, additive attention, tables of relative positions, edges."""
    seed, k = draw(st.integers(0, 999)), draw(st.integers(1, 2))
    query, key = _numbers(seed, k, n, 3), _numbers(seed + 1, k, m, 3)
    kind = draw(st.sampled_from(["bilinear", "affine", "additive", "lookup", "edges"]))
    exists = _everything(m, n)
    if kind == "bilinear":
        return Drawn(scores.Bilinear(query, key), torch.einsum("knd,kmd->kmn", query, key), exists, True)
    if kind == "affine":
        basis = scores.Affine(key[..., 0], query[..., 0])
        return Drawn(basis, key[..., 0].unsqueeze(-1) + query[..., 0].unsqueeze(-2), exists, True)
    if kind == "additive":
        vector = _numbers(seed + 2, k, 3)
        raw = torch.einsum("kd,kmnd->kmn", vector, torch.tanh(key.unsqueeze(-2) + query.unsqueeze(-3)))
        return Drawn(scores.Additive(key, query, vector), raw, exists, True)
    if kind == "lookup":
        table = _numbers(seed, k, 1, 5)
        offset = (torch.arange(m)[:, None] - torch.arange(n)).clamp(-2, 2) + 2
        return Drawn(positions.Lookup(table, "clip", 2, m, n), table[:, 0][:, offset], exists, True)
    present = _numbers(seed + 1, m, n) > 0.3
    source, target = present.nonzero(as_tuple=True)
    graph = Graph(torch.stack([source, target]), num_inputs=m, num_outputs=n)
    values = _numbers(seed, k, m, n)
    return Drawn(scores.EdgeScore(graph, values[:, source, target]), values, present.unsqueeze(0), True)


@st.composite
def masks(draw: st.DrawFn, m: int, n: int) -> tuple[Any, Tensor]:
    """A support, or a graph, and the table (M, N) of the pairs in it."""
    i, j = torch.arange(m)[:, None], torch.arange(n)
    seed = draw(st.integers(0, 999))
    table, kept = _numbers(seed, m, n) > 0, _numbers(seed + 1, m) > -0.5
    pairs = table.nonzero().mT
    options: list[tuple[Any, Tensor]] = [
        (Causal(), i <= j), (Window(1), (i - j).abs() <= 1), (Blocks(2), i // 2 == j // 2),
        (Padding(kept), kept[:, None].expand(m, n)), (DenseMask(table), table),
        (DenseMask(table & kept[:, None]), table & kept[:, None]),
        (Graph(pairs, num_inputs=m, num_outputs=n), table),
        (Window(1) | Global((0, 3)), ((i - j).abs() <= 1) | (i == 0) | (i == 3) | (j == 0) | (j == 3)),
        (Window(2, dilation=2) | Causal(), ((i - j).abs() <= 4) & ((i - j) % 2 == 0) | (i <= j)),
        (Window(1) & Padding(kept), ((i - j).abs() <= 1) & kept[:, None])]
    return draw(st.sampled_from(options))


def _softmax(a: Drawn, dim: int) -> Tensor:
    powers = torch.where(a.exists, (a.raw - a.raw.abs().max()).exp(), 0.0) if a.raw.numel() else a.raw
    total = powers.sum(dim, keepdim=True)
    return powers / torch.where(total == 0, 1.0, total)


@st.composite
def _masked(draw: st.DrawFn, a: Drawn) -> Drawn:
    mask, table = draw(masks(*a.raw.shape[-2:]))
    if draw(st.booleans()):
        return Drawn(a.basis.masked(keep=mask), a.raw, a.exists & table, a.scored)
    return Drawn(a.basis.masked(drop=mask), a.raw, a.exists & ~table, a.scored)


@st.composite
def _normalized(draw: st.DrawFn, a: Drawn) -> Drawn:
    over = draw(st.sampled_from(["inputs", "outputs"]))
    kind = draw(st.sampled_from(["softmax", "count", "sigmoid"] if a.scored else ["count"]))
    dim = -2 if over == "inputs" else -1
    everything = _everything(*a.raw.shape[-2:])
    if kind == "softmax":
        weights = _softmax(a, dim)
    elif kind == "sigmoid":
        weights = torch.where(a.exists, torch.sigmoid(a.raw), 0.0)
    else:
        weights = a.dense / a.exists.sum(dim, keepdim=True).clamp(min=1)
    return Drawn(a.basis.normalize(kind, over), weights, everything, False)


def _add(a: Drawn, b: Drawn) -> Drawn:
    """Sums are of scores where either has any, and exist where both do; otherwise of matrices, absent being zero."""
    if a.scored or b.scored:
        return Drawn(a.basis + b.basis, a.raw + b.raw, a.exists & b.exists, True)
    return Drawn(a.basis + b.basis, a.dense + b.dense, _everything(*a.raw.shape[-2:]), False)


def _concatenate(a: Drawn, b: Drawn) -> Drawn:
    exists = torch.cat([a.exists.expand(a.raw.shape), b.exists.expand(b.raw.shape)])
    return Drawn(a.basis | b.basis, torch.cat([a.raw, b.raw]), exists, a.scored or b.scored)


def _outer(a: Drawn, b: Drawn) -> Drawn:
    raw = (a.raw.unsqueeze(1) * b.raw.unsqueeze(0)).flatten(0, 1)
    exists = a.exists.expand(a.raw.shape).unsqueeze(1) & b.exists.expand(b.raw.shape).unsqueeze(0)
    return Drawn(a.basis.outer(b.basis), raw, exists.flatten(0, 1), a.scored or b.scored)


def _joined_parts(basis: Any) -> list[Any] | None:
    """The parts of a `|`; `None` for anything else."""
    if isinstance(basis, Concat):
        return list(basis.parts)
    return getattr(basis, "joined_parts", None)


def _mix(a: Drawn, heads: int, seed: int) -> Drawn:
    """Scores exist where those of all heads do; of matrices an absent entry is zero, and parts of a `|` have masks of
    their own."""
    matrix = _numbers(seed, a.basis.size, heads)
    if a.scored or _joined_parts(a.basis) is None:
        exists = a.exists.all(0, keepdim=True)
        raw = torch.einsum("kmn,kj->jmn", a.raw, matrix)
    else:
        exists, raw = _everything(*a.raw.shape[-2:]), torch.einsum("kmn,kj->jmn", a.dense, matrix)
    return Drawn(a.basis.mix(matrix), raw, exists, a.scored)


@st.composite
def expressions(draw: st.DrawFn, m: int, n: int, depth: int = 3,
                leaf: Callable[[int, int], st.SearchStrategy[Drawn]] | None = None) -> Drawn:
    """A random expression of bases from M inputs to N outputs; K stays below a few dozen.

    `leaf` draws the leaves; then all of them have as many inputs as outputs.
    """
    square = leaf is not None
    if leaf is None:
        def leaf(m: int, n: int) -> st.SearchStrategy[Drawn]:
            return st.one_of(matrices(m, n), leaves_of_scores(m, n))
    if depth == 0:
        return draw(leaf(m, n))
    operator = draw(st.sampled_from(["leaf", "or", "matmul", "add", "times", "scale", "outer", "masked", "map",
                                     "normalize", "normalize", "transpose", "leaky", "mix"]))
    if operator == "leaf":
        return draw(leaf(m, n))
    own = leaf if square else None
    if operator == "matmul":
        middle = m if square else draw(st.integers(0, 4))
        a = draw(expressions(m, middle, depth - 1, own))
        b = draw(expressions(middle, n, depth - 2 if depth > 1 else 0, own))
        dense = (a.dense.unsqueeze(1) @ b.dense.unsqueeze(0)).flatten(0, 1)
        return Drawn(a.basis @ b.basis, dense, _everything(m, n), False)
    if operator == "transpose":
        a = draw(expressions(n, m, depth - 1, own))
        return Drawn(a.basis.transpose(), a.raw.mT, a.exists.mT, a.scored)
    a = draw(expressions(m, n, depth - 1, own))
    if operator in ("or", "add", "times", "outer"):
        b = draw(expressions(m, n, depth - 2 if depth > 1 else 0, own))
        return _joined(operator, a, b)
    return draw(_changed(operator, a))


def _joined(operator: str, a: Drawn, b: Drawn) -> Drawn:
    if operator == "or":
        return _concatenate(a, b)
    if operator == "outer":
        return a if _joined_parts(a.basis) is None and _joined_parts(b.basis) is not None else _outer(a, b)
    sizes = a.basis.size, b.basis.size
    if (sizes[0] != sizes[1] and 1 not in sizes) or not _in_step(a.basis, b.basis):
        return a
    if operator == "add":
        return _add(a, b)
    return Drawn(a.basis * b.basis, a.raw * b.raw, a.exists & b.exists, a.scored or b.scored)


def _in_step(a: Any, b: Any) -> bool:
    """Whether the parts of a `|` meet one matrix, or the parts of a `|` cut at the same places."""
    cuts = [[part.size for part in parts] for parts in map(_joined_parts, (a, b)) if parts is not None]
    return not cuts or 1 in (a.size, b.size) or (len(cuts) == 2 and cuts[0] == cuts[1])


@st.composite
def _changed(draw: st.DrawFn, operator: str, a: Drawn) -> Drawn:
    if operator == "masked":
        return draw(_masked(a))
    if operator == "normalize":
        return draw(_normalized(a))
    if operator == "scale":
        return Drawn(-0.7 * a.basis, -0.7 * a.raw, a.exists, a.scored)
    if operator == "mix":
        return _mix(a, draw(st.integers(1, 3)), draw(st.integers(0, 999)))
    if operator == "leaky":
        return Drawn(a.basis.leaky_relu(0.1), torch.nn.functional.leaky_relu(a.raw, 0.1), a.exists, a.scored)
    fn = draw(st.sampled_from(_FUNCTIONS))
    return Drawn(a.basis.map(fn), fn(a.raw), a.exists, a.scored)
