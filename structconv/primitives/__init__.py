"""Plain tensor numerics, some of them registered torch operators; nothing here knows of bases or structures."""

__all__ = ()
