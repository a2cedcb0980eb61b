"""Models over the layers, one file a system."""

__all__ = ()
