"""Mechanisms: modules (x, z, structure) -> basis, which a layer binds to its channels."""

from __future__ import annotations

from structconv.mechanisms.encodings import LearntEncoding, Rotary, SinusoidalEncoding, sinusoidal
from structconv.mechanisms.expression import STRUCTURE, Channels, Mechanism, Operation, Position, Setting
from structconv.mechanisms.graphs import Adjacency, Chebyshev, Incidence, Powers, Relation, Relations, Walks
from structconv.mechanisms.grids import Cuboid, GridMechanism, Pool, Shifts
from structconv.mechanisms.index import Identity
from structconv.mechanisms.positions import (
    ALiBi,
    ClippedShifts,
    EdgeBias,
    GaussianWindow,
    PredictedPosition,
    RelativeBias,
    RelativeKey,
    Term,
)
from structconv.mechanisms.scores import (
    Additive,
    BiAffine,
    Concatenation,
    Context,
    DotProduct,
    EmbeddedGaussian,
    Gaussian,
    General,
    Location,
    Pair,
    Projection,
    Score,
    Uniform,
)

__all__ = [
    "STRUCTURE",
    "ALiBi",
    "Additive",
    "Adjacency",
    "BiAffine",
    "Channels",
    "Chebyshev",
    "ClippedShifts",
    "Concatenation",
    "Context",
    "Cuboid",
    "DotProduct",
    "EdgeBias",
    "EmbeddedGaussian",
    "Gaussian",
    "GaussianWindow",
    "General",
    "GridMechanism",
    "Identity",
    "Incidence",
    "LearntEncoding",
    "Location",
    "Mechanism",
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
    "Setting",
    "Shifts",
    "SinusoidalEncoding",
    "Term",
    "Uniform",
    "Walks",
    "sinusoidal",
]
