"""The parts of options, and the options of recipes that read files in a folder."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from structconv.errors import ConfigError
from structconv_systems.train.config import Recipe, option
from structconv_systems.train.effect import Effect
from structconv_systems.train.options import Measured, Trained

__all__ = ["Effect", "InFolder", "OnFiles", "Recipe", "Trained", "check_shares", "option"]


def check_shares(recipe: Recipe, train: float, valid: float) -> None:
    """Raise `ConfigError` unless the shares of the data for training and validation leave some for the test."""
    if train + valid >= 1:
        raise ConfigError(recipe.name, "train and valid must leave something for the test", f"{train} and {valid}")


@dataclass(frozen=True, kw_only=True)
class InFolder(Measured):
    """A recipe that reads files in a folder.

    Attributes:
        reads: the keys that name files.
    """

    reads: ClassVar[tuple[str, ...]] = ("train", "valid", "test")
    data: str = option(".", "the folder with the files")

    def __post_init__(self) -> None:
        super().__post_init__()
        missing = [key for key in self.reads if not hasattr(self, key)]
        if missing:
            raise ConfigError(type(self).__name__, "reads must name options that are files", ", ".join(missing))
        object.__setattr__(self, "data", str(Path(self.data).resolve()))

    def check(self) -> None:
        place, named = Path(self.data), [name for key in self.reads if (name := getattr(self, key))]
        forgotten = place == Path.cwd() and named and not self.files()
        if forgotten or not place.is_dir():
            raise ConfigError(self.name, f"data must be a folder with {', '.join(named)}", repr(self.data),
                              f"Give it with --data DIR. {self.where}")

    def path(self, name: str) -> Path:
        """Return the path of a file in the folder, or elsewhere if `name` is absolute."""
        return Path(self.data) / name

    def from_here(self, name: str) -> str:
        """Return the whole path of a file in the current directory if it exists; else the name unchanged."""
        path = Path(name).absolute()
        return str(path) if self._files_at(path) else name

    def files(self, *keys: str) -> list[Path]:
        named = [name for key in keys or self.reads if (name := getattr(self, key))]
        return [file for name in named for file in self._files_at(self.path(name))]

    def _files_at(self, path: Path) -> list[Path]:
        """Return the existing files of this path."""
        return [path] if path.is_file() else []


@dataclass(frozen=True, kw_only=True)
class OnFiles(InFolder, Trained):
    """A recipe that trains by gradients on batches from files."""
