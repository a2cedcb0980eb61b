"""The page: self-contained, escaped, and well formed."""

import base64
import re
from html.parser import HTMLParser

from structconv_systems.report.page import figure, page, paragraph, section, table


class Balance(HTMLParser):
    """Collects unclosed tags."""

    void = frozenset({"meta", "img", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.sources += [value for key, value in attrs if key in ("src", "href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_a_page_is_whole_and_links_nowhere():
    text = page("A & B", [section("One", [table(("x", "y"), [("<a>", "1")]), figure(b"\x89PNG", 'it\'s "it"')]),
                          paragraph("p <q>")])
    parser = Balance()
    parser.feed(text)
    assert not parser.open
    assert all(source.startswith("data:image/png;base64,") for source in parser.sources)
    assert parser.sources
    assert not re.search(r"https?://|<script|@import|url\(", text)
    assert "&lt;a&gt;" in text
    assert "p &lt;q&gt;" in text
    assert "<title>A &amp; B</title>" in text
    assert "prefers-color-scheme: dark" in text


def test_pictures_are_embedded_unchanged():
    encoded = re.search(r"base64,([^\"]+)", figure(b"\x00\xff png", "c")).group(1)
    assert base64.b64decode(encoded) == b"\x00\xff png"
