"""`Context`: attention from a fixed number of learned queries."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from structconv.bases import scores as values
from structconv.bases.base import Basis
from structconv.derived import derived
from structconv.errors import ConfigError
from structconv.mechanisms.expression import Channels, Inputs, Mechanism
from structconv.mechanisms.scores import Score, drawn
from structconv.mechanisms.visibility import EVERY_INPUT, InputSet, Masks
from structconv.shapes import check_positive
from structconv.structures.named import NamedStructures, Place
from structconv.structures.samples import Samples
from structconv.written import written

__all__ = ["Context"]


class Context(Score):
    """a_mn = <theta_n, x_m>, with `queries` learned vectors theta_n, so that N does not depend on z (context
    attention).

    Each sample of a batch has these N outputs, one sample after the other.

    Args:
        queries: N.
        heads: K, if no `score` is given.
        score: an expression of scores; it reads theta_n (P') in the place of z:
            `Context(4, score=Additive(dim=16)).softmax()`. Its terms of positions count the queries from 0.

    Example:

        >>> from structconv import Conv
        >>> from structconv.mechanisms import Context
        >>> Conv(Context(queries=3).softmax(), 4, 8)(torch.randn(9, 4)).shape      # three learned queries
        torch.Size([3, 8])
    """

    def __init__(self, queries: int, heads: int = 1, *, score: Mechanism | None = None) -> None:
        super().__init__(heads if score is None else score.size)
        self.queries = check_positive("Context", "queries", queries)
        if score is not None and (heads != 1 or not score.has_scores or "projected" in score.reads):
            raise ConfigError("Context", "score must be an expression of scores of entries, which tells the heads",
                              f"{score!r} and heads={heads}")
        self.score = score
        self.batching = "pairs" if score is None else "apart"

    def extra_repr(self) -> str:
        return written(self, {"heads": self.heads if self.score is None else 1})

    @property
    def operands(self) -> tuple[Mechanism, ...]:
        """The score, if there is one."""
        return () if self.score is None else (self.score,)

    #: To the score, if there is one.
    _passes_structures = property(lambda self: self.score is not None)

    @property
    def reads(self) -> Collection[str]:  # type: ignore[override]
        return ("content",) if self.score is None else {"content", *self.score.reads} - {"positions"}

    def bind(self, channels: Channels) -> None:
        if self.score is None:
            self.query = drawn((self.heads, self.queries, channels.inputs), channels.inputs)
        else:
            self.query = drawn((self.queries, channels.others), channels.others)

    def _must_move(self, samples: Samples | None) -> bool:
        raise ConfigError("Context", "positions must be left out, for its outputs are its queries", repr(self))

    def forward(self, inputs: Inputs) -> Basis:
        if self.score is not None:
            return self.score.evaluate(inputs._replace(z=self.query))
        samples = inputs.samples
        query = self.query if samples is None else self.query.repeat(1, samples.num_samples, 1)
        return values.Bilinear(query, inputs.x.unsqueeze(-3))

    def _outputs_are(self, structure: Any, num_inputs: int) -> str | None:
        return None

    def output_structure(self, structure: Any) -> Any:
        samples: Samples | None = getattr(structure, "samples", None)
        return structure if samples is None else derived(
            samples, ("context", self.queries), lambda: Samples([self.queries] * samples.num_samples))

    def _leads(self, structure: Any) -> Any:
        if type(structure) is not NamedStructures or self.score is None:
            return super()._leads(structure)
        return structure._replace(samples=self.output_structure(structure.samples))

    def _samples_of(self, structures: NamedStructures) -> list[Place]:
        if self.score is None:
            return super()._samples_of(structures)
        return [Place(name, self._pairs_of(samples)) for name, samples in self.score._samples_of(structures)]

    def _pairs_of(self, structure: Any) -> Samples:
        return super()._pairs_of(structure.samples if type(structure) is NamedStructures else structure)

    def _visible_inputs(self, inputs: Inputs, masks: Masks) -> tuple[InputSet, InputSet]:
        if self.score is None:
            return EVERY_INPUT, EVERY_INPUT
        existing = self.score._visible_inputs(self.score._own_inputs(inputs._replace(z=self.query)), masks)[0]
        return existing, existing

    def _needed_inputs(self, inputs: Inputs, masks: Masks, needed: InputSet) -> list[InputSet]:
        if self.score is None:
            return [needed]
        return self.score._needed_inputs(self.score._own_inputs(inputs._replace(z=self.query)), masks, needed)

    def _may_mask_inputs(self, structure: Any, others: bool = False) -> int:
        return 0 if self.score is None else self.score._may_mask_inputs(self.score._own(structure), True)
