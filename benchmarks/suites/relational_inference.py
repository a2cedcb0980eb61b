"""Rollouts of the decoder of neural relational inference, against the way in which its paper computes it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.case import Comparison, Size, entrant
from benchmarks.suites.graph_peers import copied, in_torch, layers_least, leaf
from structconv.structures import Graph
from structconv_systems.models.nri import Decoder

__all__ = ["build_rollouts"]


class _Concatenated(nn.Module):
    """The decoder as its paper computes it: matrices of one-hot rows bring bodies to edges and edges to bodies, and
    what an edge or a body reads is concatenated (Kipf et al. 2018)."""

    def __init__(self, ours: Any, channels: int, hidden: int, graph: Graph) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2 * channels, hidden), nn.Linear(hidden, hidden)
        self.out, self.rest = nn.Linear(channels + hidden, hidden), in_torch(ours.rest)
        self.drift = in_torch(ours.drift)
        message, deeper, update = ours.messages[0], ours.deeper[0][0], ours.update
        for to, value in ((self.first.weight, message.weight.theta.flatten(0, 1).mT), (self.first.bias, message.bias),
                          (self.second.weight, deeper.weight), (self.second.bias, deeper.bias),
                          (self.out.weight, torch.cat([part.theta[0] for part in update.weight.weights]).mT),
                          (self.out.bias, update.bias)):
            copied(to, value)
        self.send, self.receive = (nn.functional.one_hot(end, graph.num_nodes).float()
                                   for end in (graph.source, graph.target))

    def forward(self, x: Tensor, edges: Tensor, horizon: int) -> Tensor:
        weights, states = edges[:, None, :, 1:], []
        for _ in range(horizon):
            ends = torch.cat([self.send @ x, self.receive @ x], -1)
            message = self.second(self.first(ends).relu()).relu() * weights
            reached = (message.mT @ self.receive).mT
            x = x + self.drift(x) + self.rest(self.out(torch.cat([x, reached], -1)))
            states.append(x)
        return torch.stack(states, 2)


def build_rollouts(size: Size) -> Comparison:
    """Ten steps from five states of each of many simulations of five bodies: two layers a message, as in the paper."""
    samples, windows, horizon, channels, hidden = size.pick(16, 128), 5, 10, 4, 256
    graph = Graph.complete(5)
    ours: Any = Decoder(channels, 2, hidden=hidden, messages=2)
    nn.init.normal_(ours.rest[-1].weight, std=0.01)
    plain = _Concatenated(ours, channels, hidden, graph)
    x, edges = leaf(samples, windows, 5, channels), torch.rand(samples, graph.num_edges, 2).requires_grad_()
    at_nodes = 2 * channels * hidden + (channels + hidden) * hidden + hidden * hidden + hidden * channels
    once = samples * windows * horizon * (graph.num_edges * hidden * hidden + 5 * at_nodes)
    return Comparison(ours=entrant("ours", ours, lambda: ours(x, graph, edges, horizon), x, edges),
                      peers=(entrant("torch", plain, lambda: plain(x, edges, horizon), x, edges),),
                      edges=graph.num_edges, least=layers_least(once), size=f"{samples} simulations of 5 bodies, "
                      f"{windows} rollouts of {horizon} steps, {hidden} hidden units")
