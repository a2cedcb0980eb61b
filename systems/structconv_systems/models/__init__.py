"""Models over the layers, one file for each system."""

__all__ = ()
