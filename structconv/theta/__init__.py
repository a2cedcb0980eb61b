"""Values of the weight Theta (K, P, Q), whole or in factors.

A value knows three things: `expand`, x Theta_k for every k; `contract`, the sum over k of r_k Theta_k; and `dense()`,
the tensor itself, built independently of both. Flops are counted for the cheaper of the orders that a kind has, so
that the planner compares what is really run.
"""

from __future__ import annotations

from structconv.theta.base import Theta, sum_tensors, wants_grad
from structconv.theta.factored import (
    ByHeadTheta,
    DepthwiseSeparableTheta,
    EyeBlocksTheta,
    HeadBlocksTheta,
    LowRankTheta,
    SeparableTheta,
)
from structconv.theta.mixture import MixtureTheta
from structconv.theta.whole import (
    ApartTheta,
    ConcatTheta,
    DepthwiseTheta,
    EyeTheta,
    FullTheta,
    GroupedTheta,
    SharedTheta,
    as_theta,
)

__all__ = ["ApartTheta", "ByHeadTheta", "ConcatTheta", "DepthwiseSeparableTheta", "DepthwiseTheta", "EyeBlocksTheta",
           "EyeTheta", "FullTheta", "GroupedTheta", "HeadBlocksTheta", "LowRankTheta", "MixtureTheta", "SeparableTheta",
           "SharedTheta", "Theta", "as_theta", "sum_tensors", "wants_grad"]
