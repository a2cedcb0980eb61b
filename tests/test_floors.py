"""The floors: a module imports from its own floor and from those below it, never from above.

The library imports neither `structconv_systems`, nor `benchmarks`, nor `tests`; the systems import no benchmarks and no
tests.

Reads the sources with `ast` and imports nothing, so that an import inside a function counts too. What stands under
`if TYPE_CHECKING:` is for the type checker alone and may look up.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
#: Each package, the folder that holds it, and what it may not import.
PACKAGES = {
    "structconv": (ROOT, {"structconv_systems", "benchmarks", "tests", "systems"}),
    "structconv_systems": (ROOT / "systems", {"benchmarks", "tests", "systems"}),
    "benchmarks": (ROOT, {"tests", "systems"}),
}
TOP = 11
FLOORS = {
    "errors": 0, "arguments": 0, "files": 0, "shapes": 0, "pictures": 0, "torch_compat": 0,
    "written": 0, "public_names": 0, "machine": 0,
    "structures": 1, "primitives": 1, "tensors": 1, "derived": 1,
    "bases": 2, "weights": 2, "data": 2,
    "planning": 3,
    "kernels": 4,
    "ops": 5,
    "mechanisms": 6,
    "nn": 7, "convert": 7,
    "compat": 8, "analysis": 8,
    "testing": 9,
    "commands": TOP, "cli": TOP, "__init__": TOP, "__main__": TOP,
}
SYSTEMS_FLOORS = {
    "optional": 0, "ranking": 0, "pictures": 0, "plots": 0, "timing": 0,
    "models": 8,
    "data": 9, "train": 9, "report": 9,
    "recipes": 10,
    "commands": TOP, "__init__": TOP,
}
CHECKING = {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def sources(*packages: str) -> dict[str, str]:
    """The text of each file of the packages by its dotted name, `__init__` included."""
    return {".".join(path.relative_to(PACKAGES[package][0]).with_suffix("").parts): path.read_text(encoding="utf-8")
            for package in packages or ("structconv", "structconv_systems")
            for path in sorted((PACKAGES[package][0] / package).rglob("*.py"))}


def floor(module: str) -> int | None:
    """The floor of PACKAGE.NAME..., by its first name; the package itself is the top."""
    package, name = [*module.split("."), "__init__"][:2]
    return (SYSTEMS_FLOORS if package == "structconv_systems" else FLOORS).get(name)


parsed = cache(ast.parse)


@cache
def importing(source: str, *, types: bool = False) -> list[ast.AST]:
    """The nodes of a module that may import; without `types` but for those under `if TYPE_CHECKING:`."""
    pending, actual = list(parsed(source).body), []
    while pending:
        node = pending.pop()
        if (isinstance(node, ast.If) and not types and isinstance(node.test, ast.Name | ast.Attribute)
                and ast.unparse(node.test) in CHECKING):
            pending.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call):
            actual.append(node)
        pending.extend(ast.iter_child_nodes(node))
    return actual


def names_of(node: ast.AST, module: str) -> list[str]:
    """What one node of a module's tree imports, by name in a string included."""
    match node:
        case ast.Import(names=names):
            return [alias.name for alias in names]
        case ast.ImportFrom(module=base, names=names, level=level):
            above = module.split(".")[:-level] if level else []
            whole = ".".join([*above, *([base] if base else [])])
            return [f"{whole}.{alias.name}" for alias in names] if whole == module.split(".")[0] else [whole]
        case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
            called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            return [name] if called in ("import_module", "__import__") else []
    return []


def climbs(source: str, module: str) -> list[str]:
    """The imports of a module that lead to a higher floor, one line of text each."""
    own, package = floor(module), module.split(".")[0]
    assert own is not None
    actual = []
    for node in importing(source):
        for name in names_of(node, module):
            # `from structconv import Graph`: what is no module comes from the top
            other = FLOORS["__init__"] if floor(name) is None else floor(name)
            if name.split(".")[0] == package and other > own:
                at = f"{module.replace('.', '/')}.py:{node.lineno}"
                actual.append(f"{at} (floor {own}) imports {name} (floor {other})")
    return actual


def circles(texts: dict[str, str], *, types: bool = False) -> list[str]:
    """The first circle of imports among the modules of one floor, if there is one.

    With `types` among those of one folder, and what stands under `if TYPE_CHECKING:` counts.
    """
    def near(other: str, module: str) -> bool:
        return other.rpartition(".")[0] == module.rpartition(".")[0] if types else floor(other) == floor(module)

    def named(source: str, module: str) -> Iterator[str]:
        for node in importing(source, types=types):
            taken = [f".{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else [""]
            yield from (f"{name}{end}" for name in names_of(node, module) for end in taken)

    leads = {module: {other for name in named(source, module) if (other := home(name, texts)) is not None
                      and other != module and near(other, module)} for module, source in texts.items()}
    try:
        TopologicalSorter(leads).prepare()
    except CycleError as error:
        return [" <- ".join(error.args[1])]
    return []


def home(name: str, texts: dict[str, str]) -> str | None:
    """The module that a dotted name is, or is in."""
    while name:
        for module in (name, f"{name}.__init__"):
            if module in texts:
                return module
        name = name.rpartition(".")[0]
    return None


def report(lines: list[str]) -> str:
    """A failure message, one finding a line."""
    return "\n".join(["", *lines])


def test_every_module_has_a_floor():
    strangers = [module for module in sources() if floor(module) is None]
    assert not strangers, report(strangers)


def test_no_import_climbs():
    actual = [line for module, source in sources().items() if floor(module) is not None
             for line in climbs(source, module)]
    assert not actual, report(actual)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_imports_what_stands_on_it(package):
    _, refused = PACKAGES[package]
    actual = [f"{module} imports {name}" for module, source in sources(package).items()
             for node in importing(source, types=True) for name in names_of(node, module)
             if name.split(".")[0] in refused]
    assert not actual, report(actual)


@pytest.mark.parametrize("types", [False, True], ids=["floor", "folder"])
def test_no_circle_within_a_floor_or_a_folder(types):
    actual = circles(sources(), types=types)
    assert not actual, report(actual)


def test_every_module_says_what_is_public():
    silent = [module for module, source in sources().items() if not module.endswith("__main__") and not any(
        isinstance(node, ast.Assign | ast.AnnAssign) and ast.unparse(node).startswith("__all__")
        for node in parsed(source).body)]
    assert not silent, report(silent)
