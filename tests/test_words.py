"""The prose of the pages has none of the retired words. Code and names of the API are exempt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
#: Folders that are left out: these pages are written anew together with the systems, and one is the output of a script.
OTHER = ("_build", "relational", "results")
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md") if not {*OTHER} & {*page.parts})
#: Words, and the reason or what to write.
WORDS = {
    "told": "write `given`, `passed`, or the name of the argument",
    "seen|sees|sight": "layers do not see: `reads`, `visible`",
    "looks?(?! (?:it )?up\\b)": "layers do not look: `attends to`, `reads`",
    "(?<!you )knows?": "layers do not know: `stores`, `has`",
    "hides": "`masks`, `removes`",
    "places": "`positions`",
    "apart": "`distinct`, `separately`, `except`",
    "behind|in front of": "`after`, `before`",
    "heeds?|unasked|at hand|nowhere": "plain words",
    "learnt|grey|modelling|labelled|cancelled|licence|towards|whilst": "American spelling",
    r"(?:neighb|behavi|col|fav|hon|lab)our\w*": "American spelling: -or",
    "cent(?:re|red|res|ring)|metre": "American spelling: -er",
    "(?:un|re)?(?:normal|optim|initial|factor|organ|general|regular|recogn|minim|maxim|parametr|serial|synchron|summar|real"
    "|special|vector|token|discret|quant|central|equal|util|categor)is(?:e|es|ed|er|ers|ing|ation|ations)":
        "American spelling: -ize",
}
#: The first words of a sentence, a row, a cell or an item: name the thing.
OPENINGS = r"What\b[^.!?|]*\b(?:is|are|has|have|does|do|can)\b[^.!?|]*[.|:]|Whether\b|Th(?:at|ose) of\b|The same\b"
PATTERNS = {re.compile(rf"(?i)(?<![\w-])(?:{words})(?![\w-])"): reason for words, reason in WORDS.items()}
PATTERNS[re.compile(rf"(?m)(?:(?<=[.!?:] )|(?<=\| )|^|(?<=- ))(?:{OPENINGS})")] = "name the thing"


def prose(text: str) -> str:
    """The text without code, formulas, addresses of links and anchors; lines keep their numbers."""
    def emptied(match: re.Match[str]) -> str:
        return "\n" * match[0].count("\n")

    for code in (r"(?ms)^(`{3,}|:{3,}).*?^\1`*$", r"(?m)(?<=\n\n)(?: {4}.*\n)+", r"(?s)\$\$.+?\$\$", r"`[^`]+`",
                 r"(?<=\])\([^)]+\)", r"<?https?://[^\s)>]+", r"(?m)^\([\w-]+\)=$"):
        text = re.sub(code, emptied, text)
    return text


def retired(text: str) -> list[str]:
    """Each retired word with its line and what to write."""
    plain = prose(text)
    return [f"line {plain.count(chr(10), 0, match.start()) + 1}: {match[0].strip()!r}: {reason}"
            for pattern, reason in PATTERNS.items() for match in pattern.finditer(plain)]


@pytest.mark.parametrize("page", PAGES)
def test_pages_have_no_retired_word(page: str) -> None:
    found = retired((DOCS / page).read_text(encoding="utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("text, count", [
    ("The layer looks at its neighbours.", 2), ("What the layer has is a basis.", 1), ("Look it up.", 0),
    ("Do you know it?", 0), ("`neighbours`, `learnt`\n\n    told places\n\n```\nseen\n```\n[it](behind.md)", 0)])
def test_the_list_finds_what_it_names(text: str, count: int) -> None:
    assert len(retired(text)) == count
