"""Early ends of a training: Ctrl-C and SIGTERM, handled between two steps, and divergence; no torch."""

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, Self

from structconv.commands.stop import Stop

__all__ = ["EXIT_DIVERGED", "EXIT_INTERRUPTED", "Diverged", "Interrupt", "Interrupted"]

EXIT_DIVERGED, EXIT_INTERRUPTED = 4, 75


class Interrupted(Stop):
    """A training received a signal, saved its state, and stops.

    Args:
        message: what stopped and where. run: the folder of its run, if known.

    Example:

        >>> from structconv_systems.train.interrupt import Interrupted
        >>> raise Interrupted("line/seed-0: stopped after step 1")
        Traceback (most recent call last):
        structconv_systems.train.interrupt.Interrupted: line/seed-0: stopped after step 1
    """

    exit_code = EXIT_INTERRUPTED

    def __init__(self, message: str, run: Path | None = None) -> None:
        super().__init__(message)
        self.run = run

    @property
    def details(self) -> dict[str, Any]:
        return {"interrupted": True, "run": str(self.run)}


class Diverged(Stop):
    """Losses or gradients of a training were not finite too often.

    Example:

        >>> from structconv_systems.train.interrupt import Diverged
        >>> raise Diverged("line: the loss was not finite in 10 steps")
        Traceback (most recent call last):
        structconv_systems.train.interrupt.Diverged: line: the loss was not finite in 10 steps
    """

    exit_code = EXIT_DIVERGED


class Interrupt:
    """While entered, SIGINT and SIGTERM set `requested` instead of ending the process.

    The second Ctrl-C ends it at once, as usual. Outside the main thread, which alone gets signals in Python, nothing is
    installed, and you may set `requested` by hand.

    Args:
        notify: called with one line when the first signal comes.

    Example:

        >>> import signal
        >>> from structconv_systems.train.interrupt import Interrupt
        >>> with Interrupt() as interrupt:
        ...     signal.raise_signal(signal.SIGINT)         # as Ctrl-C
        ...     interrupt.requested
        True
    """

    def __init__(self, notify: Callable[[str], None] = lambda text: None) -> None:
        self.requested = False
        self.notify = notify
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
        self.notify(f"{signal.Signals(number).name}: finishing this step and saving (Ctrl-C again leaves at once)")
