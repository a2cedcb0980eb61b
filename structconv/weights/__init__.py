"""Weights: Theta (K, P, Q), whole, in factors, by head, or one for each part of a basis. One class a kind.

A weight over tensors has three methods: `expand` computes x Theta_k for every k, `contract` the sum over k of r_k
Theta_k, and `dense()` builds the tensor itself, independently of both. Flops are counted for the cheaper order, the one
that runs.
"""

from __future__ import annotations

from structconv.weights.base import BoundWeight, Weight
from structconv.weights.factored import DepthwiseSeparable, EyeBlocks, HeadBlocks, LowRank, Separable
from structconv.weights.lists import BoundWeights, MixtureWeights, WeightList
from structconv.weights.whole import Depthwise, Eye, Full, Grouped, Shared

__all__ = ["BoundWeight", "BoundWeights", "Depthwise", "DepthwiseSeparable", "Eye", "EyeBlocks", "Full", "Grouped",
           "HeadBlocks", "LowRank", "MixtureWeights", "Separable", "Shared", "Weight", "WeightList"]
