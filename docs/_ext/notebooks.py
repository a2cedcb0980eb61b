"""The notebooks of `notebooks/` as pages: executed by nbclient, and written to `docs/notebooks/` as MyST.

The HTML builder executes them. Other builders write pages without outputs where there are none yet.
"""

from __future__ import annotations

import base64
import importlib.util
import logging
import os
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "notebooks"


def missing(notebook: Any) -> str:
    """What the notebook needs and this machine lacks, or nothing."""
    needs = notebook.metadata.get("structconv", {})
    if "module" in needs and importlib.util.find_spec(needs["module"]) is None:
        return f"the package {needs['module']}"
    if "data" in needs and not Path(os.environ.get("STRUCTCONV_DATA", ""), needs["data"]).exists():
        return f"the file {needs['data']} in the folder STRUCTCONV_DATA"
    return ""


def executed(path: Path) -> tuple[Any, str]:
    """The notebook with its outputs, and what it lacks to be executed."""
    notebook = nbformat.read(path, as_version=4)
    lacks = missing(notebook)
    if not lacks:
        logger = logging.getLogger("nbclient")
        logger.setLevel(logging.WARNING)
        client = NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(ROOT)}},
                                log=logger, extra_arguments=["--IPKernelApp.log_level=40"])
        client.execute(env=os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    return notebook, lacks


def page(notebook: Any, name: str, note: str) -> str:
    """The notebook as a page; its pictures are written beside it."""
    parts: list[str] = []
    for number, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for place, output in enumerate(cell.get("outputs", ())):
            data = output.get("data", {})
            if "image/png" in data:
                picture = PAGES / f"{name}-{number}-{place}.png"
                picture.write_bytes(base64.b64decode(data["image/png"]))
                parts.append(f"![What the cell above draws]({picture.name})")
            elif text := (output.get("text") or data.get("text/plain", "")).rstrip():
                parts.append(f"```text\n{text}\n```")
    parts.insert(1, note)
    return "\n\n".join(parts) + "\n"


def write_pages(app: Any) -> None:
    """Write a page for each notebook, and remove pages of those that are gone."""
    PAGES.mkdir(exist_ok=True)
    names = {path.stem: path for path in sorted((ROOT / "notebooks").glob("*.ipynb"))}
    for old in PAGES.iterdir():
        if app.builder.name == "html" or (old.suffix == ".md" and old.stem not in names):
            old.unlink()
    for name, path in names.items():
        target, note = PAGES / f"{name}.md", f"This page is the notebook `notebooks/{path.name}`."
        if target.exists():
            continue
        if app.builder.name == "html":
            notebook, lacks = executed(path)
            note += f" It has no outputs here: the build lacked {lacks}." if lacks else ""
        else:
            notebook = nbformat.read(path, as_version=4)
        target.write_text(page(notebook, name, note), encoding="utf-8")


def setup(app: Any) -> dict[str, Any]:
    """Write the pages before Sphinx reads the folder."""
    app.connect("builder-inited", write_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
