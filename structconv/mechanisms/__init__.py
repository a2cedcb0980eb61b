"""Mechanisms: modules (x, z, structure) -> basis, which a layer binds to its channels."""

from __future__ import annotations

from structconv.mechanisms.context import Context
from structconv.mechanisms.dynamic import Deformable, DynamicShifts
from structconv.mechanisms.edge_network import EdgeNetwork
from structconv.mechanisms.encodings import LearntEncoding, SinusoidalEncoding, sinusoidal
from structconv.mechanisms.expression import Channels, Inputs, Mechanism, Position
from structconv.mechanisms.given import Given, Learnt
from structconv.mechanisms.graphs import Adjacency, Chebyshev, Incidence, Powers, Relation, Relations, Walks
from structconv.mechanisms.grids import Cuboid, GridMechanism, Pool, Shifts
from structconv.mechanisms.index import Identity
from structconv.mechanisms.masks import STRUCTURE, STRUCTURE_IF_GIVEN
from structconv.mechanisms.mixture import Mixture
from structconv.mechanisms.operations import Operation
from structconv.mechanisms.positions import (
    ALiBi,
    ClippedShifts,
    EdgeBias,
    GaussianWindow,
    Location,
    PredictedPosition,
    RelativeBias,
    RelativeKey,
    Term,
)
from structconv.mechanisms.rotary import Rotary
from structconv.mechanisms.scores import (
    Additive,
    BiAffine,
    Channelwise,
    Concatenation,
    DotProduct,
    EmbeddedGaussian,
    Gaussian,
    General,
    Pair,
    Projection,
    Score,
    Uniform,
)

__all__ = [
    "STRUCTURE",
    "STRUCTURE_IF_GIVEN",
    "ALiBi",
    "Additive",
    "Adjacency",
    "BiAffine",
    "Channels",
    "Channelwise",
    "Chebyshev",
    "ClippedShifts",
    "Concatenation",
    "Context",
    "Cuboid",
    "Deformable",
    "DotProduct",
    "DynamicShifts",
    "EdgeBias",
    "EdgeNetwork",
    "EmbeddedGaussian",
    "Gaussian",
    "GaussianWindow",
    "General",
    "Given",
    "GridMechanism",
    "Identity",
    "Incidence",
    "Inputs",
    "Learnt",
    "LearntEncoding",
    "Location",
    "Mechanism",
    "Mixture",
    "Operation",
    "Pair",
    "Pool",
    "Position",
    "Powers",
    "PredictedPosition",
    "Projection",
    "Relation",
    "Relations",
    "RelativeBias",
    "RelativeKey",
    "Rotary",
    "Score",
    "Shifts",
    "SinusoidalEncoding",
    "Term",
    "Uniform",
    "Walks",
    "sinusoidal",
]
