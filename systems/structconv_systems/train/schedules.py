"""Learning rates as shares of their peak, functions of the step alone, except the plateau, which has a state."""

import math
from collections.abc import Callable
from typing import Any

from structconv.errors import ConfigError
from structconv_systems.train.stopping import Best

__all__ = ["SCHEDULES", "Plateau", "rate"]


def _constant(step: int, steps: int, warmup: int) -> float:
    return 1.0


def _inverse_root(step: int, steps: int, warmup: int) -> float:
    """Vaswani et al. (2017), eq. 3, whose peak is 1 at the end of the warm-up."""
    return math.sqrt(max(warmup, 1) / step)


def _cosine(step: int, steps: int, warmup: int) -> float:
    """Loshchilov and Hutter (2017), eq. 5, without restarts: from 1 to 0 over what follows the warm-up."""
    return 0.5 + 0.5 * math.cos(math.pi * min((step - warmup) / max(steps - warmup, 1), 1.0))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "constant": _constant, "inverse_root": _inverse_root, "cosine": _cosine, "plateau": _constant}


def rate(schedule: str, step: int, steps: int, warmup: int) -> float:
    """The share of the peak at step number `step`, from 1, of `steps`; it rises as a line over `warmup` steps.

    Raises:
        ConfigError: there is no such schedule.

    Example:

        >>> from structconv_systems.train.schedules import rate
        >>> [rate("cosine", step, steps=100, warmup=10) for step in (5, 10, 100)]
        [0.5, 1.0, 0.0]
    """
    if schedule not in SCHEDULES:
        raise ConfigError("rate", f"schedule must be one of {', '.join(SCHEDULES)}", repr(schedule))
    return step / warmup if step < warmup else SCHEDULES[schedule](step, steps, warmup)


class Plateau:
    """The rate is multiplied by `factor` after `patience` validations without a better figure.

    Example:

        >>> from structconv_systems.train.schedules import Plateau
        >>> plateau = Plateau(factor=0.5, patience=2)
        >>> for loss in (1.0, 1.1, 1.2):
        ...     plateau.update(loss)
        >>> plateau.share
        0.5
    """

    def __init__(self, *, factor: float = 0.5, patience: int = 3, higher: bool = False) -> None:
        self.factor, self.share = factor, 1.0
        self._best = Best("figure", higher=higher, patience=patience)

    def update(self, figure: float) -> None:
        """Read the figure of a validation."""
        if self._best.update({"figure": figure}).stop:
            self.share, self._best.waited = self.share * self.factor, 0

    def state(self) -> dict[str, Any]:
        return {"share": self.share, "best": self._best.state()}

    def load(self, state: dict[str, Any]) -> None:
        self.share = state["share"]
        self._best.load(state["best"])
