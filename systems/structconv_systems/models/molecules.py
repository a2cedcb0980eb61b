"""The message passing network of Gilmer et al. (2017), a number for each molecule; and ensembles of networks."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv.nn import EdgeConditionedConv, GraphPool, Linear
from structconv.shapes import check_positive
from structconv.structures import Graph

__all__ = ["Ensemble", "MessagePassing"]


class MessagePassing(nn.Module):
    """h_n = GRU(h_n, sum_(e: m -> n) h_m A(e) + b), T times from h_n = relu(W x_n); y = f(readout of [h_n; x_n] W').

    The edge network g maps the attributes of a bond to the matrix A(e) = Theta_0 + sum_k g_k(e) Theta_k. Messages and
    the gated unit are the same in each step (Gilmer et al. 2017, eq. 1 and 2, section 5: "edge network", "set2set").

    Args:
        atom_channels: of x. bond_channels: of `graph.edge_attr`.
        channels: C of h. edge_hidden: units of g. message_steps: T.
        readout: "set2set", or another kind of `GraphPool`. readout_steps: of set2set.
        dropout: of hidden units of f.
        mean, deviation: of the targets; f predicts them standardized.

    Calling it: x (N, P) of the atoms and a graph, or a `batch` of B of them -> (B,). O(T N K C^2) flops, or O(T (U K +
    E) C^2) for U kinds of bonds; never a matrix for each bond.

    Example:

        >>> from structconv import Graph, batch
        >>> from structconv_systems.models.molecules import MessagePassing
        >>> bond = Graph(torch.tensor([[0, 1], [1, 0]]), num_nodes=2, edge_attr=torch.ones(2, 3))
        >>> model = MessagePassing(4, 3, channels=8, edge_hidden=8).eval()
        >>> model(torch.randn(4, 4), batch([bond, bond])).shape                # one number a molecule
        torch.Size([2])
    """

    def __init__(self, atom_channels: int, bond_channels: int, *, channels: int = 64, edge_hidden: int = 64,
                 message_steps: int = 3, readout: str = "set2set", readout_steps: int = 3, dropout: float = 0.0,
                 mean: float = 0.0, deviation: float = 1.0) -> None:
        super().__init__()
        self.message_steps = check_positive("MessagePassing", "message_steps", message_steps)
        self.register_buffer("mean", torch.tensor(mean))
        self.register_buffer("deviation", torch.tensor(deviation))
        self.embed = Linear(atom_channels, channels)
        self.messages = EdgeConditionedConv(channels, channels, bond_channels, edge_hidden, root_weight=False)
        self.update = nn.GRUCell(channels, channels)
        self.join = Linear(channels + atom_channels, channels)
        self.pool = GraphPool(channels, readout, steps=readout_steps)
        self.predict = nn.Sequential(Linear(self.pool.out_channels, channels), nn.ReLU(), nn.Dropout(dropout),
                                     Linear(channels, 1))

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        h = F.relu(self.embed(x))
        for _ in range(self.message_steps):
            h = self.update(self.messages(h, graph), h)
        y = self.predict(self.pool(self.join(torch.cat([h, x], -1)), graph)).squeeze(-1)
        return cast(Tensor, self.mean) + cast(Tensor, self.deviation) * y

    @property
    def variance(self) -> float:
        """The variance of the targets."""
        return float(cast(Tensor, self.deviation)) ** 2


class Ensemble(nn.Module):
    """The mean of models that differ in their first weights (Hansen and Salamon 1990); in training the output of each,
    which learns by itself.

    Calling it: inputs of the models, which return (B,) -> (B,), or (M, B) of M models in training.

    Raises:
        ConfigError: there is no model.

    Example:

        >>> from structconv import Graph, batch
        >>> from structconv_systems.models.molecules import Ensemble, MessagePassing
        >>> bond = Graph(torch.tensor([[0, 1], [1, 0]]), num_nodes=2, edge_attr=torch.ones(2, 3))
        >>> model = Ensemble(MessagePassing(4, 3, channels=8, edge_hidden=8) for _ in range(3))
        >>> model(torch.randn(4, 4), batch([bond, bond])).shape
        torch.Size([3, 2])
        >>> model.eval()(torch.randn(4, 4), batch([bond, bond])).shape
        torch.Size([2])
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        check_positive("Ensemble", "members", len(self.members))

    def forward(self, *inputs: Any) -> Tensor:
        outputs = torch.stack([member(*inputs) for member in self.members])
        return outputs if self.training else outputs.mean(0)
