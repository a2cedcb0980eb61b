"""Bases: lazy (..., K, M, N) tensors that know how to be applied, and the algebra over them."""

from structconv.bases import algebra as _algebra  # noqa: F401 - registers the operators: every basis has them
from structconv.bases.base import *
from structconv.bases.dense import *
from structconv.bases.entrywise import *
from structconv.bases.linear import *
from structconv.bases.matrices import *
from structconv.bases.normalizations import *
from structconv.bases.pairs import *
from structconv.bases.pairwise import *
from structconv.bases.polynomial import *
from structconv.bases.pooling import *
from structconv.bases.positions import *
from structconv.bases.scores import *
from structconv.bases.shift import *
from structconv.bases.sparse import *
from structconv.bases.taps import *
from structconv.bases.transforms import *
from structconv.bases.typed import *
from structconv.public_names import public_names

__all__ = public_names(globals())
