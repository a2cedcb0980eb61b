"""Weights: Theta (K, P, Q), whole, in factors, by head, or one for each part of a basis. One class a kind.

A weight over tensors knows three things: `expand`, x Theta_k for every k; `contract`, the sum over k of r_k Theta_k;
and `dense()`, the tensor itself, built independently of both. Flops are counted for the cheaper of the orders that a
kind has, so that the planner compares what is really run.
"""

from __future__ import annotations

from structconv.weights.base import BoundWeight, Weight
from structconv.weights.factored import DepthwiseSeparable, EyeBlocks, HeadBlocks, LowRank, Separable
from structconv.weights.lists import BoundWeights, MixtureWeights, WeightList
from structconv.weights.whole import Depthwise, Eye, Full, Grouped, Shared

__all__ = ["BoundWeight", "BoundWeights", "Depthwise", "DepthwiseSeparable", "Eye", "EyeBlocks", "Full", "Grouped",
           "HeadBlocks", "LowRank", "MixtureWeights", "Separable", "Shared", "Weight", "WeightList"]
