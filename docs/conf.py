"""Sphinx configuration: MyST pages, furo theme, examples that run (`make docs`)."""

from __future__ import annotations

import doctest
import sys
from importlib import metadata
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "_ext"), str(Path(__file__).parent)]

project = "structconv"
author = "The structconv contributors"
project_copyright = "The structconv contributors, Apache-2.0"
release = version = metadata.version("structconv")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "plain_docstrings",
    "gallery",
    "notebooks",
    "mathml",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_ext"]
default_role = "code"
suppress_warnings = ["ref.python"]  # a name documented in its module and in its package is two targets

html_theme = "furo"
html_math_renderer = "mathml"  # docs/_ext/mathml.py: no script from the network
html_title = f"structconv {release}"

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

add_module_names = False  # a page says from where its names are imported
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False  # what an override does is said where it is declared: once, in the base class
napoleon_numpy_docstring = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Messages of errors are part of the examples, so they are compared, too.
doctest_default_flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# An example in a page is a ```{doctest} block; each page starts from the same seed. Examples of docstrings, which are
# not part of the story of the page that shows them, run by themselves in tests/test_examples.py.
doctest_test_doctest_blocks = ""
doctest_global_setup = """
import torch

torch.manual_seed(0)
"""
