"""Versions of installed packages."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["PACKAGES", "version", "versions"]

#: Packages that the library or `structconv-systems` uses, beside torch.
PACKAGES = ("numpy", "scipy", "networkx", "scikit-learn", "matplotlib", "rich", "safetensors", "tokenizers",
            "sacrebleu", "rdkit", "tensorboard")


def version(package: str) -> str | None:
    """Return the installed version of a package; `None` if it is not installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    return {name: number for name in packages if (number := version(name)) is not None}
