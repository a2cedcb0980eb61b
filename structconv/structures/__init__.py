"""Structures: which entries there are, and what relates them."""

from __future__ import annotations

import torch

from structconv.structures.batching import (
    AnyStructure,
    GridBatch,
    Structure,
    StructureBatch,
    batch,
    membership,
    unbatch,
)
from structconv.structures.collating import collate
from structconv.structures.graph import Graph
from structconv.structures.grid import Grid
from structconv.structures.places import At, Places
from structconv.structures.relations import KnowledgeGraph
from structconv.structures.samples import EachWithin, Samples, Within
from structconv.structures.supports import (
    And,
    Blocks,
    Causal,
    DenseMask,
    EdgeSupport,
    Global,
    Not,
    Or,
    Padding,
    Support,
    Transposed,
    Window,
)

__all__ = ["AnyStructure", "Blocks", "Causal", "DenseMask", "EdgeSupport", "Global", "Graph", "Grid", "GridBatch",
           "KnowledgeGraph", "Padding", "Samples", "Structure", "StructureBatch", "Support", "Window", "batch",
           "collate", "membership", "unbatch"]

# What `torch.load(weights_only=True)` may make: values of tensors, numbers and names, which run no code.
torch.serialization.add_safe_globals([And, At, Blocks, Causal, DenseMask, EdgeSupport, Global, Graph, Grid,
                                      GridBatch, KnowledgeGraph, Not, Or, Padding, Places, Samples, StructureBatch,
                                      Transposed, Within, EachWithin, Window])
