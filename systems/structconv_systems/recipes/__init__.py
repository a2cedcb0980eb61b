"""Recipes: a system of the literature, trained on real files, its figure beside the published one."""

__all__ = ()
