"""The folder of a run: its configuration, environment, metrics, checkpoints and results."""

import fcntl
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import structconv
from structconv.commands.output import json_text
from structconv.commands.versions import PACKAGES, version, versions
from structconv.errors import ConfigError, DataError, StructconvError
from structconv.files import write_atomically
from structconv.machine import processor
from structconv_systems.data.text import read_json, read_text, sha256_of
from structconv_systems.pictures import Drawing
from structconv_systems.train.config import Recipe, to_json

__all__ = ["Metrics", "Run", "check_new", "environment", "in_turn", "locked"]

_CONFIG, _FILES, _ENVIRONMENT = "config.json", "files.json", "environment.json"
_CAPTIONS = "captions.json"
#: The keys of the environment in reports and outcomes.
_SAID = {"command", "commit", "processor", "python", "started", "structconv", "threads", "torch"}


class Metrics:
    """Measurements as lines of JSON, ``{"job": …, "step": …, …}``, appended as they come.

    After a resume no step comes twice: `truncate` drops what came after the checkpoint. Lines that a crash cut short,
    or that are not UTF-8, are dropped too. A number that is not finite is null.

    Example:

        >>> from pathlib import Path
        >>> from tempfile import TemporaryDirectory
        >>> from structconv_systems.train.run import Metrics
        >>> folder = TemporaryDirectory()
        >>> metrics = Metrics(Path(folder.name, "metrics.jsonl"))
        >>> metrics.append("line/seed-0", 10, {"val_loss": 0.5})
        >>> list(metrics)
        [{'job': 'line/seed-0', 'step': 10, 'val_loss': 0.5}]
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[str] = []
        self._written = time.monotonic()

    def append(self, job: str, step: int, values: dict[str, float]) -> None:
        """Add one line; it is in the file within a second of further lines, or after `flush`."""
        self._pending.append(json_text({"job": job, "step": step, **values}) + "\n")
        if time.monotonic() - self._written > 1.0:
            self.flush(wait=False)

    def flush(self, *, wait: bool = True) -> None:
        """Write every line to the file; with `wait`, until the disk has them."""
        if self._pending or wait:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write("".join(self._pending))
                file.flush()
                if wait:
                    os.fsync(file.fileno())
        self._pending.clear()
        self._written = time.monotonic()

    def truncate(self, job: str, step: int) -> int:
        """Drop the lines of `job` after `step`; the number of those that are left."""
        self.flush(wait=False)
        if not self.path.exists():
            return 0
        lines = [line for line in self if line["job"] != job or line["step"] <= step]
        text = "".join(json_text(line) + "\n" for line in lines)
        if text.encode() != self.path.read_bytes():
            write_atomically(self.path, text)
        return sum(line["job"] == job for line in lines)

    def check(self, steps: Mapping[str, int]) -> None:
        """Raise `DataError` unless there is a line for each of the `steps` of trainings, by name."""
        counts = Counter(line["job"] for line in self)
        for job, number in steps.items():
            if counts[job] != number:
                raise DataError(self.path, f"a line for each of the {number} steps of {job}", counts[job],
                                remedy="Put it back, or begin a new run.")

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.flush(wait=False)
        if not self.path.exists():
            return
        with open(self.path, "rb") as file:
            for text in file:
                line = _measured(text)
                if line is not None:
                    yield line


def _measured(text: bytes) -> dict[str, Any] | None:
    """Return a line of measurements, or `None` if it is damaged."""
    try:
        line = json.loads(text)
    except (ValueError, RecursionError):
        return None
    whole = isinstance(line, dict) and isinstance(line.get("job"), str) and type(line.get("step")) is int
    return line if whole else None


class Run:
    """A run folder: ``config.json``, ``environment.json``, ``files.json`` with the SHA-256 of each file that the recipe
    reads, ``metrics.jsonl``, ``checkpoints/``, and what the recipe writes.

    Use `create` for a new one (after the recipe is resolved, so that a bad key leaves no folder) and `open` for one
    that exists.

    Example:

        >>> from tempfile import TemporaryDirectory
        >>> from structconv_systems.train.options import Trained
        >>> from structconv_systems.train.run import Run
        >>> class Line(Trained):
        ...     name = "line"
        >>> folder = TemporaryDirectory()
        >>> run = Run.create(f"{folder.name}/line", Line(steps=20))
        >>> sorted(path.name for path in run.folder.iterdir())
        ['config.json', 'environment.json', 'files.json']
        >>> run.trained
        False
    """

    def __init__(self, folder: Path, *, fresh: bool = False, created: bool = False) -> None:
        self.folder, self._fresh, self._created = Path(folder), fresh, created
        self.metrics = Metrics(self.folder / "metrics.jsonl")

    @classmethod
    def create(cls, folder: str | Path | None, recipe: Recipe) -> Self:
        """Make the folder and write the configuration into it.

        Args:
            folder: where; None is ``runs/<recipe>-<date>-<time>`` in the current directory.

        Raises:
            ConfigError: the folder exists and is not empty.
        """
        check_new(folder)
        place = Path(folder) if folder else _fresh(Path("runs"), recipe.name)
        created = not place.exists()
        try:
            place.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("Run", f"{place} must be a folder that can be made", error.strerror or error) from error
        run = cls(place, fresh=True, created=created)
        run.write(_ENVIRONMENT, json.dumps(environment(recipe.device), indent=2) + "\n")
        run.write(_FILES, json.dumps({str(file): sha256_of(file) for file in recipe.files()}, indent=2) + "\n")
        return run.configured(recipe)  # the last: with it the folder is a run

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """A run that exists.

        Raises:
            ConfigError: there is no run in the folder.
        """
        run = cls(Path(folder))
        if not (run.folder / _CONFIG).is_file():
            raise ConfigError("Run", f"{folder} must be a run folder", "a folder without config.json"
                              if run.folder.is_dir() else "no such folder")
        return run

    def configured(self, recipe: Recipe) -> Self:
        """Write a recipe's options into ``config.json``."""
        self.write(_CONFIG, to_json(recipe))
        return self

    @property
    def config_text(self) -> str:
        """The text of ``config.json``."""
        return read_text(self.folder / _CONFIG)

    @property
    def recipe_name(self) -> str:
        """The recipe's name in ``config.json``."""
        try:
            known = read_json(self.folder / _CONFIG)
        except DataError as error:
            raise ConfigError("Run", f"{self.folder / _CONFIG} must name its recipe", str(error).rstrip(".")) from error
        if not isinstance(known, dict) or "recipe" not in known:
            raise ConfigError("Run", f"{self.folder / _CONFIG} must name its recipe", json.dumps(known)[:80])
        return str(known["recipe"])

    @property
    def environment(self) -> dict[str, Any]:
        """The contents of ``environment.json``: command, commit, date and versions; `DataError` if it lacks some of it.
        """
        known = read_json(self.folder / _ENVIRONMENT)
        missing = _SAID - known.keys() if isinstance(known, dict) else _SAID
        if missing:
            raise DataError(self.folder / _ENVIRONMENT, f"an object with {', '.join(sorted(_SAID))}",
                            f"none of {', '.join(sorted(missing))}")
        return known

    def check_files(self, recipe: Recipe, *, others: bool = False) -> None:
        """Raise `DataError` if a file of the recipe changed, appeared or vanished since the run began; with `others`
        the recipe may read other files."""
        before = read_json(self.folder / _FILES)
        if not isinstance(before, dict):
            raise DataError(self.folder / _FILES, "an object with the SHA-256 of files", type(before).__name__)
        now = {str(file): file for file in recipe.files()}
        changed = {name: "another" for name in now.keys() & before.keys() if sha256_of(now[name]) != before[name]}
        if not others:
            changed |= dict.fromkeys(now.keys() - before.keys(), "one that it did not read")
            changed |= dict.fromkeys(before.keys() - now.keys(), "no such file")
        if changed:
            name, got = min(changed.items())
            raise DataError(name, f"the file as it was when {self.folder} began", got,
                            remedy="Put it back, or begin a new run.")

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the folder within a context; `ConfigError` if another process works in it.

        If an error of the library ends a new run before any training, its folder is removed, so that the command works
        again."""
        with locked(self.folder):
            try:
                yield
            except StructconvError:
                self._discard_untouched()
                raise

    @property
    def trained(self) -> bool:
        """True if a training has saved a checkpoint."""
        return (self.folder / "checkpoints").exists()

    def _discard_untouched(self) -> None:
        """Empty the folder, and remove it if `create` made it."""
        if not self._fresh or self.trained:
            return
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if self._created:
            self.folder.rmdir()

    def checkpoint_folder(self, job: str) -> Path:
        """Return the folder of a training's checkpoints."""
        return self.folder / "checkpoints" / job

    def write(self, name: str, content: bytes | str) -> Path:
        """Write a file of the run in one step, folders included; returns its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_atomically(path, content)

    def draw(self, name: str, picture: Drawing | bytes, caption: str) -> None:
        """Write ``pictures/name.png`` and ``pictures/name.svg``, or one file if `name` has a suffix; and the caption.

        Args:
            name: ``graph`` of a `Drawing`, ``graph.png`` or ``motion.gif`` of bytes.
            caption: what rows and columns, or axes, are, and what the colors say; `captions` returns it.
        """
        stem = name.partition(".")[0]
        for file, content in ({name: picture} if isinstance(picture, bytes) else
                              {f"{name}.{kind}": content for kind, content in picture._asdict().items()}).items():
            self.write(f"pictures/{file}", content)
        self.write(_CAPTIONS, json_text({**self.captions, stem: caption}, indent=2) + "\n")

    @property
    def captions(self) -> dict[str, str]:
        """The captions of the pictures, by name without suffix; none in runs of earlier versions."""
        path = self.folder / _CAPTIONS
        return read_json(path) if path.is_file() else {}

    def write_summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write ``summary.json``, with null for a figure that is not finite; returns the summary."""
        self.write("summary.json", json_text(summary, indent=2) + "\n")
        return summary


