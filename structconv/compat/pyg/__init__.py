"""Layers of PyTorch Geometric 2.8: the same constructors, calls, parameter names and numbers, computed by our operator.

Change the import line of a program, and its layers, its trained weights and PyTorch Geometric's tools work on::

    from structconv.compat.pyg import GATConv, GCNConv

PyTorch Geometric itself need not be installed.
"""

from structconv.compat.pyg.attention import AGNNConv, GATConv, GATv2Conv, TransformerConv
from structconv.compat.pyg.convolutions import GCNConv, GINConv, GraphConv, SAGEConv
from structconv.compat.pyg.layer import Linear
from structconv.compat.pyg.patching import Patch, patch, unpatch
from structconv.compat.pyg.polynomials import APPNP, ChebConv, MixHopConv, SGConv, SSGConv, TAGConv
from structconv.compat.pyg.pooling import JumpingKnowledge, global_add_pool, global_max_pool, global_mean_pool
from structconv.compat.pyg.relational import GINEConv, NNConv, RGCNConv

__all__ = ["APPNP", "AGNNConv", "ChebConv", "GATConv", "GATv2Conv", "GCNConv", "GINConv", "GINEConv", "GraphConv",
           "JumpingKnowledge", "Linear", "MixHopConv", "NNConv", "Patch", "RGCNConv", "SAGEConv", "SGConv", "SSGConv",
           "TAGConv", "TransformerConv", "global_add_pool", "global_max_pool", "global_mean_pool",
           "patch", "unpatch"]
