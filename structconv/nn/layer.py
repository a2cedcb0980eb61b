"""`Layer`: a module that keeps what it was made with."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from structconv.errors import ConfigError

__all__ = ["Layer"]


class Layer(nn.Module):
    """A module whose arguments can be read; those that no call reads again cannot be assigned."""

    #: Attributes that say how the layer was made.
    fixed: ClassVar[frozenset[str]] = frozenset()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.fixed and name in self.__dict__:
            raise ConfigError(type(self).__name__, f"{name} is fixed once the layer is made", repr(value),
                              "Make a new layer.")
        super().__setattr__(name, value)
