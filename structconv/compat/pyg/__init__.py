"""Layers of PyTorch Geometric 2.8: the same constructors, calls, parameter names and numbers, computed by our operator.

Change the import line of a program, and its layers, its trained weights and PyTorch Geometric's tools work on::

    from structconv.compat.pyg import GATConv, GCNConv

PyTorch Geometric itself need not be installed. If it is, its other names are found here too, unchanged.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from structconv.compat.pyg.aggregations import (
    MaxAggregation,
    MeanAggregation,
    MinAggregation,
    MultiAggregation,
    PowerMeanAggregation,
    SoftmaxAggregation,
    StdAggregation,
    SumAggregation,
    VarAggregation,
)
from structconv.compat.pyg.attention import AGNNConv, GATConv, GATv2Conv, TransformerConv
from structconv.compat.pyg.convolutions import ARMAConv, ClusterGCNConv, GCNConv, GINConv, GraphConv, SAGEConv
from structconv.compat.pyg.heterogeneous import HGTConv
from structconv.compat.pyg.linear import Linear
from structconv.compat.pyg.mixtures import FAConv, FeaStConv, GMMConv
from structconv.compat.pyg.norms import (
    DiffGroupNorm,
    GraphNorm,
    GraphSizeNorm,
    InstanceNorm,
    LayerNorm,
    MeanSubtractionNorm,
    MessageNorm,
    PairNorm,
)
from structconv.compat.pyg.patching import Patch, patch, unpatch
from structconv.compat.pyg.polynomials import APPNP, ChebConv, MixHopConv, SGConv, SSGConv, TAGConv
from structconv.compat.pyg.pooling import JumpingKnowledge, global_add_pool, global_max_pool, global_mean_pool
from structconv.compat.pyg.relational import GINEConv, NNConv, RGCNConv

__all__ = ["APPNP", "AGNNConv", "ARMAConv", "ChebConv", "ClusterGCNConv", "DiffGroupNorm", "FAConv", "FeaStConv",
           "GATConv", "GATv2Conv", "GCNConv", "GINConv", "GINEConv", "GMMConv", "GraphConv", "GraphNorm",
           "GraphSizeNorm", "HGTConv", "InstanceNorm", "JumpingKnowledge", "LayerNorm", "Linear", "MaxAggregation",
           "MeanAggregation", "MeanSubtractionNorm", "MessageNorm", "MinAggregation", "MixHopConv", "MultiAggregation",
           "NNConv", "PairNorm", "Patch", "PowerMeanAggregation", "RGCNConv", "SAGEConv", "SGConv", "SSGConv",
           "SoftmaxAggregation", "StdAggregation", "SumAggregation", "TAGConv", "TransformerConv", "VarAggregation",
           "global_add_pool", "global_max_pool", "global_mean_pool", "patch", "unpatch"]


def __getattr__(name: str) -> Any:
    """Return PyTorch Geometric's own of a name that we do not compute, such as `MLP` or `HeteroConv`."""
    if not name.startswith("_"):
        if find_spec("torch_geometric") is None:
            raise AttributeError(f"structconv.compat.pyg computes no {name}, and torch_geometric is not installed")
        theirs = import_module("torch_geometric.nn")
        if hasattr(theirs, name):
            return getattr(theirs, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
