"""Layers: `Conv`, and the named layers of the literature as short constructors over it."""

from __future__ import annotations

from structconv.nn.attention import MultiheadAttention, NonLocalBlock
from structconv.nn.buffers import StructureBuffer
from structconv.nn.composition import compose
from structconv.nn.conv import Conv
from structconv.nn.graph_networks import Attributes, GraphNetwork
from structconv.nn.graphs import (
    ChebConv,
    DiffusionConv,
    EdgeConditionedConv,
    GATConv,
    GATv2Conv,
    GCNConv,
    RelationalConv,
)
from structconv.nn.grids import (
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    Conv1d,
    Conv2d,
    Conv3d,
    OnGrid,
    SeparableConv2d,
)
from structconv.nn.images import to_entries, to_image
from structconv.nn.layer import Layer
from structconv.nn.linear import Linear
from structconv.nn.losses import cross_entropy
from structconv.nn.pooling import GraphPool, GroupPool
from structconv.nn.prepared import Prepared
from structconv.nn.recurrent import ConvGRUCell, ConvLSTMCell
from structconv.nn.relative import RelativeValue
from structconv.nn.transposed import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

__all__ = ["Attributes", "AvgPool1d", "AvgPool2d", "AvgPool3d", "ChebConv", "Conv", "Conv1d", "Conv2d", "Conv3d",
           "ConvGRUCell", "ConvLSTMCell", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d", "DiffusionConv",
           "EdgeConditionedConv", "GATConv", "GATv2Conv", "GCNConv", "GraphNetwork", "GraphPool", "GroupPool",
           "Layer", "Linear", "MultiheadAttention", "NonLocalBlock", "OnGrid", "Prepared", "RelationalConv",
           "RelativeValue", "SeparableConv2d", "StructureBuffer", "compose", "cross_entropy", "to_entries", "to_image"]
