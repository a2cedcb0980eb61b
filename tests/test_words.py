"""Pages, docstrings of public names, and names have none of the retired words. Code in pages is exempt."""

import argparse
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import structconv
from structconv import bases, errors, mechanisms, nn, ops, structures, testing, weights
from structconv.cli import _parser
from structconv.compat import pyg, transformers
from structconv.compat import torch as compat_torch
from structconv.primitives import memory

DOCS = Path(__file__).parents[1] / "docs"
#: Folders that are left out: built pages, tables written by tools, and notebooks, which are tested below.
OTHER = ("_build", "results", "notebooks")
PAGES = sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")
               if not {*OTHER} & {*page.relative_to(DOCS).parts})
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
    "heeds?|unasked|at hand|nowhere|anew|whatever": "plain words",
    "alone": "`only`, `by itself`",
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
#: Words that are no part of a public name, nor of an option.
RETIRED_NAMES = {"told", "seen", "sees", "sight", "places", "made", "found", "kept", "taken", "wanted", "hides",
                 "heeds", "alone", "apart", "behind", "leaves", "sealed", "twin", "learnt", "colour", "neighbours",
                 "given", "asked", "anew", "token", "joint", "roles", "scenes", "memo", "slots"}
#: The name of a mechanism in the documentation, and the flag named after it.
EXEMPT = {"Given", "STRUCTURE_IF_GIVEN"}
HOMES = (structconv, bases, errors, mechanisms, nn, ops, structures, testing, weights, memory, pyg, compat_torch,
         transformers)


def public() -> Iterator[tuple[str, Any]]:
    """Public names with what they name, and public attributes of classes."""
    for home in HOMES:
        for name in home.__all__:
            held = getattr(home, name)
            yield f"{home.__name__}.{name}", held
            if isinstance(held, type):
                yield from ((f"{home.__name__}.{name}.{attribute}", value) for attribute, value in vars(held).items()
                            if not attribute.startswith("_"))


PUBLIC = dict(public())


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


@pytest.mark.parametrize("path", sorted((DOCS.parent / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_have_no_retired_word(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert not retired("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"))


def test_docstrings_have_no_retired_word() -> None:
    found = {}
    for name, held in PUBLIC.items():
        documented = isinstance(held, type | property | classmethod | staticmethod) or callable(held)
        text = re.sub(r"(?m)^ *(?:>>>|\.\.\.).*$", "", (documented and inspect.getdoc(held)) or "")
        if hits := [f"{match[0]!r}: {reason}" for pattern, reason in PATTERNS.items()
                    for match in pattern.finditer(prose(text))]:
            found[name] = hits
    assert not found


def test_names_and_options_have_no_retired_word() -> None:
    def parts(name: str) -> set[str]:
        return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name.rpartition(".")[2])}

    names = set(PUBLIC)
    for name, held in PUBLIC.items():
        if inspect.isclass(held) or inspect.isroutine(held):
            try:
                names |= {f"{name}.{option}" for option in inspect.signature(held).parameters}
            except (TypeError, ValueError):           # of a class written in C, of a descriptor
                continue
    names = {name for name in names if name.rpartition(".")[2] not in EXEMPT}
    assert not {name for name in names if parts(name) & RETIRED_NAMES}


def options() -> Iterator[tuple[str, str]]:
    """The options of all commands and recipes, with the text that `--help` prints."""
    parsers = [_parser()]
    while parsers:
        for action in parsers.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += {id(each): each for each in action.choices.values()}.values()
                yield from ((each.dest, each.help or "") for each in action._choices_actions)
            else:
                yield action.dest.removeprefix("key_"), action.help or ""


def test_options_have_no_retired_word_and_their_texts_name_the_thing() -> None:
    pairs = {*options()}
    assert not {name for name, _ in pairs if {*name.split("_")} & RETIRED_NAMES}
    unnamed = re.compile("(?:of|in|at|that|by|when|where|which)\\b")
    assert not {text for _, text in pairs if retired(text) or unnamed.match(text)}
