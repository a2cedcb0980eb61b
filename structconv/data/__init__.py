"""Mini-batches of large graphs."""

from structconv.data.induced import (
    ClusterData,
    ClusterLoader,
    GraphSAINTEdgeSampler,
    GraphSAINTNodeSampler,
    GraphSAINTRandomWalkSampler,
    HGTLoader,
    partition,
    random_walk,
)
from structconv.data.loaders import LinkNeighborLoader, NeighborBatch, NeighborLoader
from structconv.data.sources import blocks

__all__ = ["ClusterData", "ClusterLoader", "GraphSAINTEdgeSampler", "GraphSAINTNodeSampler",
           "GraphSAINTRandomWalkSampler", "HGTLoader", "LinkNeighborLoader", "NeighborBatch", "NeighborLoader",
           "blocks", "partition", "random_walk"]
