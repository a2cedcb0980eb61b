"""How many functions of the library a call runs: a cost that no load of the machine changes."""

import os
import sys
from collections.abc import Callable
from typing import Any

import structconv


def own_calls(run: Callable[[], Any]) -> int:
    """How many functions of the library a call runs."""
    folder, met = os.path.dirname(structconv.__file__), []  # type: str, list[Any]

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            met.append(frame.f_code)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(met)
