"""Analyze bases and layers: pictures, receptive fields and flops."""

__all__ = ()
