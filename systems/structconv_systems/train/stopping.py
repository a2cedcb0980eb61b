"""Rules for early stopping and the choice of weights; each is a small state machine that checkpoints can hold."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

from structconv.errors import ConfigError

__all__ = ["Best", "BestAccuracy", "Last", "LossWindow", "Patience", "Stopping", "Verdict"]


@dataclass(frozen=True)
class Verdict:
    """`keep`: these weights are the ones to return so far; `stop`: no more steps.

    Example:

        >>> from structconv_systems.train.stopping import Verdict
        >>> Verdict(keep=True, stop=False)
        Verdict(keep=True, stop=False)
    """

    keep: bool
    stop: bool


class Stopping(Protocol):
    """A rule that reads what each validation measured; its state is a dictionary of plain values.

    Example:

        >>> from structconv_systems.train.stopping import Verdict
        >>> class Below:                                   # any object with these methods
        ...     def __init__(self, aim):
        ...         self.aim = aim
        ...     def update(self, metrics):
        ...         return Verdict(keep=True, stop=metrics["val_loss"] < self.aim)
        ...     def state(self):
        ...         return {}
        ...     def load(self, state):
        ...         pass
        >>> Below(0.5).update({"val_loss": 0.4}).stop
        True
    """

    def update(self, metrics: dict[str, float]) -> Verdict: ...

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


class _Remembers:
    """A rule whose state is its attributes."""

    def state(self) -> dict[str, Any]:
        return dict(vars(self))

    def load(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Last(_Remembers):
    """Never stops early and keeps the last weights: the number of steps is known beforehand.

    Example:

        >>> from structconv_systems.train.stopping import Last
        >>> rule = Last()
        >>> [rule.update({"val_loss": loss}).keep for loss in (1.0, 0.9, 0.95, 0.96)]
        [False, False, False, False]
    """

    def update(self, metrics: dict[str, float]) -> Verdict:
        return Verdict(keep=False, stop=False)


class LossWindow(_Remembers):
    """Kipf and Welling (2017): after `window` validations, stop when the loss exceeds the mean of the last `window`.

    The last weights are kept.

    Example:

        >>> from structconv_systems.train.stopping import LossWindow
        >>> rule = LossWindow(window=2)
        >>> [rule.update({"val_loss": loss}).stop for loss in (1.0, 0.9, 0.95, 0.96)]
        [False, False, False, True]
    """

    def __init__(self, window: int = 10) -> None:
        self.window = window
        self.steps = 0
        self.losses: list[float] = []

    def update(self, metrics: dict[str, float]) -> Verdict:
        loss, before = metrics["val_loss"], self.losses
        stop = self.steps > self.window and loss > sum(before) / len(before)
        self.losses = [*before, loss][-self.window:]
        self.steps += 1
        return Verdict(keep=False, stop=stop)


class Patience(_Remembers):
    """Velickovic et al. (2018): stop after `patience` validations in which neither loss nor accuracy was best.

    The weights kept are the last ones that reached both bests at once.

    Example:

        >>> from structconv_systems.train.stopping import Patience
        >>> rule = Patience(patience=2)
        >>> [rule.update({"val_loss": loss, "val_accuracy": 0.5}).keep for loss in (1.0, 0.9, 0.95, 0.96)]
        [True, True, False, False]
    """

    def __init__(self, patience: int = 100) -> None:
        self.patience = patience
        self.waited = 0
        self.best_loss = math.inf
        self.best_accuracy = 0.0

    def update(self, metrics: dict[str, float]) -> Verdict:
        lower, higher = metrics["val_loss"] <= self.best_loss, metrics["val_accuracy"] >= self.best_accuracy
        self.best_loss = min(self.best_loss, metrics["val_loss"])
        self.best_accuracy = max(self.best_accuracy, metrics["val_accuracy"])
        self.waited = 0 if lower or higher else self.waited + 1
        return Verdict(keep=lower and higher, stop=self.waited >= self.patience)


class BestAccuracy(_Remembers):
    """Never stops early; keeps the weights of the best validation accuracy, of the lower loss where two are equal.

    Example:

        >>> from structconv_systems.train.stopping import BestAccuracy
        >>> rule = BestAccuracy()
        >>> [rule.update({"val_loss": loss, "val_accuracy": 0.5}).keep for loss in (1.0, 0.9, 0.95, 0.96)]
        [True, True, False, False]
    """

    def __init__(self) -> None:
        self.best: list[float] = [-math.inf, -math.inf]

    def update(self, metrics: dict[str, float]) -> Verdict:
        now = [metrics["val_accuracy"], -metrics["val_loss"]]
        keep = now > self.best
        if keep:
            self.best = now
        return Verdict(keep=keep, stop=False)


class Best(_Remembers):
    """Keeps the weights of the best figure; stops after `patience` validations without a better one, if it is not 0.

    Example:

        >>> from structconv_systems.train.stopping import Best
        >>> rule = Best("val_loss", patience=2)
        >>> [rule.update({"val_loss": loss}).stop for loss in (1.0, 0.9, 0.95, 0.96)]
        [False, False, False, True]
    """

    def __init__(self, metric: str, *, higher: bool = False, patience: int = 0) -> None:
        self.metric, self.patience, self.sign = metric, patience, 1.0 if higher else -1.0
        self.best, self.waited = -math.inf, 0

    def update(self, metrics: dict[str, float]) -> Verdict:
        if self.metric not in metrics:
            raise ConfigError("Best", f"metric must be of what validate measures, {', '.join(metrics)}", self.metric)
        now = self.sign * metrics[self.metric]
        keep = now > self.best
        self.best, self.waited = (now, 0) if keep else (self.best, self.waited + 1)
        return Verdict(keep=keep, stop=0 < self.patience <= self.waited)
