"""Tours through points, built node by node by attention: the model of Kool, van Hoof and Welling (2019)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from structconv import Causal, Eye, LowRank, Padding
from structconv.mechanisms import STRUCTURE_IF_GIVEN, DotProduct, General
from structconv.nn import Conv, Linear, MultiheadAttention
from structconv.shapes import check_divides, check_positive

__all__ = ["BEGIN", "EncoderBlock", "TourDecoding", "TourModel"]

#: The token before the first node.
BEGIN = -1


class TourModel(nn.Module):
    """p(t | s) = prod_n softmax_m(C tanh(<q_n, W h_m> / sqrt(P))) at m = t_n, over the nodes m that are left.

    h_m is an encoder's output for the points, and q_n a glimpse of the remaining nodes, whose query is a context: q_n =
    sum_k sum_m softmax_m(<W^Q_k c_n, W^K_k h_m> / sqrt(D)) h_m V_k O_k, c_n = [mean h; h of t_(n-1); h of t_1]. Before
    the first node the last two are learned vectors.

    Args:
        channels: P of the nodes. heads: K, for the encoder and the glimpse; D = P / K.
        layers: number of blocks of the encoder. hidden: channels of their networks. clip: C.

    Calling it: points (B, N, 2) in the unit square, any number of them, and tours (B, N), the nodes in the order of
    their visits -> log p of each node at its step, (B, N), all steps at once: with the nodes in reverse order of their
    visits the mask of the remaining nodes is `Causal()`. O(N^2 P) flops a sample besides the projections, as a block of
    the encoder. The order of the points does not change log p.

    Kool, van Hoof and Welling (2019), section 3 (P = 128, 3 layers, K = 8, hidden 512, C = 10).

    Example:

        >>> from structconv_systems.models.tours import TourModel
        >>> model = TourModel(channels=8, layers=1, heads=2, hidden=16).eval()
        >>> points, tours = torch.rand(2, 5, 2), torch.arange(5).expand(2, 5)
        >>> model(points, tours).shape                     # log p of each node at its step
        torch.Size([2, 5])
    """

    def __init__(self, *, channels: int = 128, layers: int = 3, heads: int = 8, hidden: int = 512,
                 clip: float = 10.0) -> None:
        super().__init__()
        check_positive("TourModel", "layers", layers)
        dim = check_divides("TourModel", "heads", heads, "channels", channels)
        self.embedding = Linear(2, channels)
        self.encoder = nn.Sequential(*(EncoderBlock(channels, heads, hidden) for _ in range(layers)))
        self.before = nn.Parameter(torch.empty(2 * channels).uniform_(-1, 1))
        attention = DotProduct(heads, dim).scaled().masked(keep=STRUCTURE_IF_GIVEN).softmax()
        self.glimpse = Conv(attention, channels, channels, weight=LowRank(dim), bias=False, other_channels=3 * channels)
        # softcap(C) is C tanh(u / C); the basis is read itself, and the layer is there to prepare its keys
        scores = General().scaled(clip * channels ** -0.5).softcap(clip)
        self.pointer = Conv(scores, channels, channels, weight=Eye(), bias=False)

    def forward(self, points: Tensor, tours: Tensor) -> Tensor:
        return self.log_p(self.encode(points), tours)

    def encode(self, points: Tensor) -> Tensor:
        """h of points (B, N, 2): (B, N, P)."""
        return cast(Tensor, self.encoder(self.embedding(points)))

    def log_p(self, nodes: Tensor, tours: Tensor) -> Tensor:
        """Return the log probabilities of tours (B, N), given h (B, N, P)."""
        backwards = nodes.gather(1, tours.flip(-1).unsqueeze(-1).expand_as(nodes))
        first = backwards[:, -1:].expand(-1, nodes.shape[1] - 1, -1)
        ends = torch.cat([torch.cat([backwards[:, 1:], first], -1), self.before.expand(nodes.shape[0], 1, -1)], 1)
        glimpses = self.glimpse(backwards, Causal(), z=_context(nodes.mean(1, keepdim=True), ends))
        log_p = self.pointer.basis(backwards, z=glimpses).masked(keep=Causal()).log_softmax().dense()
        return log_p.squeeze(1).diagonal(dim1=-2, dim2=-1).flip(-1)

    @torch.no_grad()
    def begin(self, points: Tensor) -> TourDecoding:
        """Return the decoding of points (B, N, 2), from the token `BEGIN` on; the model must be in evaluation mode."""
        return TourDecoding(self, self.encode(points))


class TourDecoding:
    """The `Decoding` of a model: nodes are the tokens, N of them make a tour.

    Args:
        nodes: h (B, N, P), whose keys and values are computed once.
    """

    def __init__(self, model: TourModel, nodes: Tensor) -> None:
        self.model, self.nodes, self.mean = model, nodes, nodes.mean(1, keepdim=True)
        self.nodes_of_glimpse, self.choice = model.glimpse.prepare(nodes), model.pointer.prepare(nodes)
        self.left = torch.ones(nodes.shape[:2], dtype=torch.bool, device=nodes.device)
        self.first: Tensor | None = None

    def step(self, tokens: Tensor) -> Tensor:
        """The newest nodes (B,) -> the logits (B, N) of the next ones, -inf of those that were visited."""
        self.left = self.left & (torch.arange(self.left.shape[1], device=tokens.device) != tokens.unsqueeze(-1))
        context = _context(self.mean, self._ends(tokens).unsqueeze(1))
        glimpse = self.model.glimpse(self.nodes_of_glimpse, Padding(self.left), z=context)
        logits = self.model.pointer.basis(self.choice, z=glimpse).dense()
        return logits.flatten(1).masked_fill(~self.left, -torch.inf)

    def reorder(self, samples: Tensor) -> None:
        self.nodes, self.mean, self.left = self.nodes[samples], self.mean[samples], self.left[samples]
        self.nodes_of_glimpse, self.choice = self.nodes_of_glimpse.reorder(samples), self.choice.reorder(samples)
        self.first = None if self.first is None else self.first[samples]

    def _ends(self, tokens: Tensor) -> Tensor:
        """Return the last node and the first, (B, 2 P)."""
        if int(tokens[0]) == BEGIN:
            return self.model.before.expand(len(tokens), -1)
        last = self.nodes[torch.arange(len(tokens), device=tokens.device), tokens]
        self.first = last if self.first is None else self.first
        return torch.cat([last, self.first], -1)


class EncoderBlock(nn.Module):
    """x = norm(x + attention(x)), then norm(x + W_2 relu(W_1 x + b_1) + b_2), norms over a batch's nodes (eq. 2, 3)."""

    def __init__(self, channels: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.attention = MultiheadAttention(channels, heads, bias=False)
        self.network = nn.Sequential(Linear(channels, hidden), nn.ReLU(), Linear(hidden, channels))
        self.norms = nn.ModuleList(nn.BatchNorm1d(channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, (self.attention, self.network), strict=True):
            x = norm((x + layer(x)).flatten(0, 1)).view_as(x)
        return x


def _context(mean: Tensor, ends: Tensor) -> Tensor:
    """Return [mean h; last node; first node] (B, S, 3 P) of a mean (B, 1, P) and both ends (B, S, 2 P)."""
    return torch.cat([mean.expand(-1, ends.shape[1], -1), ends], -1)
