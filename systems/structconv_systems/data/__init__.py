"""Readers of the data sets that the recipes learn from; each takes local files and none touches the network."""

__all__ = ()
