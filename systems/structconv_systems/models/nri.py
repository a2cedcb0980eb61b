"""Neural relational inference: infer from trajectories which bodies interact (Kipf et al. 2018)."""

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv import ConfigError, Graph, Incidence
from structconv.nn import Conv, Conv1d, GraphNetwork, Linear
from structconv_systems.models import nri_pairs

__all__ = ["Correlation", "Decoder", "Encoder", "Inferred", "RecurrentDecoder", "RelationalInference", "SeriesEncoder"]

#: Times that a kernel of `SeriesEncoder` spans, and over which the maximum is taken between its two layers.
_KERNEL, _POOLED = 5, 2


class Inferred(NamedTuple):
    """States to come, (B, W, H, N, C), and the logits of the edges' types, (B, E, K).

    Example:

        >>> from structconv_systems.models.nri import Inferred
        >>> Inferred(states=torch.zeros(2, 2, 2, 3, 4), logits=torch.zeros(2, 6, 2))._fields
        ('states', 'logits')
    """

    states: Tensor
    logits: Tensor


class RelationalInference(nn.Module):
    """An encoder q(z | x) of the type z_e of each pair of bodies, and a decoder p(x_(t+1) | x_t, z) of their motion.

    In training z is drawn from the concrete distribution, softmax((logits + g) / temperature) with Gumbel noise g, so
    that gradients pass; otherwise it is the most probable type.

    Args:
        encoder: (trajectories (B, times, N, C), graph) -> logits (B, E, K).
        decoder: (trajectories (B, T, N, C), graph, types (B, E, K), H, starts (W,)) -> the H states after each start,
            (B, W, H, N, C).
        times: number of times that the encoder reads. types: K. temperature: temperature of the relaxation.

    Called with trajectories (B, T, N, C), a graph of all pairs that may act on one another, say `Graph.complete(N)`,
    where rollouts begin, (W,) indices into T, and their length H -> `Inferred`. Kipf et al. (2018), eq. 4 to 13.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.nri import RelationalInference
        >>> graph, x = Graph.complete(3), torch.randn(2, 10, 3, 4)
        >>> model = RelationalInference.paper(times=10, channels=4, hidden=8).eval()
        >>> inferred = model(x, graph, starts=torch.tensor([0, 5]), horizon=2)
        >>> inferred.states.shape, inferred.logits.shape
        (torch.Size([2, 2, 2, 3, 4]), torch.Size([2, 6, 2]))
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module, *, times: int, types: int = 2,
                 temperature: float = 0.5) -> None:
        super().__init__()
        self.times, self.types, self.temperature = times, types, temperature
        self.encoder, self.decoder = encoder, decoder

    @classmethod
    def paper(cls, *, times: int, channels: int, types: int = 2, still: bool = True, hidden: int = 256,
              messages: int = 1, temperature: float = 0.5, dropout: float = 0.0, encoder: str = "mlp",
              decoder: str = "mlp") -> Self:
        """The paper's networks.

        Args:
            times, channels: of what the encoder reads.
            still: the first type is "no edge", which sends nothing and has no network.
            hidden: width of all layers. messages: layers of a message (2 in the paper).
            encoder: "mlp" (`Encoder`) or "cnn" (`SeriesEncoder`).
            decoder: "mlp" (`Decoder`) or "rnn" (`RecurrentDecoder`).

        Raises:
            ConfigError: `times` is less than a `SeriesEncoder` needs.
        """
        if encoder == "cnn" and times < SeriesEncoder.least:
            raise ConfigError("RelationalInference", f"times must be at least {SeriesEncoder.least} for encoder='cnn'",
                              times)
        reader = (Encoder(times, channels, types, hidden=hidden, dropout=dropout) if encoder == "mlp"
                  else SeriesEncoder(channels, types, hidden=hidden, dropout=dropout))
        mover = Decoder if decoder == "mlp" else RecurrentDecoder
        return cls(reader, mover(channels, types, still=still, hidden=hidden, messages=messages), times=times,
                   types=types, temperature=temperature)

    @classmethod
    def structured(cls, space: nri_pairs.Space, *, times: int, types: int = 2, still: bool = True, hidden: int = 64,
                   temperature: float = 0.5, symmetric: bool = True) -> Self:
        """The encoder of pairs over time, with a decoder that forms forces in the plane or turns phases.

        Args:
            space: what is read of states, which the caller has fitted to training data.
            symmetric: the two directions of a pair have the same logits.
            still, hidden: as in `paper`.
        """
        decoder = nri_pairs.ForceDecoder if isinstance(space, nri_pairs.Plane) else nri_pairs.TurningDecoder
        return cls(nri_pairs.PairEncoder(space, types, hidden=hidden, symmetric=symmetric),
                   decoder(types, still=still, hidden=hidden), times=times, types=types, temperature=temperature)

    def forward(self, x: Tensor, graph: Graph, starts: Tensor, horizon: int) -> Inferred:
        logits = self.encoder(x[:, :self.times], graph)
        return Inferred(self.decoder(x, graph, self.edges(logits), horizon, starts), logits)

    def edges(self, logits: Tensor) -> Tensor:
        """Return z, (..., E, K)."""
        if self.training:
            return F.gumbel_softmax(logits, self.temperature)
        return F.one_hot(logits.argmax(-1), self.types).to(logits.dtype)


class Encoder(nn.Module):
    """Trajectories (B, T, N, C) and a graph -> logits (B, E, K) (eq. 5 to 8; the paper's MLP encoder).

    e = f_1([h_s, h_r]), h' = g(mean of e), logits = f_2([h'_s, h'_r, e]), h_n being a network of body n's states.

    A `GraphNetwork` and another, so that what all edges read is projected at the nodes. Norms over the batch between.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.nri import Encoder
        >>> graph, x = Graph.complete(3), torch.randn(2, 10, 3, 4)
        >>> Encoder(times=10, channels=4, types=2, hidden=8).eval()(x, graph).shape             # logits of six pairs
        torch.Size([2, 6, 2])
    """

    def __init__(self, times: int, channels: int, types: int, *, hidden: int = 256, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Sequential(Linear(times * channels, hidden), nn.ELU(), Linear(hidden, hidden), _Norm(
            hidden, dropout))
        self.pairs = GraphNetwork(hidden, edge=(hidden, hidden), node=(hidden, hidden), node_reads=("edges",),
                                  aggregate="mean", activation=nn.ELU)
        self.node_norm, self.edge_norm = _Norm(hidden, dropout), _Norm(hidden, dropout)
        self.read = GraphNetwork(hidden, hidden, edge=(hidden, hidden, types), activation=nn.ELU)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        hidden = self.pairs(self.embed(x.transpose(1, 2).flatten(2)), graph)
        logits: Tensor = self.read(self.node_norm(hidden.nodes), graph, self.edge_norm(hidden.edges)).edges
        return logits


class SeriesEncoder(nn.Module):
    """Trajectories (B, T, N, C) and a graph -> logits (B, E, K) (the paper's CNN encoder).

    e = f_1(sum_t a_t W c_t), a = softmax over time of v c_t, c = conv(max of two times of conv([x_s, x_r])), both of
    kernel 5; h = g(mean of e), logits = f_2([h_s, h_r, e]). T is at least `least`.

    The first convolution is a `GraphNetwork` of the bodies' windows, so that each body is projected once.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.nri import SeriesEncoder
        >>> graph, x = Graph.complete(3), torch.randn(2, 14, 3, 4)
        >>> SeriesEncoder(channels=4, types=2, hidden=8).eval()(x, graph).shape                # logits of six pairs
        torch.Size([2, 6, 2])
    """

    least = _POOLED * _KERNEL + _KERNEL - 1

    def __init__(self, channels: int, types: int, *, hidden: int = 256, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.first, self.second = GraphNetwork(_KERNEL * channels, edge=hidden), Conv1d(hidden, hidden, _KERNEL)
        self.first_norm, self.second_norm = nn.BatchNorm1d(hidden), nn.BatchNorm1d(hidden)
        self.value, self.score = Linear(hidden, hidden), Linear(hidden, 1)
        self.embed = nn.Sequential(Linear(hidden, hidden), nn.ELU(), Linear(hidden, hidden), _Norm(hidden, dropout))
        self.nodes = GraphNetwork(0, hidden, node=(hidden, hidden), node_reads=("edges",), aggregate="mean",
                                  activation=nn.ELU)
        self.node_norm = _Norm(hidden, dropout)
        self.read = GraphNetwork(hidden, hidden, edge=(hidden, hidden, types), activation=nn.ELU)

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        edges = self.embed(self._over_time(self.first(nri_pairs.windows(x, _KERNEL, 1), graph).edges.relu()))
        nodes = self.node_norm(self.nodes(None, graph, edges).nodes)
        logits: Tensor = self.read(nodes, graph, edges).edges
        return logits

    def _over_time(self, edges: Tensor) -> Tensor:
        """(B, T', E, H) -> (B, E, H)."""
        series = edges.movedim(1, -1)                                   # (B, E, H, T')
        c = F.max_pool1d(F.dropout(self.first_norm(series.flatten(0, 1)), self.dropout, self.training), _POOLED)
        c = self.second_norm(self.second(c).relu()).mT
        pooled: Tensor = (self.score(c).softmax(1) * self.value(c)).sum(1)
        return pooled.unflatten(0, series.shape[:2])


class Decoder(nri_pairs.Rollout):
    """x_(t+1) = x_t + W x_t + g(sum_k sum_(e: m -> n) z_ek f_k([x_m, x_n]), x_n) (eq. 10 to 12; its MLP decoder).

    f_k is a network for each type. Its messages are the x of the basis A_k[e, n] = z_ek where e leads to n: what a type
    weighs is the value of an edge's entry, and the first layer of g its Theta, so that edges are summed before they are
    projected. With `messages=1` they are relu(W_k [x_m, x_n]); the paper has a second layer there, which costs as much
    as all the rest. W x, which it has not, lets a body that is alone go on as it does from the first steps on, and g
    begins at 0: what is left to learn is what acts.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.nri import Decoder
        >>> graph, x = Graph.complete(3), torch.randn(2, 10, 3, 4)
        >>> edges = torch.nn.functional.one_hot(torch.randint(0, 2, (2, 6)), 2).float()
        >>> Decoder(4, 2, hidden=8)(x, graph, edges, 1).shape                  # one step from each of ten states
        torch.Size([2, 10, 1, 3, 4])
    """

    def __init__(self, channels: int, types: int, *, still: bool = True, hidden: int = 256, messages: int = 1) -> None:
        super().__init__(types, still)
        ends = Incidence("sender") | Incidence("receiver")
        self.messages = nn.ModuleList(Conv(ends, channels, hidden) for _ in self.acting)
        self.deeper = nn.ModuleList(nn.Sequential(*(part for _ in range(messages - 1) for part in (
            Linear(hidden, hidden), nn.ReLU()))) for _ in self.acting)
        self.update = nri_pairs.update_of(channels, self.acting, hidden, hidden)
        self.rest = nn.Sequential(nn.ReLU(), Linear(hidden, hidden), nn.ReLU(), Linear(hidden, channels))
        self.drift = Linear(channels, channels)
        for parameter in (*self.rest[-1].parameters(), *self.drift.parameters()):
            nn.init.zeros_(parameter)

    def following(self, x: Tensor, graph: Graph, graphs: dict[str, Graph]) -> Tensor:
        moved, messages = x + self.drift(x), {"nodes": x}
        for name, first, deeper in zip(graphs, self.messages, self.deeper, strict=True):
            messages[name] = deeper(first(x, structure=graph).relu())
        return moved + self.rest(self.update(messages, structure=graphs or None))


class RecurrentDecoder(nn.Module):
    """h_(t+1) = GRU([sum_k sum_(e: m -> n) z_ek f_k([h_m, h_n]), x_n], h_n), x_(t+1) = x_t + g(h_(t+1)) (section 3.5).

    f_k are networks with tanh. What a GRU multiplies by its input weights is one `Conv`, of the state and of what each
    type sends, as in `Decoder`. A rollout first reads all true states up to its start; g begins at 0.

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.nri import RecurrentDecoder
        >>> graph, x = Graph.complete(3), torch.randn(2, 10, 3, 4)
        >>> edges = torch.nn.functional.one_hot(torch.randint(0, 2, (2, 6)), 2).float()
        >>> RecurrentDecoder(4, 2, hidden=8)(x, graph, edges, 3, starts=torch.tensor([4, 6])).shape
        torch.Size([2, 2, 3, 3, 4])
    """

    def __init__(self, channels: int, types: int, *, still: bool = True, hidden: int = 256, messages: int = 1) -> None:
        super().__init__()
        self.hidden, self.acting = hidden, nri_pairs.acting_types(types, still)
        ends = Incidence("sender") | Incidence("receiver")
        self.messages = nn.ModuleList(Conv(ends, hidden, hidden) for _ in self.acting)
        self.deeper = nn.ModuleList(nn.Sequential(nn.Tanh(), *(part for _ in range(messages - 1) for part in (
            Linear(hidden, hidden), nn.Tanh()))) for _ in self.acting)
        self.inputs = nri_pairs.update_of(channels, self.acting, hidden, 3 * hidden)
        self.state = Linear(hidden, 3 * hidden)
        self.rest = nn.Sequential(Linear(hidden, hidden), nn.ReLU(), Linear(hidden, hidden), nn.ReLU(),
                                  Linear(hidden, channels))
        for parameter in self.rest[-1].parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor, graph: Graph, edges: Tensor, horizon: int, starts: Tensor | None = None) -> Tensor:
        """As `Decoder`."""
        graphs = nri_pairs.weighted(graph, edges[:, None], self.acting)
        starts = torch.arange(x.shape[1], device=x.device) if starts is None else starts
        h, read = x.new_zeros(*x[:, :1].shape[:-1], self.hidden), []
        for t in range(int(starts.max()) + 1):
            h = self._step(h, x[:, t:t + 1], graph, graphs)
            read.append(h)
        h, x, states = torch.cat(read, 1)[:, starts], x[:, starts], []
        for ahead in range(horizon):
            h = self._step(h, x, graph, graphs) if ahead else h
            x = x + self.rest(h)
            states.append(x)
        return torch.stack(states, 2)

    def _step(self, h: Tensor, x: Tensor, graph: Graph, graphs: dict[str, Graph]) -> Tensor:
        messages = {"nodes": x, **{name: deeper(first(h, structure=graph)) for name, first, deeper in zip(
            graphs, self.messages, self.deeper, strict=True)}}
        reset, keep, new = self.inputs(messages, structure=graphs or None).chunk(3, -1)
        own_reset, own_keep, own = self.state(h).chunk(3, -1)
        candidate = (new + (reset + own_reset).sigmoid() * own).tanh()
        return torch.lerp(candidate, h, (keep + own_keep).sigmoid())


class Correlation(nn.Module):
    """A pair is joined where the mean over the channels of its trajectories' correlation lies above, or below, a
    threshold, chosen on known graphs by `fit` (the baseline "Corr. (path)"). Logits of two types, (B, E, 2).

    Example:

        >>> from structconv import Graph
        >>> from structconv_systems.models.nri import Correlation
        >>> graph, x = Graph.complete(3), torch.randn(2, 10, 3, 4)
        >>> joined = torch.tensor([[1.0, 0.0, 1.0, 0.0, 0.0, 0.0]] * 2)        # of the six pairs
        >>> Correlation().fit(x, graph, joined)(x, graph).shape
        torch.Size([2, 6, 2])
    """

    threshold: Tensor
    sign: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("threshold", torch.zeros(()))
        self.register_buffer("sign", torch.ones(()))

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        score = self.sign * (self.correlation(x, graph) - self.threshold)
        return torch.stack([-score, score], -1)

    @staticmethod
    def correlation(x: Tensor, graph: Graph) -> Tensor:
        """Return the correlation (B, E) of trajectories (B, T, N, C); 0 for channels that change by rounding only."""
        y = x - x.mean(1, keepdim=True)
        deviation = y.square().mean(1, keepdim=True).sqrt()
        y = torch.where(deviation > 1e-5 * x.abs().amax(1, keepdim=True), y / deviation, 0.0)
        return (y[:, :, graph.source] * y[:, :, graph.target]).mean((1, 3))

    def fit(self, x: Tensor, graph: Graph, joined: Tensor) -> Self:
        """Choose the threshold and its side that are right most often; joined (B, E) is 0 or 1."""
        values, order = self.correlation(x, graph).flatten().sort()
        joined = joined.flatten()[order]
        below = joined.cumsum(-1)
        apart = torch.arange(1, len(values) + 1) - below
        right = torch.stack([apart + below[-1] - below, below + apart[-1] - apart])
        side, place = divmod(int(right.argmax()), len(values))
        self.sign.fill_(1.0 - 2.0 * side)
        self.threshold.copy_(values[place:place + 2].mean())
        return self


class _Norm(nn.BatchNorm1d):
    """ELU, dropout, and a norm over all rows (..., H)."""

    def __init__(self, channels: int, dropout: float) -> None:
        super().__init__(channels)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.elu(x), self.dropout, self.training)
        return super().forward(y.flatten(0, -2)).view_as(y)
