"""Wrong calls and their errors, as data."""

from collections.abc import Callable
from typing import Any

import pytest


def check_refused(*cases: tuple[type[Exception], str, Callable[[], Any]]) -> None:
    """Raise unless each call raises its error, whose message is one line that has this pattern."""
    for error, message, call in cases:
        with pytest.raises(error, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)
