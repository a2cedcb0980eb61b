"""Neural relational inference with geometry: an encoder of pairs over time, decoders of forces or phases."""

import abc
from dataclasses import replace
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from structconv import Adjacency, Graph, Identity, Mechanism
from structconv.derived import derived
from structconv.nn import Conv, GraphNetwork, Linear
from structconv.structures.graph import edges_to_receivers

__all__ = ["Circle", "ForceDecoder", "PairEncoder", "Plane", "Space", "TurningDecoder", "acting_types", "name_of",
           "reversed_edges", "update_of", "weighted", "windows"]

#: Times that a window of the encoder spans, and from one window to the next.
_WINDOW, _STRIDE = 3, 2
#: The least distance of two bodies, and the least standard deviation of a prediction, in units of the data's.
_NEAR, _LEAST_SCALE = 1e-3, 1e-3
#: Factor on the logarithm of a standard deviation, which must fall by orders of magnitude while weights change little.
_HASTE = 2.5


class Space(nn.Module, abc.ABC):
    """The features that the encoder reads from the states (B, T, N, C), at each time except the last.

    Attributes:
        channels: C. node_features, pair_features: of a body and of a pair of bodies, per time.
        change: mean absolute change of the velocity in a step, which `fit` sets.
    """

    channels: int
    node_features: int
    pair_features: int
    change: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("change", torch.ones(()))

    @abc.abstractmethod
    def velocity(self, x: Tensor) -> Tensor:
        """The part of states that forces change, (..., V)."""

    @abc.abstractmethod
    def forward(self, x: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """States (B, T, N, C) -> features of bodies (B, T - 1, N, F) and of edges (B, T - 1, E, G)."""

    def fit(self, x: Tensor) -> None:
        """Set `change` from training states."""
        self.change.copy_(self.velocity(x).diff(dim=1).abs().mean())

    def changes(self, x: Tensor) -> Tensor:
        """Changes of the velocity in units of `change`, (B, T - 1, N, V)."""
        return self.velocity(x).diff(dim=1) / self.change


class Plane(Space):
    """Bodies with position and velocity in the plane, C = 4.

    Example:

        >>> from structconv_systems.models.nri_pairs import Plane
        >>> Plane().velocity(torch.arange(4.0)).tolist()   # see `PairEncoder`
        [2.0, 3.0]
    """

    channels, node_features, pair_features = 4, 6, 5

    def velocity(self, x: Tensor) -> Tensor:
        return x[..., 2:]

    def forward(self, x: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """Features of a body: its state and asinh of its change of velocity. Of a pair: the distance, its logarithm,
        the speed of separation, and both changes of velocity along the line between them."""
        changes, x = self.changes(x), x[:, :-1]
        unit, distance = directions(x, graph)
        sender, receiver = graph.source, graph.target
        parting = x[:, :, sender, 2:] - x[:, :, receiver, 2:]
        along = torch.stack([(unit * part).sum(-1) for part in (
            parting, changes[:, :, sender], changes[:, :, receiver])], -1)
        return (torch.cat([x, changes.asinh()], -1),
                torch.cat([distance, distance.log(), along[..., :1], along[..., 1:].asinh()], -1))


class Circle(Space):
    """Oscillators with states [d phi / dt, sin phi, cos phi, w], C = 4.

    Example:

        >>> from structconv_systems.models.nri_pairs import Circle
        >>> Circle().velocity(torch.arange(4.0)).tolist()  # see `PairEncoder`
        [0.0]
    """

    channels, node_features, pair_features = 4, 5, 2

    def velocity(self, x: Tensor) -> Tensor:
        return x[..., :1]

    def forward(self, x: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
        """Features of an oscillator: its state and change of frequency. Of a pair: sine and cosine of the phase
        difference."""
        changes, x = self.changes(x), x[:, :-1]
        return torch.cat([x, changes.asinh()], -1), differences(x, graph)


def directions(x: Tensor, graph: Graph) -> tuple[Tensor, Tensor]:
    """Return for each edge the unit vector (..., E, 2) from sender to receiver, and the distance (..., E, 1)."""
    offset = x[..., graph.target, :2] - x[..., graph.source, :2]
    distance = offset.norm(dim=-1, keepdim=True).clamp(min=_NEAR)
    return offset / distance, distance


def differences(x: Tensor, graph: Graph) -> Tensor:
    """Return for each edge sine and cosine of the receiver's phase minus the sender's, (..., E, 2)."""
    sine, cosine = x[..., 1], x[..., 2]
    (sine_m, sine_n), (cosine_m, cosine_n) = ((part[..., graph.source], part[..., graph.target])
                                              for part in (sine, cosine))
    return torch.stack([sine_n * cosine_m - cosine_n * sine_m, cosine_n * cosine_m + sine_n * sine_m], -1)


class PairEncoder(nn.Module):
    """e = mean over time of relu(W_s a_m + W_r a_n + W_p b_mn), a and b over windows of three times; then three rounds
    of h_n = h_n + g(mean of e, h_n), e = e + f(h_m, h_n, e); logits = W e.

    Args:
        space: what is read of the states. types: K. hidden: channels of all layers. rounds: of updates.
        symmetric: average the logits of an edge and of its reverse, for graphs that are known to be undirected.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.nri_pairs import PairEncoder, Plane
        >>> graph, x = Graph.complete(3), torch.randn(2, 10, 3, 4)
        >>> encoder = PairEncoder(Plane(), types=2, hidden=8).eval()
        >>> encoder(x, graph).shape                        # logits of the types of six pairs
        torch.Size([2, 6, 2])
    """

    def __init__(self, space: Space, types: int, *, hidden: int = 64, rounds: int = 3, symmetric: bool = True) -> None:
        super().__init__()
        self.space, self.symmetric = space, symmetric
        nodes, pairs = _WINDOW * space.node_features, _WINDOW * space.pair_features
        self.bodies = Linear(nodes, hidden)
        self.pairs = GraphNetwork(nodes, pairs, edge=hidden)
        self.nodes = nn.ModuleList(GraphNetwork(hidden, hidden, node=(hidden, hidden), aggregate="mean")
                                   for _ in range(rounds))
        self.edges = nn.ModuleList(GraphNetwork(hidden, hidden, edge=(hidden, hidden)) for _ in range(rounds))
        self.logits = Linear(hidden, types)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        """Trajectories (B, T, N, C) -> logits (B, E, K)."""
        nodes, pairs = (windows(part, _WINDOW, _STRIDE) for part in self.space(x, graph))
        edges = self.pairs(nodes, graph, pairs).edges.relu().mean(1)
        hidden = self.bodies(nodes).relu().mean(1)
        for at_nodes, at_edges in zip(self.nodes, self.edges, strict=True):
            hidden = hidden + at_nodes(hidden, graph, edges).nodes
            edges = edges + at_edges(hidden, graph, edges).edges
        logits: Tensor = self.logits(edges)
        return (logits + logits[..., reversed_edges(graph), :]) / 2 if self.symmetric else logits


class Rollout(nn.Module):
    """A decoder that predicts states step by step, from what the types `acting` send along edges."""

    #: True if messages have a dim of coordinates before that of edges.
    coordinates: ClassVar[bool] = False

    def __init__(self, types: int, still: bool) -> None:
        super().__init__()
        self.acting = acting_types(types, still)

    def forward(self, x: Tensor, graph: Graph, edges: Tensor, horizon: int, starts: Tensor | None = None) -> Tensor:
        """Predict H states after each start: states (B, T, N, C), types of edges (B, E, K), starts (W,), by default
        every state -> (B, W, H, N, C)."""
        x = x if starts is None else x[:, starts]
        types = edges[:, None, None] if self.coordinates else edges[:, None]
        graphs, states = weighted(graph, types, self.acting), []
        for _ in range(horizon):
            x = self.following(x, graph, graphs)
            states.append(x)
        return torch.stack(states, 2)

    def following(self, x: Tensor, graph: Graph, graphs: dict[str, Graph]) -> Tensor:
        """The states (B, W, N, C) after x, (B, W, N, C)."""
        raise NotImplementedError


class _Scaled(Rollout):
    """A decoder with a learned standard deviation of each channel, which falls from 1.

    While it is great the divergence outweighs the error, so that types stay uncertain until the decoder can use them.
    """

    def __init__(self, types: int, still: bool) -> None:
        super().__init__(types, still)
        self.log_scale = nn.Parameter(torch.zeros(4))

    @property
    def scale(self) -> Tensor:
        """The standard deviation of each channel, (C,)."""
        return _LEAST_SCALE + (_HASTE * self.log_scale).exp()


class ForceDecoder(_Scaled):
    """x_(t+1) = x_t + W x_t + g(x_n) + sum_k sum_(e: m -> n) z_ek u_e phi_k(log r_e) Theta_k, for bodies in the plane.

    u_e is the unit vector from body m to body n and r_e their distance, half a step of W x later. phi_k is a network
    from a number to a number: the law is learned, and only its form is given, a force along the line between two bodies
    that depends on their distance. Theta_k, two numbers, says how a force changes positions and velocities. g reads the
    state of one body: walls.

    The sum over edges is a `Conv` with the basis A_k[e, n] = z_ek where the edge e leads to n. It treats the two
    coordinates of a force as samples, so that it is the same in all directions.

    Args:
        types: K. still: the first type sends nothing and has no network. hidden: channels of phi and g.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.nri_pairs import ForceDecoder
        >>> graph, x = Graph.complete(3), torch.randn(2, 10, 3, 4)
        >>> edges = torch.nn.functional.one_hot(torch.randint(0, 2, (2, 6)), 2).float()
        >>> ForceDecoder(2, hidden=8)(x, graph, edges, 1).shape
        torch.Size([2, 10, 1, 3, 4])
    """

    coordinates = True

    def __init__(self, types: int, *, still: bool = True, hidden: int = 64) -> None:
        super().__init__(types, still)
        self.laws = nn.ModuleList(_network(1, hidden, 1) for _ in self.acting)
        self.sum = Conv(reduce(or_, map(_along, self.acting)), dict.fromkeys(map(name_of, self.acting), 1), 2,
                        bias=False)
        self.drift, self.walls = Linear(4, 4), _network(4, hidden, 4)
        for parameter in (*self.drift.parameters(), *self.walls[-1].parameters()):
            nn.init.zeros_(parameter)

    def following(self, x: Tensor, graph: Graph, graphs: dict[str, Graph]) -> Tensor:
        moved = self.drift(x)
        unit, distance = directions(x + moved / 2, graph)
        forces = {name_of(k): (unit * law(distance.log())).mT.unsqueeze(-1)
                  for k, law in zip(self.acting, self.laws, strict=True)}
        pushed = self.sum(forces, structure=graphs).movedim(-3, -1).flatten(-2)
        return x + moved + self.walls(x) + pushed

    def law(self, distance: Tensor) -> Tensor:
        """Return the learned change of velocity in a step at distances (D,), for each interacting type, (K', D)."""
        logs = distance.clamp(min=_NEAR).log().unsqueeze(-1)
        weights: Any = [self.sum.weight] if len(self.acting) == 1 else self.sum.weight.weights
        return torch.stack([law(logs).squeeze(-1) * weight.theta[0, 0, 1]  # by which a force changes velocities
                            for law, weight in zip(self.laws, weights, strict=True)])


class TurningDecoder(_Scaled):
    """(sin, cos)_(t+1) = the phase turned by an angle, for oscillators.

    States are first turned by W x. The rest of the angle and of the frequency's change is
    g(sum_k sum_(e: m -> n) z_ek f_k(x_m, x_n, d_e), x_n), d_e being sine and cosine of the difference of phases.

    Args:
        types: K. still: the first type sends nothing and has no network. hidden: channels of all layers.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.nri_pairs import TurningDecoder
        >>> graph, x = Graph.complete(3), torch.randn(2, 10, 3, 4)
        >>> edges = torch.nn.functional.one_hot(torch.randint(0, 2, (2, 6)), 2).float()
        >>> TurningDecoder(2, hidden=8)(x, graph, edges, 1).shape
        torch.Size([2, 10, 1, 3, 4])
    """

    def __init__(self, types: int, *, still: bool = True, hidden: int = 64) -> None:
        super().__init__(types, still)
        self.messages = nn.ModuleList(GraphNetwork(4, 2, edge=(hidden, hidden)) for _ in self.acting)
        self.update = update_of(4, self.acting, hidden, hidden)
        self.rest = nn.Sequential(nn.SiLU(), Linear(hidden, hidden), nn.SiLU(), Linear(hidden, 2))
        self.drift = Linear(4, 2)
        for parameter in (*self.rest[-1].parameters(), *self.drift.parameters()):
            nn.init.zeros_(parameter)

    def following(self, x: Tensor, graph: Graph, graphs: dict[str, Graph]) -> Tensor:
        x = _turned(x, self.drift(x))
        between = differences(x, graph)
        messages = {"nodes": x, **{name_of(k): message(x, graph, between).edges.relu()
                                   for k, message in zip(self.acting, self.messages, strict=True)}}
        return _turned(x, self.rest(self.update(messages, structure=graphs)))


def _turned(x: Tensor, change: Tensor) -> Tensor:
    """Change the frequency and turn the phase of states by (..., N, 2)."""
    frequency, sine, cosine, own = x.unbind(-1)
    faster, angle = change.unbind(-1)
    turn_sine, turn_cosine = angle.sin(), angle.cos()
    return torch.stack([frequency + faster, sine * turn_cosine + cosine * turn_sine,
                        cosine * turn_cosine - sine * turn_sine, own], -1)


def reversed_edges(graph: Graph) -> Tensor:
    """Return for each edge m -> n the number of the edge n -> m, (E,); the graph must have both once."""
    def find() -> Tensor:
        source, target = graph.source, graph.target
        forward, backward = source * graph.num_nodes + target, target * graph.num_nodes + source
        order = forward.argsort()
        return order[torch.searchsorted(forward[order], backward)]

    return derived(graph.edge_index, "reversed edges", find)


def windows(x: Tensor, times: int, stride: int) -> Tensor:
    """Put `times` neighboring times side by side: (B, T, N, F) -> (B, W, N, F times)."""
    return x.unfold(1, times, stride).flatten(-2)


def _network(inputs: int, hidden: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(Linear(inputs, hidden), nn.SiLU(), Linear(hidden, hidden), nn.SiLU(), Linear(hidden, outputs))


def acting_types(types: int, still: bool) -> tuple[int, ...]:
    """Return the types that send messages: all, without the first if it is `still`."""
    return tuple(range(1 if still else 0, types))


def name_of(k: int) -> str:
    """Return the name of the inputs and of the structure of a type."""
    return f"type {k}"


def update_of(channels: int, acting: tuple[int, ...], hidden: int, outputs: int) -> Conv:
    """Build the layer of the states of bodies, "nodes", and of the messages of each acting type."""
    mechanism = reduce(or_, map(_along, acting), Identity().of("nodes"))
    return Conv(mechanism, {"nodes": channels, **dict.fromkeys(map(name_of, acting), hidden)}, outputs)


def _along(k: int) -> Mechanism:
    """Lead from the edges of a type to their receivers."""
    return Adjacency(normalize=None, structure=name_of(k)).of(name_of(k))


def weighted(graph: Graph, edges: Tensor, acting: tuple[int, ...]) -> dict[str, Graph]:
    """Return by type the graph from edges to receivers, with the types (..., E, K) as weights."""
    into = edges_to_receivers(graph)
    return {name_of(k): replace(into, edge_weight=edges[..., k]) for k in acting}
