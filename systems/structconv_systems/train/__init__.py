"""Recipes, their runs and the loop that trains them; importing this package does not import torch."""

__all__ = ()
