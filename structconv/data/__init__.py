"""Mini-batches of large graphs."""

from structconv.data.loaders import LinkNeighborLoader, NeighborBatch, NeighborLoader

__all__ = ["LinkNeighborLoader", "NeighborBatch", "NeighborLoader"]
