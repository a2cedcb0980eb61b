"""Find the files of images and labels: those of a stem, or of a folder with one folder for each class; no torch."""

from pathlib import Path

__all__ = ["IMAGES", "LABELS", "class_folders", "files_of", "stem_files"]

#: The endings of the names of the two idx files.
IMAGES, LABELS = "images-idx3-ubyte", "labels-idx1-ubyte"


def stem_files(stem: Path, part: str) -> list[Path]:
    """Return the possible file names of ``STEM-part``."""
    return [stem.with_name(f"{stem.name}-{part}{packed}") for packed in ("", ".gz")]


def class_folders(path: Path) -> list[Path]:
    """The folders of the classes, by name."""
    return sorted(folder for folder in path.iterdir() if folder.is_dir())


def files_of(path: Path) -> list[Path]:
    """Return the existing files of images and labels of a path, which is a stem or a folder."""
    if path.is_dir():
        return sorted(file for folder in class_folders(path) for file in folder.iterdir()
                      if file.suffix.lower() == ".png")
    return [file for part in (IMAGES, LABELS) for file in stem_files(path, part) if file.is_file()]
