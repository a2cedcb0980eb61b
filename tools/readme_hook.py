"""Metadata hook: the long description of the package is README.md with links to the tag of its version.

A package index shows the README without the repository. The address is `Repository` of `[project.urls]`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface


class ReadmeHook(MetadataHookInterface):
    """Set the field `readme`."""

    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = absolute(text, metadata["urls"]["Repository"], f"v{metadata['version']}")
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def absolute(text: str, repository: str, tag: str) -> str:
    """Make relative links and pictures of a Markdown text absolute."""

    def link(match: re.Match[str]) -> str:
        picture, target = match["picture"], match["target"]
        target = f"README.md{target}" if target.startswith("#") else target
        return f"{picture}{match['label']}({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

    return re.sub(r"(?P<picture>!?)(?P<label>\[[^\]]*\])\((?!\w+:)(?P<target>[^)\s]+)\)", link, text)
