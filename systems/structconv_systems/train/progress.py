"""Progress of a run: live bars in a terminal, plain lines elsewhere.

Lines come after 1.5 silent seconds, then after twice as many each time, up to a minute."""

import sys
import threading
import time
from typing import IO, Any, Self

__all__ = ["Lines", "Live", "Progress", "Quiet", "progress_for"]

_PULSE_SECONDS, _SLOWEST_PULSE = 1.5, 60.0


class Progress:
    """The progress of a run: `phase` and `job` begin a part, `advance` counts steps, `note` prints a line.

    By itself it reports nothing.

    Example:

        >>> from structconv_systems.train.progress import Quiet
        >>> with Quiet() as progress:
        ...     progress.note("nobody reads this")
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def phase(self, text: str) -> None:
        """Begin a part of the work without steps."""

    def jobs(self, total: int) -> None:
        """Set the number of trainings."""

    def job(self, name: str, steps: int) -> None:
        """Begin a training of at most `steps` steps."""

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        """Show that `step` steps of the training are done."""

    def job_done(self, text: str) -> None:
        """End the training."""

    def note(self, text: str) -> None:
        """Print a line that stays."""


#: For tests and for callers with their own display.
Quiet = Progress


def progress_for(stream: IO[str] | None = None) -> Progress:
    """Live bars if `stream` (by default stderr) is a terminal, plain lines if not.

    Example:

        >>> import io
        >>> from structconv_systems.train.progress import progress_for
        >>> type(progress_for(io.StringIO())).__name__     # no terminal
        'Lines'
    """
    stream = stream or sys.stderr
    return Live(stream) if stream.isatty() else Lines(stream)


def _measured(metrics: dict[str, float]) -> str:
    return "  ".join(f"{key.replace('_', ' ')} {value:.4g}" for key, value in metrics.items())


class Pace:
    """Estimate the remaining time of a training from the steps since it began or continued."""

    def __init__(self, steps: int) -> None:
        self._steps, self._first, self._began = steps, 0, 0.0

    def left(self, step: int) -> str:
        """Return the time left at a step, for example ``3:05``."""
        if not self._first:
            self._first, self._began = step, time.monotonic()
        done = step - self._first
        if not done:
            return "?"
        seconds = round((time.monotonic() - self._began) / done * (self._steps - step))
        hours, minutes = divmod(seconds // 60, 60)
        return f"{hours}:{minutes:02}:{seconds % 60:02}" if hours else f"{minutes}:{seconds % 60:02}"


class Lines(Progress):
    """Plain lines; while nothing else is printed, a thread prints the present state, ever less often.

    Example:

        >>> import sys
        >>> from structconv_systems.train.progress import Lines
        >>> with Lines(sys.stdout) as progress:
        ...     progress.jobs(1)
        ...     progress.job("line", 2)
        ...     progress.advance(1, {"loss": 0.5})
        ...     progress.job_done("loss 0.5")
        ...     progress.note("done")
        [1/1] loss 0.5
        done
    """

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self._total = self._finished = 0
        self._status = "starting"
        self._spoke, self._silence = time.monotonic(), _PULSE_SECONDS
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._pulse = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._pulse.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._pulse.join()

    def phase(self, text: str) -> None:
        self._status, self._silence = text, _PULSE_SECONDS
        self.note(text)

    def jobs(self, total: int) -> None:
        self._total, self._finished = total, 0

    def job(self, name: str, steps: int) -> None:
        self._name, self._steps, self._pace = name, steps, Pace(steps)
        self._status = f"{self._place()}{name}: starting"

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        left = self._pace.left(step)
        self._status = f"{self._place()}{self._name}: step {step}/{self._steps}  {_measured(metrics)}  {left} left"

    def job_done(self, text: str) -> None:
        self._finished += 1
        self.note(f"[{self._finished}/{self._total}] {text}" if self._total else text)

    def note(self, text: str) -> None:
        with self._lock:
            print(text, file=self.stream, flush=True)
            self._spoke = time.monotonic()

    def _place(self) -> str:
        return f"[{self._finished + 1}/{self._total}] " if self._total else ""

    def _beat(self) -> None:
        while not self._over.wait(max(0.05, self._spoke + self._silence - time.monotonic())):
            if time.monotonic() - self._spoke >= self._silence:
                self._silence = min(2 * self._silence, _SLOWEST_PULSE)
                self.note(f"... {self._status}")


class Live(Progress):
    """Bars by rich: one for the trainings, one for the steps of the present one; notes scroll above them.

    Example:

        >>> import io
        >>> from structconv_systems.train.progress import Live
        >>> with Live(io.StringIO()) as progress:
        ...     progress.note("done")
    """

    def __init__(self, stream: IO[str]) -> None:
        from rich import progress as rich
        from rich.console import Console

        self._bars = rich.Progress(
            rich.SpinnerColumn(), rich.TextColumn("{task.description}"), rich.BarColumn(bar_width=24),
            rich.MofNCompleteColumn(), rich.TextColumn("{task.fields[shown]}"), rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(), console=Console(file=stream), transient=True)
        self._all: Any = self._bars.add_task("starting", total=None, shown="")
        self._one: Any = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def phase(self, text: str) -> None:
        self._bars.update(self._all, description=text)

    def jobs(self, total: int) -> None:
        self._bars.update(self._all, description="trainings", total=total, completed=0)

    def job(self, name: str, steps: int) -> None:
        if self._one is not None:
            self._bars.remove_task(self._one)
        self._one = self._bars.add_task(name, total=steps, shown="")

    def advance(self, step: int, metrics: dict[str, float]) -> None:
        self._bars.update(self._one, completed=step, shown=_measured(metrics))

    def job_done(self, text: str) -> None:
        self._bars.advance(self._all)
        self.note(text)

    def note(self, text: str) -> None:
        self._bars.console.print(text, markup=False, highlight=False)
