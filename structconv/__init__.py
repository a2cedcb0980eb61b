"""One operator, any structure: y = sum_k A_k^T x Theta_k.

These are the most common names; all others are in `structconv.nn`, `.mechanisms`, `.bases`, `.structures`, `.weights`,
`.data`, `.ops` and `.compat`. Names are loaded at their first use, so that `import structconv` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

#: As in pyproject.toml.
__version__ = "0.1.0"

if TYPE_CHECKING:
    from structconv import bases as bases
    from structconv import data as data
    from structconv import errors as errors
    from structconv import mechanisms as mechanisms
    from structconv import nn as nn
    from structconv import ops as ops
    from structconv import structures as structures
    from structconv import tensors as tensors
    from structconv import weights as weights
    from structconv.bases import Basis, Dense, Shift
    from structconv.compat import convert, merge_linear
    from structconv.errors import ConfigError, ShapeError, StructureError
    from structconv.mechanisms import (
        STRUCTURE,
        Additive,
        Adjacency,
        ALiBi,
        BiAffine,
        Chebyshev,
        Cuboid,
        DotProduct,
        Given,
        Identity,
        Incidence,
        Mechanism,
        Pool,
        Powers,
        Relations,
        RelativeBias,
        Rotary,
        Shifts,
        Uniform,
    )
    from structconv.nn import (
        ChebConv,
        Conv,
        Conv1d,
        Conv2d,
        Conv3d,
        ConvGRUCell,
        ConvLSTMCell,
        GATConv,
        GATv2Conv,
        GCNConv,
        MultiheadAttention,
        RelationalConv,
        compose,
    )
    from structconv.ops import conv, plan
    from structconv.primitives.memory import keep_memory
    from structconv.structures import (
        Causal,
        Graph,
        Grid,
        KnowledgeGraph,
        Padding,
        Samples,
        Window,
        batch,
        collate,
        unbatch,
    )
    from structconv.weights import Depthwise, Eye, Full, Grouped, LowRank, Separable, Shared

__all__ = ["STRUCTURE", "ALiBi", "Additive", "Adjacency", "Basis", "BiAffine", "Causal", "ChebConv", "Chebyshev",
           "ConfigError", "Conv", "Conv1d", "Conv2d", "Conv3d", "ConvGRUCell", "ConvLSTMCell", "Cuboid", "Dense",
           "Depthwise", "DotProduct", "Eye", "Full", "GATConv", "GATv2Conv", "GCNConv", "Given", "Graph", "Grid",
           "Grouped", "Identity", "Incidence", "KnowledgeGraph", "LowRank", "Mechanism", "MultiheadAttention",
           "Padding", "Pool", "Powers", "RelationalConv", "Relations", "RelativeBias", "Rotary", "Samples", "Separable",
           "ShapeError", "Shared", "Shift", "Shifts", "StructureError", "Uniform", "Window", "batch", "collate",
           "compose", "conv", "convert", "keep_memory", "merge_linear", "plan", "unbatch"]

#: Modules go by `structconv.nn` and the like: `import *` leaves alone what has the same name, as torch's `nn`.
_MODULES = ("bases", "data", "errors", "mechanisms", "nn", "ops", "structures", "tensors", "weights")
# The first module that has a name gives it: a mechanism before the basis of the same name.
_HOMES = ("errors", "structures", "mechanisms", "weights", "nn", "ops", "bases", "primitives.memory", "compat")


if not TYPE_CHECKING:  # a checker knows the names above, and refuses others
    def __getattr__(name):
        if name in _MODULES:
            return import_module(f"{__name__}.{name}")
        is_module = name[0] == "_" or find_spec(f"{__name__}.{name}") is not None  # `from structconv import cli` asks
        for home in () if is_module else _HOMES:
            module = import_module(f"{__name__}.{home}")
            if name in module.__all__:
                if name in __all__:
                    return getattr(module, name)
                raise AttributeError(f"{name} is a name of {module.__name__}, not of {__name__}", name=name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_near(name)}", name=name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_MODULES})


def _near(name: str) -> str:
    """The public names like one that there is not."""
    from difflib import get_close_matches

    if name.startswith("_"):
        return ""
    lower = {public.lower(): public for public in (*_MODULES, *sorted(__all__, reverse=True))}  # Conv before conv
    result = get_close_matches(name.lower(), lower, n=1, cutoff=0.7)
    return f". Did you mean {lower[result[0]]!r}?" if result else ""
