"""Formulas of the pages are MathML, and a built page loads nothing from the network."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PROSE = [re.sub(r"(?ms)^```.*?^```$|`[^`\n]*`", "", page.read_text(encoding="utf-8")) for page in DOCS.rglob("*.md")]
FORMULAS = [formula for text in PROSE for formula in re.findall(r"(?s)\$\$.+?\$\$", text)]


def test_formulas_render_without_the_network(tmp_path: Path) -> None:
    sphinx = pytest.importorskip("sphinx.application", reason="the extra `docs` is not installed")
    assert len(FORMULAS) > 3
    source, out = tmp_path / "source", tmp_path / "html"
    source.mkdir()
    (source / "index.md").write_text("# Formulas\n\n" + "\n\n".join([*FORMULAS, "Inline: $x^2$."]), encoding="utf-8")
    extensions = [name for name in runpy.run_path(str(DOCS / "conf.py"))["extensions"] if name != "notebooks"]
    sphinx.Sphinx(source, DOCS, out, tmp_path / "trees", "html", {"extensions": extensions}, status=None,
                  warningiserror=True).build()
    page = (out / "index.html").read_text(encoding="utf-8")
    assert page.count("<math ") == len(FORMULAS) + 1
    assert "$" not in re.sub(r"(?s)<script.*?</script>", "", page)
    loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*?(?:src|href)=\"([^\"]+)", page)
    assert loaded
    assert not [address for address in loaded if re.match(r"(\w+:)?//", address)]
