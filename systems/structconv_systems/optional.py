"""Optional libraries, used if they are installed."""

import importlib
from typing import Any

from structconv.errors import ConfigError

__all__ = ["require"]


def require(module: str, owner: str, extra: str = "") -> Any:
    """Import a module of a requirement, or raise `ConfigError` with the command that installs it.

    Args:
        module: its dotted name. owner: who needs it. extra: the extra of structconv-systems that installs it, if it is
            in one.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        target = f"structconv-systems[{extra}]" if extra else "structconv-systems"
        raise ConfigError(owner, f"{package} must be installed", str(error),
                          f"Install it with: pip install '{target}'.") from error
