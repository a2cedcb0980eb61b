"""The built pages in a browser without the network, as wide as a phone. Skipped until `make docs` has built them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser, find_browser

ROOT = Path(__file__).parents[1]
DOCS, BUILT = ROOT / "docs", ROOT / "docs" / "_build" / "html"
WIDTH = 390
PROGRAM = find_browser()
pytestmark = [
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium (Debian: apt install chromium)"),
    pytest.mark.skipif(not (BUILT / "index.html").exists(), reason="the pages are not built (make docs)")]
#: Pages with formulas, wide tables, pictures, long lines of code, and notebooks.
PAGES = ("index", "tutorial", "inputs-and-outputs", "plans", "coming-from-pyg", "coming-from-torch", "bases", "gallery",
         "literature", "reference/layers", "reference/mechanisms", "systems", "systems/nri",
         "how-to/choose-a-structure", "seven-structures", "notebooks/4-a-hexagonal-grid")

#: What is wrong with the page that is open: formulas that are not laid out, and what a phone cuts off or scrolls to.
FAULTS = """(() => {
    const faults = [];
    for (const formula of document.querySelectorAll("math")) {
        const box = formula.getBoundingClientRect();
        if (!getComputedStyle(formula).display.includes("math") || box.width < 2 || box.height < 2)
            faults.push("not laid out: " + formula.textContent.slice(0, 60));
    }
    window.scrollTo(100000, 0);
    if (window.scrollX > 0) faults.push("scrolls sideways by " + window.scrollX + " px");
    window.scrollTo(0, 0);
    const page = document.querySelector("[role=main]") || document.body;  // what is around it may scroll, but need not
    const scrolls = (element) => element !== page
        && (/auto|scroll/.test(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
    for (const element of page.querySelectorAll("*")) {
        const box = element.getBoundingClientRect();
        if (box.width > 1 && box.right > window.innerWidth + 1 && !scrolls(element))
            faults.push("cut off: " + element.tagName + " " + element.textContent.slice(0, 60));
    }
    return faults;
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("profile"), width=WIDTH)
    yield browser
    browser.close()


def faults(browser: Browser, page: Path, formulas: int) -> list[str]:
    """What is wrong with a page; `formulas` is how many it has at least."""
    browser.open(page.as_uri())
    assert browser.evaluate("window.innerWidth") == WIDTH
    actual = browser.evaluate(FAULTS)
    count = browser.evaluate("document.querySelectorAll('math').length")
    short = [f"{count} of {formulas} formulas are MathML"] if count < formulas else []
    return [*browser.complaints, *actual, *short]


@pytest.mark.parametrize("name", PAGES)
def test_page(browser, name) -> None:
    source = DOCS / f"{name}.md"
    formulas = len(re.findall(r"(?s)\$\$.+?\$\$", source.read_text(encoding="utf-8")))
    assert not faults(browser, BUILT / f"{name}.html", formulas)


def test_search_finds_a_page(browser) -> None:
    browser.open((BUILT / "search.html").as_uri() + "?q=attention")
    actual = browser.evaluate("""new Promise((done) => {
        const look = (left) => {
            const count = document.querySelectorAll("#search-results li a").length;
            count || !left ? done(count) : setTimeout(look, 100, left - 1);
        };
        look(200);
    })""")
    assert actual and not browser.complaints


def test_dark_mode(browser) -> None:
    lightness = "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).slice(0, 3).map(Number)"
    shades = {}
    for scheme in ("light", "dark"):
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.open((BUILT / "index.html").as_uri())
        shades[scheme] = browser.evaluate(lightness)
    browser.call("Emulation.setEmulatedMedia", features=[])
    assert min(shades["light"]) > 200 and max(shades["dark"]) < 60
