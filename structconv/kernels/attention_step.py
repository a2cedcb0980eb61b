"""A decoding step of attention in one kernel: project the new entry, store its key and value, compute the output."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple, Self, cast

import torch
from torch import Tensor

from structconv import torch_compat as private
from structconv.bases.base import Basis
from structconv.bases.entrywise import Normalized
from structconv.bases.placed import Moved
from structconv.bases.positions import Distance, Lookup
from structconv.bases.tree import Projected, Rotated, Shared, tensor
from structconv.kernels.dense_attention import Attended, ScaledDotProduct, matched
from structconv.kernels.expressions import is_by_offset, product_and_bias, unmasked
from structconv.planning.kernel import register
from structconv.planning.problem import BoundRun, Call, Problem, Run
from structconv.primitives.native.dispatch import Heads, Turn, core_for
from structconv.primitives.native.loader import Core
from structconv.structures.output_positions import OutputPositions
from structconv.structures.values import altered
from structconv.weights import LowRank

__all__ = ["AttentionStep"]


class AttentionStep(ScaledDotProduct):
    """Softmax attention, Theta_k = V_k O_k, of one output that reads all entries, the last of which is not projected
    yet."""

    name = "structconv.attention_step"
    types: ClassVar[tuple[type, ...]] = (Normalized,)
    before = ("structconv.dense_attention", *ScaledDotProduct.before)
    pending = True

    def match(self, problem: Problem) -> Attended | None:
        x, theta = problem.x, problem.theta
        if not problem.pending or not isinstance(theta, LowRank) or x.dim() > 3 or problem.outputs != 1:
            return None
        if x.dtype not in (torch.float32, torch.bfloat16) or x.device.type != "cpu":
            return None
        basis = cast(Normalized, problem.basis)
        bias = product_and_bias(unmasked(basis.child), _is_by_offset)[1]
        match = None if problem.relative is not None else matched(basis, bias)
        return match if match is not None and not (match.existing.masked or match.existing.causal) else None

    def paths(self, match: Attended, problem: Problem) -> tuple[str, ...]:
        return ("between",)

    def compile(self, match: Attended, problem: Problem, path: str) -> Run:
        otherwise = super().compile(match, problem, path)

        def run(call: Call) -> Tensor:
            step, keys = _Step.of(match, call), match.key(call.basis)
            if step is None:
                return otherwise(call.settled())
            y = step.attend(_rows(keys), _rows(call.projected))
            call.pending.mark_written()
            return y

        return run

    def bind(self, match: Attended, call: Call) -> BoundRun | None:
        step, pending = _Step.of(match, call), call.pending
        if step is None or not step.projects(pending.x) or step.position != pending.start:
            return None
        keys, values = (pending.entries_of(_rows(stored)).rows for stored in (match.key(call.basis), call.projected))

        def run(x: Tensor, position: int) -> Tensor | None:
            if private.watched() or x.shape != step.shape or core_for(x, step.output) is None:
                return None
            return step.attend(keys.entries(), values.entries(), x, position)

        return run


class _Step(NamedTuple):
    """The arguments of a step beside the cache: the new entry (B, 1, P) or (1, P), or its projections, the term of the
    scores by the offset from it, the rotation of query and key, and their position."""

    core: Core
    query: Heads
    key: Heads
    value: Heads
    output: Tensor
    bias: Tensor | None
    scale: float
    term: _Term | None
    turn: Turn
    position: int
    shape: tuple[int, ...]

    @classmethod
    def of(cls, match: Attended, call: Call) -> Self | None:
        """Return the step of a call; `None` if the kernel does not support it."""
        theta: Any = call.theta
        pending, values, keys = call.pending, _rows(call.projected), _rows(match.key(call.basis))
        if private.watched() or pending is None or values is None:
            return None
        x = pending.x
        if x.shape[-2] != 1 or keys.shape[:-3] != values.shape[:-3] or (own := pending.entries_of(keys)) is None:
            return None
        moved: Any = None if match.bias is None else match.bias(call.basis)
        if moved is not None and moved.output_positions.first != keys.shape[-2] - 1:
            return None
        query_leaf, embedded = match.query(call.basis), pending.computed(own)
        turn, position = Turn(), pending.start
        if type(query_leaf) is type(embedded) is Rotated and int(query_leaf.positions) == position:
            turn = Turn(embedded.rates, embedded.gain, embedded.halves)
        else:  # at different positions they are rotated here
            query_leaf, embedded = (leaf.tensor() if type(leaf) is Rotated else leaf for leaf in (query_leaf, embedded))
        query, key = _heads(query_leaf), _heads(embedded)
        value, output = Heads(x, theta.value.mT.flatten(0, 1)), theta.output.flatten(0, 1).mT
        core = core_for(*query, *key, *value, output, call.bias)
        if core is None or not (_alike(query, x, match.size) and _alike(key, x, keys.shape[-3])):
            return None
        term = None if moved is None else _Term(moved.child, match.size)
        return cls(core, query, key, value, output, call.bias, match.scale, term, turn, position, x.shape)

    def projects(self, x: Tensor) -> bool:
        """Return True if query, key and value are projections of this entry."""
        return all(heads.weight is not None and heads.x is x for heads in (self.query, self.key, self.value))

    def attend(self, keys: Tensor, values: Tensor, x: Tensor | None = None, position: int = 0) -> Tensor:
        """y = sum_k softmax_m(scale <q_k, key_km> + term_km) value_km O_k + b, of another entry x at a position, where
        query, key and value are projections. The entry's key and value are written to the last rows of keys (B, G, M,
        D) and values (B, G', M, C)."""
        core, query, key, value, output, bias, scale, term, turn, own, shape = self
        if x is not None:
            query, key, value, own = Heads(x, *query[1:]), Heads(x, *key[1:]), Heads(x, *value[1:]), position
        if keys.dim() == 3:
            keys, values = keys.unsqueeze(0), values.unsqueeze(0)
        added = None if term is None else term.at(keys.shape[-2])
        y: Tensor = core.attention_step(*query, *key, *value, keys, values, output, bias, scale, added, *turn, own)
        return y.view(*shape[:-1], y.shape[-1])


class _Term:
    """A term of the scores that depends only on the offset of an entry from the last one, of K = `size`."""

    def __init__(self, scores: Distance | Lookup, size: int) -> None:
        self._scores, self._size = scores, size
        self._table: Tensor | None = None

    def at(self, entries: int) -> Tensor:
        """The term of the scores at each of M entries, the last of which has the offset 0: (K, M)."""
        if self._table is None or self._table.shape[-1] < entries:
            most = 2 * entries
            scores = altered(self._scores, inputs=most, outputs=most)
            table = Moved(scores, OutputPositions(most - 1), 1).dense(torch.float32)
            self._table = table[..., 0].expand(self._size, -1)
        return self._table[:, -entries:]


def _is_by_offset(term: Basis) -> bool:
    """Return True for a term that depends only on the offset, with an output anywhere."""
    return (isinstance(term, Moved) and term.output_positions.positions is None and is_by_offset(term.child)
            and not term.child.batch_shape)


def _rows(stored: Any) -> Any:
    """The rows as they are stored: once for all heads that share them."""
    return stored.x if type(stored) is Shared else stored


def _heads(leaf: Any) -> Heads:
    """The heads of one entry: the operands of its projection, or the results."""
    if type(leaf) is Projected or type(leaf) is Rotated:
        return Heads(leaf.x, leaf.weight, leaf.bias)
    return Heads(tensor(leaf).contiguous())


def _alike(heads: Heads, x: Tensor, size: int) -> bool:
    """Return True if these are `size` heads of one entry for each element of the batch, as in x."""
    own, heads_too = heads.x.shape, heads.weight is None
    return own[-2] == 1 and own[:-2 - heads_too] == x.shape[:-2] and not (heads_too and own[-3] != size)


register(AttentionStep())
