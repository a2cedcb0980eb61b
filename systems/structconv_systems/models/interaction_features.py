"""Features of interaction networks for moving bodies: pairs, and objects around them (Battaglia et al. 2016)."""

import abc
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.structures import Graph

__all__ = ["BoxFeatures", "InteractionFeatures", "SpaceFeatures", "StringFeatures"]

#: Channels of an approach. A gap is a direction and a distance.
_APPROACH = 6
Gap = tuple[Tensor, Tensor]


class InteractionFeatures(abc.ABC):
    """Features of states (..., N, 4), position and velocity in the plane, and of properties (..., N, A).

    Positions and velocities are relative to another body or to a fixed object.

    Args:
        interval: the time between two states.

    Example:

        >>> from structconv_systems.models.interaction_features import InteractionFeatures, SpaceFeatures
        >>> issubclass(SpaceFeatures, InteractionFeatures), SpaceFeatures(0.1).pair_channels
        (True, 10)
    """

    #: C, the channels of a body, and the number of fixed objects.
    properties: ClassVar[int]
    things: ClassVar[int] = 0
    #: Gaps up to this length are resolved, in the unit of positions.
    reach: ClassVar[float]

    def __init__(self, interval: float) -> None:
        self.interval = interval

    @property
    def pair_channels(self) -> int:
        return 4 + _APPROACH

    @property
    def outside_channels(self) -> int:
        return _APPROACH * self.things

    def pairs(self, states: Tensor, properties: Tensor, graph: Graph) -> Tensor:
        """Return features (..., E, 10) of each edge: the sender's position and velocity relative to the receiver, and
        how they approach."""
        offset = states[..., graph.source, :] - states[..., graph.target, :]
        sizes = self.sizes(properties)
        touching = sizes[..., graph.source, :] + sizes[..., graph.target, :]
        positions, velocities = offset.split(2, -1)
        now, later = (_gap(at, touching) for at in (positions, positions + self.interval * velocities))
        return torch.cat([offset, self._approach(now, later, -velocities)], -1)

    def outside(self, states: Tensor, properties: Tensor) -> Tensor:
        """Return features (..., N, 6 objects) of each body: how it approaches fixed objects."""
        positions, velocities = states.split(2, -1)
        now, later = (self.around(at, properties) for at in (positions, positions + self.interval * velocities))
        near = [self._approach(*both, velocities) for both in zip(now, later, strict=True)]
        return torch.cat(near, -1) if near else states[..., :0]

    def _approach(self, now: Gap, later: Gap, velocity: Tensor) -> Tensor:
        """The direction, the speed in it, and tanh(gap / reach): now, after a step without change, and there ten times
        finer."""
        (direction, gap), (_, next_gap) = now, later
        speed = (direction * velocity).sum(-1, keepdim=True)
        return torch.cat([direction, speed, *((one / self.reach).tanh() for one in (gap, next_gap, 10 * next_gap))], -1)

    def own(self, properties: Tensor) -> Tensor:
        """Return the body's own features (..., N, C)."""
        return properties

    @abc.abstractmethod
    def sizes(self, properties: Tensor) -> Tensor:
        """(..., N, 1): the gap of a pair is its distance less the sizes of both."""

    def around(self, positions: Tensor, properties: Tensor) -> list[Gap]:
        """Return direction (..., N, 2) and gap (..., N, 1) of each fixed object from bodies at (..., N, 2)."""
        return []

    def fixed(self, properties: Tensor) -> Tensor | None:
        """Return 1 for bodies that never move, (..., N, 1), if there are any."""
        return None

    def graph(self, bodies: int) -> Graph:
        """Return the graph of the pairs that may interact."""
        return Graph.complete(bodies)


class SpaceFeatures(InteractionFeatures):
    """Bodies that have a mass and no size, and nothing around them; `reach` is for distances of some tens.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.data.physics import Gravity
        >>> from structconv_systems.models.interaction_features import SpaceFeatures
        >>> drawn = Gravity(bodies=3).simulate(1, times=2, seed=0)
        >>> SpaceFeatures(drawn.interval).pairs(drawn.states[:, 0], drawn.properties, Graph.complete(3)).shape
        torch.Size([1, 6, 10])
    """

    properties, reach = 1, 20.0

    def sizes(self, properties: Tensor) -> Tensor:
        return torch.zeros_like(properties)


class BoxFeatures(InteractionFeatures):
    """Balls with mass and radius in a box of half side `box`; of two opposite walls the nearer one counts.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.data.physics import Balls
        >>> from structconv_systems.models.interaction_features import BoxFeatures
        >>> drawn = Balls(bodies=3).simulate(1, times=2, seed=0)
        >>> BoxFeatures(drawn.interval, box=1.0).outside(drawn.states[:, 0], drawn.properties).shape    # of the walls
        torch.Size([1, 3, 12])
    """

    properties, things, reach = 2, 2, 0.02

    def __init__(self, interval: float, box: float) -> None:
        super().__init__(interval)
        self.box = box

    def sizes(self, properties: Tensor) -> Tensor:
        return properties[..., 1:]

    def around(self, positions: Tensor, properties: Tensor) -> list[Gap]:
        gaps = (self.box - properties[..., 1:] - positions.abs()).split(1, -1)
        sides = positions.sign().split(1, -1)
        return [(F.pad(sides[0], (0, 1)), gaps[0]), (F.pad(sides[1], (1, 0)), gaps[1])]


class StringFeatures(InteractionFeatures):
    """Bodies in a row, springs of rest length `length` between neighbors, who alone act on one another, and a disk of
    radius `disk`. Properties are mass, 1 where a body is held, and the middle of the disk, x and y.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.data.physics import String
        >>> from structconv_systems.models.interaction_features import StringFeatures
        >>> drawn = String(bodies=3).simulate(1, times=2, seed=0)
        >>> row = Graph(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
        >>> StringFeatures(drawn.interval, length=0.2, disk=0.3).pairs(drawn.states[:, 0], drawn.properties, row).shape
        torch.Size([1, 4, 10])
    """

    properties, things, reach = 2, 1, 0.05

    def __init__(self, interval: float, length: float, disk: float) -> None:
        super().__init__(interval)
        self.length, self.disk = length, disk

    def own(self, properties: Tensor) -> Tensor:
        return properties[..., :2]

    def sizes(self, properties: Tensor) -> Tensor:
        return torch.full_like(properties[..., :1], self.length / 2)

    def around(self, positions: Tensor, properties: Tensor) -> list[Gap]:
        return [_gap(properties[..., 2:] - positions, self.disk)]

    def fixed(self, properties: Tensor) -> Tensor:
        return properties[..., 1:2]

    def graph(self, bodies: int) -> Graph:
        left = torch.arange(bodies - 1)
        pairs = torch.stack([left, left + 1])
        return Graph(torch.cat([pairs, pairs.flip(0)], 1), num_nodes=bodies)


def _gap(offset: Tensor, touching: Tensor | float) -> Gap:
    """Return the direction of an offset (..., 2), and its length less the touching distance."""
    distance = offset.norm(dim=-1, keepdim=True)
    return offset / distance.clamp(min=1e-9), distance - touching
