"""What a package index shows, and what a release needs."""

import re
import runpy
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("folder", [".", "systems"])
def test_links_of_the_description_work_without_the_repository(folder: str) -> None:
    core = pytest.importorskip("hatchling.metadata.core", reason="hatchling is not installed")
    manager = pytest.importorskip("hatchling.plugin.manager")
    project = core.ProjectMetadata(str(ROOT / folder), manager.PluginManager()).core
    repository = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
    assert project.urls["Repository"] == repository
    assert project.readme_content_type == "text/markdown"
    source = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    targets, sources = (re.findall(r"(!?)\[[^\]]*\]\(([^)]*)\)", text) for text in (project.readme, source))
    assert len(targets) == len(sources) and not re.search(r"<(?:a|img)\b|^\[[^\]]+\]:", source, re.MULTILINE)
    for (picture, target), (_, relative) in zip(targets, sources, strict=True):
        if re.match(r"https?://", relative):
            assert target == relative
            continue
        start = f"{repository}/{'raw' if picture else 'blob'}/v{project.version}/"
        assert target.startswith(start), relative
        path, _, anchor = target.removeprefix(start).partition("#")
        assert (ROOT / path).exists(), relative
        if anchor:
            headings = re.findall(r"(?m)^#+ (.+)$", (ROOT / path).read_text(encoding="utf-8"))
            assert anchor in [re.sub(r"[^\w\- ]", "", words).strip().lower().replace(" ", "-") for words in headings]


@pytest.mark.parametrize(("changelog", "complaint"), [
    ("## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n- A layer.\n", None),
    ("## [1.2.0] - 2026-01-31\n\n- A layer.\n\n## [1.1.0] - 2025-12-01\n\n- Another.\n", None),
    ("## [Unreleased]\n\n- A layer.\n", "has no section"),
    ("## [Unreleased]\n\n- A layer.\n\n## [1.2.0] - 2026-01-31\n\n- Another.\n", "has entries"),
    ("## [Unreleased]\n\n## [1.2.0]\n\n- A layer.\n", "has no section"),
    ("## [1.2.0] - 2026-02-30\n\n- A layer.\n", "is not a date"),
    ("## [1.2.0] - 2026-01-31\n\n## [1.1.0] - 2025-12-01\n\n- Another.\n", "is empty"),
])
def test_a_release_has_a_dated_section(tmp_path: Path, changelog: str, complaint: str | None) -> None:
    complaints = runpy.run_path(str(ROOT / "tools" / "release.py"))["complaints"]
    (tmp_path / "systems").mkdir()
    for path in ("pyproject.toml", "systems/pyproject.toml"):
        (tmp_path / path).write_text('[project]\nversion = "1.2.0"\n', encoding="utf-8")
    (tmp_path / "CITATION.cff").write_text("version: 1.2.0\n", encoding="utf-8")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n{changelog}", encoding="utf-8")
    found = complaints("v1.2.0", tmp_path)
    assert any(complaint in line for line in found) if complaint else not found
    other = complaints("v1.3.0", tmp_path)
    assert [line.split()[0] for line in other[:3]] == ["pyproject.toml", "systems/pyproject.toml", "CITATION.cff"]


def test_the_version_here_is_one() -> None:
    complaints = runpy.run_path(str(ROOT / "tools" / "release.py"))["complaints"]
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert not [line for line in complaints(f"v{version}", ROOT) if not line.startswith("CHANGELOG.md")]
