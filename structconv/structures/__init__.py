"""Structures: which entries there are, and what relates them."""

from __future__ import annotations

from structconv.structures.batching import GridBatch, Structure, batch, membership, unbatch
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid
from structconv.structures.relations import KnowledgeGraph
from structconv.structures.samples import Samples
from structconv.structures.supports import Blocks, Causal, DenseMask, EdgeSupport, Padding, Support, Window

__all__ = ["Blocks", "Causal", "DenseMask", "EdgeSupport", "Graph", "Grid", "GridBatch", "KnowledgeGraph", "Padding",
           "Samples", "Structure", "Support", "Window", "batch", "membership", "unbatch"]
