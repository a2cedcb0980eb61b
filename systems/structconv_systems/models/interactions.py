"""Interaction networks for moving bodies that attract, repel and collide (Battaglia et al. 2016)."""

from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from structconv.nn import GraphNetwork, Linear
from structconv.structures import Graph
from structconv_systems.models.interaction_features import InteractionFeatures

__all__ = ["InteractionNetwork"]


class InteractionNetwork(nn.Module):
    """v_(t+1) - v_t = g([sum of effects, o_n, h(x_n, o_n)]), with an effect f([r_e, o_s, o_r]) of each edge (Battaglia
    et al. 2016, eq. 1 to 4): r are features of a pair, o of a body, x of the fixed objects around it.

    f does not read x: else the effects of a body would count its wall once for each other body. Features are divided by
    the greater of |5 %| and |95 %| of their values in training, changes of velocity by their root mean square; see
    `fit`. A fixed body does not change. Effects start at 0.

    Args:
        features: what the network reads. hidden: width of f, g and h. effects: channels of an effect.
        layers: of f and h before their last one; g has one.
        relations: False leaves out all effects, and h reads the state too: an MLP of each body, the baseline.

    Called with states (..., N, 4), position and velocity, properties (..., N, A) and the graph -> changes of velocity
    in a step, (..., N, 2), in the unit of velocities. O(E + N) rows as wide as the layers.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.data.physics import Gravity
        >>> from structconv_systems.models.interaction_features import SpaceFeatures
        >>> from structconv_systems.models.interactions import InteractionNetwork
        >>> drawn = Gravity(bodies=3).simulate(1, times=2, seed=0)
        >>> model = InteractionNetwork(SpaceFeatures(drawn.interval), hidden=8, effects=4, layers=2)
        >>> model(drawn.states[:, 0], drawn.properties, Graph.complete(3)).shape                # changes of velocity
        torch.Size([1, 3, 2])
    """

    pair_scale: Tensor
    outside_scale: Tensor
    own_scale: Tensor
    change_scale: Tensor

    def __init__(self, features: InteractionFeatures, *, hidden: int = 150, effects: int = 50, layers: int = 4,
                 relations: bool = True) -> None:
        super().__init__()
        self.features, self.relations = features, relations
        around = features.outside_channels + (0 if relations else 4)
        self.network = GraphNetwork.interaction(features.properties, features.pair_channels,
                                                edge=(hidden,) * layers + (effects,), node=hidden)
        self.outside = _network(around + features.properties, hidden, layers) if around else None
        self.rest = nn.Sequential(nn.ReLU(), Linear(hidden, 2))
        assert self.network.edge is not None
        for parameter in self.network.edge.rest[-1].parameters():
            nn.init.zeros_(parameter)
        for name, channels in (("pair", features.pair_channels), ("outside", around),
                               ("own", features.properties), ("change", 1)):
            self.register_buffer(f"{name}_scale", torch.ones(channels))

    @torch.no_grad()
    def fit(self, states: Tensor, properties: Tensor, graph: Graph, changes: Tensor) -> Self:
        """The scales, of states of training and the changes of velocity (..., N, 2) that follow."""
        self.pair_scale.copy_(_greatest(self.features.pairs(states, properties, graph)))
        self.outside_scale.copy_(_greatest(self._around(states, properties)))
        self.own_scale.copy_(_greatest(self.features.own(properties)))
        self.change_scale.copy_(changes.square().mean().sqrt())
        return self

    def forward(self, states: Tensor, properties: Tensor, graph: Graph) -> Tensor:
        change, _ = self.respond(states, properties, graph)
        return change * self.change_scale

    def respond(self, states: Tensor, properties: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """Changes of velocity by their scale, (..., N, 2), and the effects, (..., E, effects)."""
        if not self.relations:
            graph = Graph(graph.edge_index[:, :0], num_nodes=graph.num_nodes)
        pairs = self.features.pairs(states, properties, graph) / self.pair_scale
        own = (self.features.own(properties) / self.own_scale).expand(*states.shape[:-1], -1)
        first, effects, _ = self.network(own, graph, pairs)
        if self.outside is not None:
            outside = self._around(states, properties) / self.outside_scale
            first = first + self.outside(torch.cat([outside, own], -1))
        change, fixed = self.rest(first), self.features.fixed(properties)
        return change if fixed is None else change * (1 - fixed), effects

    def _around(self, states: Tensor, properties: Tensor) -> Tensor:
        """Return what h reads besides the properties of a body."""
        outside = self.features.outside(states, properties)
        return outside if self.relations else torch.cat([outside, states], -1)

    @torch.no_grad()
    def rollout(self, states: Tensor, properties: Tensor, graph: Graph, steps: int) -> Tensor:
        """Return the next states (..., steps, N, 4); a body moves by the mean of its velocities before and after a
        step."""
        trajectory = []
        for _ in range(steps):
            change = self(states, properties, graph)
            positions, velocities = states.split(2, -1)
            positions = positions + self.features.interval * (velocities + change / 2)
            states = torch.cat([positions, velocities + change], -1)
            trajectory.append(states)
        return torch.stack(trajectory, -3)


def _network(channels: int, hidden: int, layers: int) -> nn.Sequential:
    widths = (channels,) + (hidden,) * layers
    return nn.Sequential(*(module for pair in pairwise(widths) for module in (Linear(*pair), nn.ReLU())),
                         Linear(hidden, hidden))


def _greatest(x: Tensor) -> Tensor:
    """Return the greater of |5 %| and |95 %| of each channel of rows (..., C), or 1 if both are 0."""
    rows = x.flatten(0, -2)
    ends = [rows.kthvalue(max(1, round(share * len(rows))), 0).values.abs() for share in (0.05, 0.95)]
    greatest = torch.maximum(*ends)
    return greatest.where(greatest > 1e-9, torch.ones_like(greatest))