def check_new(folder: str | Path | None) -> None:
    """Raise `ConfigError` if a run cannot begin in `folder` because something is there; None always can."""
    place = Path(folder) if folder else None
    if place is None or not place.exists() or (place.is_dir() and _begun(place)):
        return
    expected = f"{place} must be a new or an empty folder"
    if (place / _CONFIG).is_file():
        raise ConfigError("Run", expected, "a run", f"Continue it with `structconv resume {place}`, or name another.")
    raise ConfigError("Run", expected, "one with files in it" if place.is_dir() else "a file", "Name another.")


def _begun(folder: Path) -> bool:
    """Return True if a folder holds nothing but what `Run.create` writes before ``config.json``."""
    before = {".lock", _ENVIRONMENT, _FILES, *(f".{name}.partial" for name in (_ENVIRONMENT, _FILES, _CONFIG))}
    return {path.name for path in folder.iterdir()} <= before


def _fresh(parent: Path, name: str) -> Path:
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    place, count = parent / stem, 2
    while place.exists():
        place, count = parent / f"{stem}-{count}", count + 1
    return place


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return versions, threads and machine, for the record of a run on a device; imports torch."""
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else processor()
    if device not in ("cpu", "cuda"):
        name = f"{name} ({device})"
    return {"structconv": version("structconv"), "commit": _commit(), "packages": versions(PACKAGES),
            "python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform(),
            "processor": name, "cores": os.cpu_count(), "threads": torch.get_num_threads(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": ["structconv", *sys.argv[1:]]}


def _commit() -> str | None:
    """Return the commit of both packages, with a plus sign if files are changed; `None` outside git."""
    source = Path(__file__).parents[1]
    library = Path(structconv.__file__).parent

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(source), *words], capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if top is None:
        return None
    paths = [str(place) for place in (source, library) if place.is_relative_to(top)]  # a library elsewhere is no part
    commit = git("log", "-1", "--format=%h", "--", *paths)
    return commit + ("+" if git("status", "--porcelain", "--", *paths) else "") if commit else None


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder; the system unlocks it when the process ends, however that is.

    Raises:
        ConfigError: another process has the lock; its number, machine and start are named.
    """
    with open(folder / ".lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read() or "another process"
            raise ConfigError("Run", f"{folder} must be free", f"held by {holder}",
                              "Wait until it ends, or interrupt it.") from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        yield


@contextmanager
def in_turn(folder: Path) -> Iterator[None]:
    """Lock a folder as soon as no other process does; nothing is written into it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
