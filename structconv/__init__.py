"""One operator, any structure: y = sum_k A_k^T x Theta_k.

The public names below are loaded when they are first asked for, so that `import structconv` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

#: As in pyproject.toml.
__version__ = "0.1.0"

if TYPE_CHECKING:
    from structconv import bases as bases
    from structconv import errors as errors
    from structconv import mechanisms as mechanisms
    from structconv import nn as nn
    from structconv import ops as ops
    from structconv import structures as structures
    from structconv import tensors as tensors
    from structconv import weights as weights
    from structconv.bases import (
        Basis,
        Dense,
        Polynomial,
        Shift,
        Sparse,
        TopK,
        cuboid_offsets,
        fourier_basis,
        haar_basis,
        register_normalisation,
    )
    from structconv.errors import ConfigError, DataError, ShapeError, StructureError
    from structconv.mechanisms import (
        STRUCTURE,
        STRUCTURE_IF_GIVEN,
        Additive,
        Adjacency,
        ALiBi,
        BiAffine,
        Channelwise,
        Chebyshev,
        Concatenation,
        Context,
        Cuboid,
        Deformable,
        DotProduct,
        DynamicShifts,
        EdgeBias,
        EdgeNetwork,
        EmbeddedGaussian,
        Gaussian,
        GaussianWindow,
        General,
        Given,
        Identity,
        Incidence,
        Learnt,
        LearntEncoding,
        Location,
        Mechanism,
        Pair,
        Pool,
        Powers,
        PredictedPosition,
        Relation,
        Relations,
        RelativeBias,
        RelativeKey,
        Rotary,
        Shifts,
        SinusoidalEncoding,
        Uniform,
        Walks,
    )
    from structconv.nn import (
        ChebConv,
        Conv,
        Conv1d,
        Conv2d,
        Conv3d,
        ConvGRUCell,
        ConvLSTMCell,
        DiffusionConv,
        EdgeConditionedConv,
        GATConv,
        GATv2Conv,
        GCNConv,
        MultiheadAttention,
        NonLocalBlock,
        Prepared,
        RelationalConv,
        RelativeValue,
        SeparableConv2d,
        compose,
    )
    from structconv.ops import conv, decompose, factorise, plan
    from structconv.primitives.memory import keep_memory, kept_memory, release_memory
    from structconv.structures import (
        Blocks,
        Causal,
        DenseMask,
        Global,
        Graph,
        Grid,
        KnowledgeGraph,
        Padding,
        Samples,
        Support,
        Window,
        batch,
        collate,
        unbatch,
    )
    from structconv.weights import (
        Depthwise,
        DepthwiseSeparable,
        Eye,
        EyeBlocks,
        Full,
        Grouped,
        HeadBlocks,
        LowRank,
        Separable,
        Shared,
        Weight,
    )

__all__ = [
    "STRUCTURE",
    "STRUCTURE_IF_GIVEN",
    "ALiBi",
    "Additive",
    "Adjacency",
    "Basis",
    "BiAffine",
    "Blocks",
    "Causal",
    "Channelwise",
    "ChebConv",
    "Chebyshev",
    "Concatenation",
    "ConfigError",
    "Context",
    "Conv",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvGRUCell",
    "ConvLSTMCell",
    "Cuboid",
    "DataError",
    "Deformable",
    "Dense",
    "DenseMask",
    "Depthwise",
    "DepthwiseSeparable",
    "DiffusionConv",
    "DotProduct",
    "DynamicShifts",
    "EdgeBias",
    "EdgeConditionedConv",
    "EdgeNetwork",
    "EmbeddedGaussian",
    "Eye",
    "EyeBlocks",
    "Full",
    "GATConv",
    "GATv2Conv",
    "GCNConv",
    "Gaussian",
    "GaussianWindow",
    "General",
    "Given",
    "Global",
    "Graph",
    "Grid",
    "Grouped",
    "HeadBlocks",
    "Identity",
    "Incidence",
    "KnowledgeGraph",
    "Learnt",
    "LearntEncoding",
    "Location",
    "LowRank",
    "Mechanism",
    "MultiheadAttention",
    "NonLocalBlock",
    "Padding",
    "Pair",
    "Polynomial",
    "Pool",
    "Powers",
    "PredictedPosition",
    "Prepared",
    "Relation",
    "RelationalConv",
    "Relations",
    "RelativeBias",
    "RelativeKey",
    "RelativeValue",
    "Rotary",
    "Samples",
    "Separable",
    "SeparableConv2d",
    "ShapeError",
    "Shared",
    "Shift",
    "Shifts",
    "SinusoidalEncoding",
    "Sparse",
    "StructureError",
    "Support",
    "TopK",
    "Uniform",
    "Walks",
    "Weight",
    "Window",
    "batch",
    "collate",
    "compose",
    "conv",
    "cuboid_offsets",
    "decompose",
    "factorise",
    "fourier_basis",
    "haar_basis",
    "keep_memory",
    "kept_memory",
    "plan",
    "register_normalisation",
    "release_memory",
    "unbatch",
]

#: Modules go by `structconv.nn` and the like: `import *` leaves alone what has the same name, as torch's `nn`.
_MODULES = ("bases", "errors", "mechanisms", "nn", "ops", "structures", "tensors", "weights")
# The first module that has a name gives it: a mechanism before the basis of the same name.
_HOMES = ("errors", "structures", "mechanisms", "weights", "nn", "ops", "bases", "primitives.memory")


if not TYPE_CHECKING:  # a checker knows the names above, and refuses others
    def __getattr__(name):
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        if name in __all__:
            for home in _HOMES:
                module = import_module(f"{__name__}.{home}")
                if name in module.__all__:
                    return getattr(module, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_near(name)}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _near(name: str) -> str:
    """The public names like one that there is not."""
    from difflib import get_close_matches

    if name.startswith("_"):
        return ""
    lower = {public.lower(): public for public in (*_MODULES, *sorted(__all__, reverse=True))}  # Conv before conv
    found = get_close_matches(name.lower(), lower, n=1, cutoff=0.7)
    return f". Did you mean {lower[found[0]]!r}?" if found else ""
