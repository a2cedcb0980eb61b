"""How bodies move that pull, push and hit one another: interaction networks (Battaglia et al. 2016)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from structconv.models.sight import Sight
from structconv.nn import GraphNetwork
from structconv.nn.graph_networks import Attributes
from structconv.structures import Graph

__all__ = ["InteractionNetwork"]


class InteractionNetwork(nn.Module):
    """v_(t+1) - v_t = g([sum of effects, o_n]), with an effect f([r_e, o_s, o_r]) of each edge (Battaglia et al. 2016,
    eq. 1 to 4): r is what is seen of a pair, o what is seen of a body.

    What is seen is divided by the greater of |5 %| and |95 %| of its values in training, a change of velocity by its
    root mean square; see `fit`. A body that is held does not change.

    Args:
        sight: what is seen. hidden: width of the layers of f and g. effects: channels of an effect.
        layers: of f before its last one; g has one.

    Called with states (..., N, 4), position and velocity, properties (..., N, A) and the graph -> changes of velocity
    in a step, (..., N, 2), in the unit of velocities. O(E + N) rows as wide as the layers.
    """

    pair_scale: Tensor
    body_scale: Tensor
    change_scale: Tensor

    def __init__(self, sight: Sight, *, hidden: int = 150, effects: int = 50, layers: int = 4) -> None:
        super().__init__()
        self.sight = sight
        self.network = GraphNetwork.interaction(sight.body_channels, sight.pair_channels,
                                                edge=(hidden,) * layers + (effects,), node=(hidden, 2))
        for name, channels in (("pair", sight.pair_channels), ("body", sight.body_channels), ("change", 1)):
            self.register_buffer(f"{name}_scale", torch.ones(channels))

    @torch.no_grad()
    def fit(self, states: Tensor, properties: Tensor, graph: Graph, changes: Tensor) -> InteractionNetwork:
        """The scales, of states of training and the changes of velocity (..., N, 2) that follow."""
        self.pair_scale.copy_(_greatest(self.sight.pairs(states, properties, graph)))
        self.body_scale.copy_(_greatest(self.sight.bodies(states, properties)))
        self.change_scale.copy_(changes.square().mean().sqrt())
        return self

    def forward(self, states: Tensor, properties: Tensor, graph: Graph) -> Tensor:
        change: Tensor = self.respond(states, properties, graph).nodes * self.change_scale
        return change

    def respond(self, states: Tensor, properties: Tensor, graph: Graph) -> Attributes:
        """Changes of velocity by their scale, and the effects, (..., E, effects)."""
        pairs = self.sight.pairs(states, properties, graph) / self.pair_scale
        bodies = self.sight.bodies(states, properties) / self.body_scale
        found: Attributes = self.network(bodies, graph, pairs)
        held = self.sight.held(properties)
        return found if held is None else found._replace(nodes=found.nodes * (1 - held))

    @torch.no_grad()
    def rollout(self, states: Tensor, properties: Tensor, graph: Graph, steps: int) -> Tensor:
        """What comes after states (..., N, 4): (..., steps, N, 4). In a step a body moves by the interval times the
        mean of its velocities before and after."""
        found = []
        for _ in range(steps):
            change = self(states, properties, graph)
            places, velocities = states.split(2, -1)
            places = places + self.sight.interval * (velocities + change / 2)
            states = torch.cat([places, velocities + change], -1)
            found.append(states)
        return torch.stack(found, -3)


def _greatest(seen: Tensor) -> Tensor:
    """The greater of |5 %| and |95 %| of each channel of rows (..., C); 1 where both are 0."""
    rows = seen.flatten(0, -2)
    ends = [rows.kthvalue(max(1, round(share * len(rows))), 0).values.abs() for share in (0.05, 0.95)]
    greatest = torch.maximum(*ends)
    return greatest.where(greatest > 1e-9, torch.ones_like(greatest))
