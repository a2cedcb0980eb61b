"""Layers of PyTorch Geometric 2.8: the same constructors, calls, parameter names and numbers, computed by our operator.

Change the import line of a program, and its layers, its trained weights and PyTorch Geometric's tools work on::

    from structconv.compat.pyg import GATConv, GCNConv

PyTorch Geometric itself need not be installed.
"""

from structconv.compat.pyg.attention import AGNNConv, GATConv, GATv2Conv, TransformerConv
from structconv.compat.pyg.convolutions import GCNConv, GINConv, GraphConv, SAGEConv
from structconv.compat.pyg.layer import Linear

__all__ = ["AGNNConv", "GATConv", "GATv2Conv", "GCNConv", "GINConv", "GraphConv", "Linear", "SAGEConv",
           "TransformerConv"]
