"""Bases: lazy (..., K, M, N) tensors that know how to be applied, and the algebra over them."""

from __future__ import annotations

from structconv.bases import algebra as _algebra  # noqa: F401 - registers the operators: every basis has them
from structconv.bases.base import Algebra, Basis, operator, value
from structconv.bases.cuboid import CuboidSpec, cuboid_offsets
from structconv.bases.dense import Dense, Identity
from structconv.bases.entrywise import Dropped, LeakyReLU, Mapped, Masked, Normalised, Outer, Product, Sum
from structconv.bases.linear import Composed, Concat, LinearSum, Repeated, Scaled, Transposed
from structconv.bases.matrices import adjacency, random_walk, scaled_laplacian
from structconv.bases.mixing import Mixed
from structconv.bases.mixture import Mixture
from structconv.bases.normalisations import (
    LogSoftmax,
    NormalisedBy,
    SinkSoftmax,
    TopK,
    register_normalisation,
)
from structconv.bases.pairs import Block, Edges, Pairs
from structconv.bases.pairwise import Pairwise, weights_at
from structconv.bases.polynomial import Polynomial
from structconv.bases.pooling import Pooling
from structconv.bases.positions import ClippedShifts, Distance, GaussianBump, GridLookup, Lookup
from structconv.bases.scores import (
    Additive,
    Affine,
    Bilinear,
    EdgeScore,
    PairFunction,
    Score,
    Uniform,
)
from structconv.bases.shift import Shift, ShiftTransposed
from structconv.bases.sparse import Sparse
from structconv.bases.taps import Taps
from structconv.bases.transforms import fourier_basis, haar_basis
from structconv.bases.typed import Typed

__all__ = ["Additive", "Affine", "Algebra", "Basis", "Bilinear", "Block", "ClippedShifts", "Composed", "Concat",
           "CuboidSpec", "Dense", "Distance", "Dropped", "EdgeScore", "Edges", "GaussianBump", "GridLookup", "Identity",
           "LeakyReLU", "LinearSum", "LogSoftmax", "Lookup", "Mapped", "Masked", "Mixed", "Mixture", "Normalised",
           "NormalisedBy", "Outer", "PairFunction", "Pairs", "Pairwise", "Polynomial", "Pooling", "Product", "Repeated",
           "Scaled", "Score", "Shift", "ShiftTransposed", "SinkSoftmax", "Sparse", "Sum", "Taps", "TopK", "Transposed",
           "Typed", "Uniform", "adjacency", "cuboid_offsets", "fourier_basis", "haar_basis", "operator", "random_walk",
           "register_normalisation", "scaled_laplacian", "value", "weights_at"]
