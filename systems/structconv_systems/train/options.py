"""The options of every recipe that has a figure, and of those trained by gradients on batches; no torch."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from structconv.errors import ConfigError
from structconv_systems.train.config import Recipe, option
from structconv_systems.train.effect import Effect
from structconv_systems.train.schedules import SCHEDULES

__all__ = ["Measured", "Trained"]

#: Options that change no result, apart from rounding: two runs that differ in these alone are the same experiment.
_NOT_A_RESULT = frozenset(("preset", "threads", "device", "compile", "data", "checkpoint_every"))


@dataclass(frozen=True, kw_only=True)
class Measured(Recipe):
    """A recipe with a figure that is compared with a published one.

    Attributes:
        published: the figure as printed in the paper.
        effect: the gain that the paper claims; None if no baseline is trained.
        folder: the folder of its files inside the folder with all data; empty if it needs none.
        where: the source of the files; a sentence.
        learning: the figure of a training step that must fall in the quick preset, where three minutes are too few for
            the sign of the effect; empty if the quick preset shows the sign.
        further: the overrides of further rows of ``reproduce --all``, such as other data sets.
        tuning: options that differ where learning rates are compared: a validation part of a recipe that has none.

    Example:

        >>> from structconv_systems.train.options import Measured
        >>> class Line(Measured):
        ...     name = "line"
        >>> Line(seeds=3).preset
        'default'
    """

    published: ClassVar[str]
    effect: ClassVar[Effect | None] = None
    folder: ClassVar[str] = ""
    where: ClassVar[str] = ""
    learning: ClassVar[str] = ""
    further: ClassVar[Sequence[Sequence[str]]] = ()
    tuning: ClassVar[Mapping[str, Any]] = {}
    preset: str = option("default", "the preset whose values these are", fixed=True)
    seeds: int = option(1, "trainings, with seeds 0, 1, ...", minimum=1)

    @property
    def paper(self) -> str:
        """The published figure of the data that the options name."""
        return self.published

    @property
    def expected(self) -> Effect | None:
        """The published effect on the data that the options name."""
        return self.effect

    @property
    def overrides(self) -> dict[str, Any]:
        """Options by which a result differs from that of the preset, with their values."""
        own = {field.name: field.default for field in dataclasses.fields(self)}
        own.update(self.presets.get(self.preset, {}))
        return {key: current for key, value in own.items()
                if key not in _NOT_A_RESULT and (current := getattr(self, key)) != value}


@dataclass(frozen=True, kw_only=True)
class Trained(Measured):
    """The options of a `BatchTask`; each has a help line.

    A step is `accumulate` batches, whose losses are divided by what all of them count; their gradient is clipped to the
    norm `clip`, and the rate is what `schedule` says of the step times `learning_rate`, or the group's own in `rates`.

    Example:

        >>> from structconv_systems.train.options import Trained
        >>> class Line(Trained):
        ...     name = "line"
        >>> Line(steps=20).optimizer
        'adam'
        >>> Line(steps=-1)
        Traceback (most recent call last):
        structconv.errors.ConfigError: line: steps must be at least 1; got -1.
    """

    steps: int = option(1000, "optimizer steps, at most", minimum=1)
    optimizer: str = option("adam", "adam or adamw", choices=("adam", "adamw"))
    learning_rate: float = option(1e-3, "peak learning rate", minimum=0, below=1e38)
    rates: tuple[str, ...] = option((), "peak learning rates of groups that have others, GROUP=RATE,...")
    schedule: str = option("constant", f"learning-rate schedule: {', '.join(SCHEDULES)}", choices=tuple(SCHEDULES))
    warmup: int = option(0, "steps in which the learning rate rises", minimum=0)
    weight_decay: float = option(0.0, "weight decay of the optimizer", minimum=0)
    clip: float = option(1.0, "clip gradients to this norm; 0: do not clip", minimum=0)
    accumulate: int = option(1, "batches in an optimizer step (gradient accumulation)", minimum=1)
    ema: float = option(0.0, "decay of the moving average of weights that is evaluated; 0: none", minimum=0, below=1)
    precision: str = option("float32", "products in float32 or bfloat16 (autocast)", choices=("float32", "bfloat16"))
    validate_every: int = option(200, "steps between validations", minimum=1)
    checkpoint_every: int = option(200, "steps between checkpoints", minimum=1)
    patience: int = option(0, "stop after this many validations without improvement; 0: never", minimum=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.own_rates) < len(self.rates):
            raise ConfigError(self.name, "rates must name each group once", ",".join(self.rates))

    @property
    def own_rates(self) -> dict[str, float]:
        """The peak learning rates of groups with their own."""
        return dict(map(self._rate, self.rates))

    def of(self, group: str) -> Self:
        """The options by which a group trains.

        Example:

            >>> from structconv_systems.train.options import Trained
            >>> class Line(Trained):
            ...     name = "line"
            >>> line = Line(learning_rate=0.01, rates=("steep=0.1",))
            >>> line.of("steep").learning_rate, line.of("flat").learning_rate
            (0.1, 0.01)
        """
        return dataclasses.replace(self, learning_rate=self.own_rates.get(group, self.learning_rate))

    def _rate(self, text: str) -> tuple[str, float]:
        group, _, number = text.rpartition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if not group or not 0 <= rate < 1e38:
            raise ConfigError(self.name, "rates must be GROUP=RATE, with rates from 0 to below 1e38", repr(text))
        return group, rate
