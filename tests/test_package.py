"""The package's public names: all there, loaded when asked for, the same objects as in their modules."""

import subprocess
import sys
from importlib import import_module

import pytest

import structconv


def test_importing_it_does_not_import_torch():
    code = "import sys, structconv; structconv.ShapeError; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_importing_the_layers_of_others_does_not_import_the_compiler():
    code = ("import sys, structconv, structconv.compat.torch\nstructconv.convert\n"
            "sys.exit('torch._dynamo' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


MODULES = ("bases", "data", "errors", "mechanisms", "nn", "ops", "structures", "tensors", "weights")


@pytest.mark.parametrize("name", [*structconv.__all__, *MODULES])
def test_every_public_name_is_there(name):
    assert getattr(structconv, name) is not None
    assert name in dir(structconv)


def test_a_name_of_a_package_is_told():
    with pytest.raises(AttributeError, match=r"^Walks is a name of structconv.mechanisms, not of structconv$"):
        _ = structconv.Walks
    assert structconv.mechanisms.Walks is not None


def test_a_star_import_binds_them_all():
    names: dict[str, object] = {}
    exec("from torch import nn; from structconv import *", names)
    assert set(structconv.__all__) <= set(names) and len(structconv.__all__) <= 60
    assert names["nn"].__name__ == "torch.nn"
    assert not set(MODULES) & set(structconv.__all__)


@pytest.mark.parametrize("home", ["errors", "structures", "mechanisms", "weights", "nn", "ops", "bases"])
def test_modules_spell_out_their_names(home):
    module = import_module(f"structconv.{home}")
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)
    names: dict[str, object] = {}
    exec(f"from structconv.{home} import *", names)
    assert names.keys() - {"__builtins__"} == set(module.__all__)


def test_names_are_sought_as_they_are_declared():
    """The type checker reads the same names as are loaded."""
    import ast
    from pathlib import Path

    tree = ast.parse(Path(structconv.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    declared = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom)
                for alias in node.names}
    assert set(declared) == {*structconv.__all__, *MODULES}
    for name, module in declared.items():
        source = import_module(module)
        assert getattr(source, name) is getattr(structconv, name)


@pytest.mark.parametrize(("wrong", "right"), [("MultiHeadAttention", "MultiheadAttention"), ("Graphs", "Graph"),
                                              ("GcnConv", "GCNConv"), ("conv2d", "Conv2d"), ("window", "Window")])
def test_a_name_near_one_is_told(wrong, right):
    with pytest.raises(AttributeError, match=f"Did you mean '{right}'?"):
        getattr(structconv, wrong)


def test_the_version_is_the_projects():
    import tomllib
    from pathlib import Path

    root = Path(structconv.__file__).parents[1]
    library, systems = (tomllib.loads((root / name).read_text(encoding="utf-8"))["project"]
                        for name in ("pyproject.toml", "systems/pyproject.toml"))
    assert structconv.__version__ == library["version"] == systems["version"]
    assert f"structconv=={structconv.__version__}" in systems["dependencies"]
    for command in (["-m", "structconv", "--version"], ["-m", "structconv.cli", "--version"]):
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, f"structconv {structconv.__version__}\n")
