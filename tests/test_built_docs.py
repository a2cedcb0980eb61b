"""The built pages work without the network: links, formulas, widths. Skipped until `make docs` has built them."""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
BUILT = ROOT / "docs" / "_build" / "html"
pytestmark = pytest.mark.skipif(not (BUILT / "index.html").exists(), reason="the pages are not built (make docs)")


class Page(HTMLParser):
    """Anchors, links, what the page loads, and whether each table is in an element that scrolls."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text = path.read_text(encoding="utf-8")
        self.anchors, self.links, self.loaded = set[str](), list[str](), list[str]()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors.add(given.get("id", ""))
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if tag in ("script", "img", "iframe") and "src" in given:
            self.loaded.append(given["src"])
        if tag == "link" and given.get("rel") in ("stylesheet", "preload", "preconnect"):
            self.loaded.append(given["href"])


@pytest.fixture(scope="module")
def pages() -> dict[Path, Page]:
    return {path.resolve(): Page(path) for path in BUILT.rglob("*.html")}


def test_nothing_is_loaded_from_the_network(pages) -> None:
    assert not [(path.name, address) for path, page in pages.items() for address in page.loaded
                if re.match(r"(?:https?:)?//", address)]
    sheets = [path.read_text(encoding="utf-8") for path in BUILT.rglob("*.css")]
    assert sheets and not [sheet for sheet in sheets if re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet)]


def test_links_lead_somewhere(pages) -> None:
    broken = []
    for path, page in pages.items():
        for link in (*page.links, *page.loaded):
            if re.match(r"[a-z]+:|//", link):
                continue
            address, _, anchor = unquote(link).partition("#")
            target = (path.parent / address.partition("?")[0]).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (anchor and target in pages and anchor not in pages[target].anchors):
                broken.append((path.name, link))
    assert not broken


def test_formulas_are_mathml(pages) -> None:
    docs = ROOT / "docs"
    blocks = {path.relative_to(docs): len(re.findall(r"(?s)\$\$.+?\$\$", path.read_text(encoding="utf-8")))
              for path in docs.rglob("*.md") if not {"_build", "notebooks"} & {*path.parts}}
    assert sum(blocks.values()) > 5
    short = [path for path, count in blocks.items()
             if pages[(BUILT / path).with_suffix(".html").resolve()].text.count("<math") < count]
    assert not short
    assert not [address for page in pages.values() for address in page.loaded if "mathjax" in address.lower()]


def test_tables_scroll_and_our_elements_fit_a_phone(pages) -> None:
    for path, page in pages.items():
        if "_modules" not in path.parts:
            wide = [size for size in re.findall(r"(?:min-)?width:\s*(\d+)px", page.text) if int(size) > 390]
            assert not wide, path.name
            assert page.text.count("table-wrapper") >= len(re.findall(r"<table class=\"docutils", page.text)), path.name
