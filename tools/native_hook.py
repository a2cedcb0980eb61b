"""Build hook: compiles the native kernels into the wheel where a compiler and torch are found.

Without them the wheel is made all the same, and the kernels are built at first use.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeHook(BuildHookInterface):
    """One shared object, bound to a platform and to torch from 2.10 on, but to no version of Python.

    A wheel has all instruction sets, an editable installation that of this processor: it takes a third of the time.
    """

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        native = _load(Path(self.root) / "structconv" / "primitives" / "native" / "build.py")
        target = native.installed()
        for stale in (*target.parent.glob("core-*.so"), *target.parent.glob("core-*.sha256")):
            if stale.stem != target.stem:
                stale.unlink()
        try:
            if version == "editable":
                native.build_own()
            elif not native.is_sound(target):
                native.build(target, native.levels())
        except (native.BuildError, OSError) as error:
            self.app.display_warning(f"the native kernels will be built at first use: {error}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"
        for made in (target, target.with_suffix(".sha256")):
            build_data["artifacts"].append(f"/{made.relative_to(self.root)}")


def _load(path: Path) -> Any:
    """The build file alone: the package needs torch, which may not be here."""
    spec = importlib.util.spec_from_file_location("native_build", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
