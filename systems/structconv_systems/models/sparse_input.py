"""The first layer on sparse features: a bag of words is itself a basis, from words to documents."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.bases.sparse import Sparse
from structconv.mechanisms.expression import Inputs, Mechanism
from structconv.nn.expressed import Expressed
from structconv.planning import Plan
from structconv.planning.plan import plan_for
from structconv.planning.precision import autocast_dtype, cast, cast_call
from structconv.planning.problem import Call
from structconv.weights import Full, HeadBlocks

__all__ = ["SparseConv", "drop_values"]


def drop_values(words: Sparse, p: float, training: bool) -> Sparse:
    """Dropout on the stored values: zero each with probability p, scale the others by 1 / (1 - p).

    The same distribution as dropout on the dense features, since a zero stays zero.

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import Sparse
        >>> from structconv_systems.models.sparse_input import drop_values
        >>> words = Sparse(Graph(torch.tensor([[0, 4, 2], [0, 1, 2]]), num_inputs=5, num_outputs=3), torch.ones(3))
        >>> set(drop_values(words, 0.5, training=True).values.tolist()) <= {0.0, 2.0}
        True
    """
    if not training or p == 0 or words.values is None:
        return words
    return Sparse(words.graph, F.dropout(words.values, p))


class SparseConv(Expressed):
    """y = sum_k A_k^T X Theta_k for a sparse matrix X (M, P), channels first: X Theta_k, then A_k.

    X is passed as a `Sparse` basis of one matrix from the P words to the M entries, so that X Theta is its analysis
    of Theta. The dense X is never built: O(nonzeros K Q) flops for X Theta.

    Args:
        mechanism: what yields A; bound to `in_channels` and `out_channels` here.
        in_channels, out_channels: P and Q.
        bias: add one number a channel.
        concat: put the K heads side by side, (N, K Q), instead of adding them, (N, Q).

    Theta and A's parameters are initialized by Glorot and Bengio (2010), as in the published models.

    Example:

        >>> from structconv import Adjacency, Graph
        >>> from structconv.bases import Sparse
        >>> from structconv_systems.models.sparse_input import SparseConv
        >>> words = Sparse(Graph(torch.tensor([[0, 4, 2], [0, 1, 2]]), num_inputs=5, num_outputs=3), torch.ones(3))
        >>> graph = Graph(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
        >>> SparseConv(Adjacency(), 5, 4)(words, graph).shape
        torch.Size([3, 4])
    """

    def __init__(self, mechanism: Mechanism, in_channels: int, out_channels: int, *, bias: bool = False,
                 concat: bool = False) -> None:
        super().__init__()
        self.mechanism = mechanism.bound(in_channels, out_channels)
        self.concat = concat
        self.theta = nn.Parameter(torch.empty(mechanism.size, in_channels, out_channels))
        self.bias = nn.Parameter(torch.zeros(out_channels * (mechanism.size if concat else 1))) if bias else None
        for theta_PQ in self.theta.unbind():
            nn.init.xavier_uniform_(theta_PQ.data)

    def forward(self, words: Sparse, structure: Any) -> Tensor:
        """X as a basis (P -> M) and the structure -> (N, Q), or (N, K Q) with `concat`."""
        call = self._call(words, structure)
        return plan_for(call).run(call)

    def plan(self, words: Sparse, structure: Any) -> Plan:
        """The plan that computes such a call; `print` it. Random numbers stay."""
        with torch.random.fork_rng([]):
            return plan_for(self._call(words, structure))

    def _call(self, words: Sparse, structure: Any) -> Call:
        """The heads X Theta_k come made; in the place of X stands one number, which no kernel reads."""
        dtype = autocast_dtype(self.theta)
        weight = cast(self.theta, dtype)
        size, words_P, channels = weight.shape
        x_MC = words.analysis(weight.movedim(0, 1).reshape(words_P, size * channels)).squeeze(0)
        r_KMQ = x_MC.unflatten(-1, (size, channels)).movedim(-2, 0)
        inputs = Inputs(x_MC, x_MC, structure, (r_KMQ, r_KMQ))
        theta = HeadBlocks.of(weight) if self.concat else Full.of(weight)
        absent = x_MC.new_empty(()).expand(x_MC.shape[0], words_P)
        call = Call(absent, self.mechanism.evaluate(inputs), theta, self.bias, r_KMQ)
        return cast_call(call, dtype)
