"""Looking at bases and layers: pictures and receptive fields."""

__all__ = ()
