"""Tensor numerics, some of them registered torch operators, without bases or structures."""

__all__ = ()
