"""Progress: plain lines, soon and then ever less often, and live bars in a terminal."""

import io
import threading
import time

from structconv_systems.train.progress import Lines, Live, progress_for


class Timed(io.StringIO):
    """Remembers when lines were written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, text: str) -> int:
        self.times += [time.monotonic()] * bool(text.strip())
        return super().write(text)


def test_lines_come_soon_and_then_ever_less_often():
    stream = Timed()
    with Lines(stream) as progress:
        progress.jobs(2)
        progress.job("one", 50)
        progress.advance(7, {"loss": 0.25, "val_accuracy": 0.5})
        began = time.monotonic()
        time.sleep(5.2)
    first, second = (at - began for at in stream.times)
    assert 1.0 < first < 2.0
    assert 2.5 < second - first < 3.5
    assert "... [1/2] one: step 7/50  loss 0.25  val accuracy 0.5" in stream.getvalue()


def test_lines_keep_notes_and_finished_jobs_in_order():
    stream = io.StringIO()
    with Lines(stream) as progress:
        progress.phase("reading")
        progress.jobs(2)
        progress.job("one", 5)
        progress.job_done("one: fine")
        progress.job("two", 5)
        progress.note("careful")
        progress.job_done("two: fine")
        progress.jobs(1)
        progress.job_done("another recipe's: fine")
    assert stream.getvalue().splitlines() == ["reading", "[1/2] one: fine", "careful", "[2/2] two: fine",
                                              "[1/1] another recipe's: fine"]
    assert not [thread for thread in threading.enumerate() if thread.name.endswith("(_beat)")]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_bars_and_everything_else_lines():
    assert isinstance(progress_for(io.StringIO()), Lines)
    stream = Terminal()
    progress = progress_for(stream)
    assert isinstance(progress, Live)
    with progress:
        progress.phase("reading")
        progress.jobs(2)
        progress.job("one", 5)
        progress.advance(3, {"loss": 0.5})
        progress.job_done("one: [fine]")
        progress.job("two", 5)
        progress.note("careful")
    assert "one: [fine]" in stream.getvalue()
    assert "careful" in stream.getvalue()
