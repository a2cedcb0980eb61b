"""Self-contained reports on runs."""

__all__ = ()
