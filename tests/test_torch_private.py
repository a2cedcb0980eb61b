"""Private names of torch stand in one module, and the package does without any of them."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import structconv
from structconv import torch_compat

PATHS = list(torch_compat.NAMES)


def test_numbers_are_the_same_without_a_name(monkeypatch):
    """Without all names; with STRUCTCONV_EVERY_TEST=1 also without each half of them, and without each alone."""
    each = [",".join(PATHS[::2]), ",".join(PATHS[1::2]), *PATHS] if os.environ.get("STRUCTCONV_EVERY_TEST") else []
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = subprocess.run([sys.executable, "-m", "tests.private_names", ",".join(PATHS), *each],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def private_names(source):
    """Lines that use a private name of torch: imported, or an attribute of what was imported."""
    tree, imported = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                imported[alias.asname or alias.name.split(".")[0]] = alias.name if alias.asname else (
                    alias.name.split(".")[0])
                if hidden(alias.name):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                name = imported[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if hidden(name):
                    yield node.lineno, name
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            base, _, rest = ast.unparse(node).partition(".")
            name = f"{imported.get(base, '')}.{rest}"
            if hidden(name):
                yield node.lineno, name


def hidden(name):
    first, *parts = name.split(".")
    return first == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts)


def test_private_names_of_torch_stand_in_one_module():
    """But for the suite's own checks, which put tensors of every kind before a layer."""
    root = Path(structconv.__file__).parent
    actual = [f"{path.relative_to(root)}:{line} {name}" for path in sorted(root.rglob("*.py"))
             if path.name != "torch_compat.py" and "testing" not in path.parts
             for line, name in private_names(path.read_text())]
    assert not actual, "\n".join(actual)
