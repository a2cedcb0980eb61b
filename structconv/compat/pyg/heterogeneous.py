"""`HGTConv`: attention between nodes of several types."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu

from structconv.bases.scores import Bilinear
from structconv.compat.pyg.layer import Layer
from structconv.compat.pyg.linear import LinearByType, draw, parameter_key
from structconv.compat.pyg.operator import attend
from structconv.derived import derived
from structconv.errors import ConfigError
from structconv.structures.graph import Graph
from structconv.weights import EyeBlocks

__all__ = ["HGTConv"]

EdgeType = tuple[str, str, str]


class HGTConv(Layer):
    """Attention of each node to its neighbors of all types, with projections for each type of nodes and of edges (Hu et
    al. 2020). Arguments: those of `torch_geometric.nn.HGTConv`.

    Score of an edge of type r: p_r <q_n, k_m W_r> / sqrt(D); its value: v_m V_r; the softmax is over all types.

    Example:

        >>> from structconv.compat.pyg import HGTConv
        >>> kind = "paper", "cites", "paper"
        >>> layer = HGTConv(8, 4, metadata=(["paper"], [kind]), heads=2)
        >>> layer({"paper": torch.randn(3, 8)}, {kind: torch.tensor([[0, 1], [1, 2]])})["paper"].shape
        torch.Size([3, 4])
    """

    def __init__(self, in_channels: int | dict[str, int], out_channels: int,
                 metadata: tuple[list[str], list[EdgeType]], heads: int = 1, **kwargs: Any) -> None:
        super().__init__("add", node_dim=0, **kwargs)
        if out_channels % heads:
            raise ConfigError("HGTConv", "heads must divide out_channels", f"{heads} and {out_channels}")
        self.node_types, self.edge_types = metadata
        widths = in_channels if isinstance(in_channels, dict) else dict.fromkeys(self.node_types, in_channels)
        self.in_channels, self.out_channels, self.heads = widths, out_channels, heads
        self.dst_node_types = {kind[-1] for kind in self.edge_types}
        dim, kinds = out_channels // heads, heads * len(self.edge_types)
        self.kqv_lin = LinearByType(widths, 3 * out_channels)
        self.out_lin = LinearByType(dict.fromkeys(self.node_types, out_channels), out_channels)
        self.k_rel, self.v_rel = Relations(kinds, dim), Relations(kinds, dim)
        self.skip = nn.ParameterDict({parameter_key(name): nn.Parameter(torch.empty(1)) for name in self.node_types})
        self.p_rel = nn.ParameterDict()
        for kind in self.edge_types:  # one by one, as there: a dictionary would be sorted
            self.p_rel[parameter_key("__".join(kind))] = nn.Parameter(torch.empty(1, heads))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all parameters again, in PyTorch Geometric's order."""
        for child in (self.kqv_lin, self.out_lin, self.k_rel, self.v_rel):
            draw(child)
        for number in (*self.skip.values(), *self.p_rel.values()):
            number.fill_(1.0)

    def forward(self, x_dict: dict[str, Tensor], edge_index_dict: dict[EdgeType, Any]) -> dict[str, Tensor]:
        """x (N_t, P_t) of each type of nodes, edges of each type of edges -> (N_t, Q) of each type of targets."""
        unknown = [kind for kind in edge_index_dict if kind not in self.edge_types]
        if unknown or not edge_index_dict:
            raise ConfigError("HGTConv", f"edge_index_dict must have types among {self.edge_types}", unknown or "none")
        parts = {name: lin.chunk(3, -1) for name, lin in self.kqv_lin(x_dict).items()}
        queries = torch.cat([query for _, query, _ in parts.values()])
        firsts, total = {}, 0
        for name in parts:
            firsts[name], total = total, total + x_dict[name].shape[0]
        keys, values, edges, offsets, rows = [], [], [], [], 0
        for kind, index in edge_index_dict.items():
            key, _, value = parts[kind[0]]
            at = slice(self.edge_types.index(kind), None, len(self.edge_types))
            strength = self.p_rel[parameter_key("__".join(kind))].view(-1, 1, 1)
            keys.append(self._heads(key) @ self.k_rel.weight[at] * strength)
            values.append(self._heads(value) @ self.v_rel.weight[at])
            edges.append(self._graph(index, key, x_dict[kind[-1]]).edge_index)
            offsets.append((rows, firsts[kind[-1]]))
            rows += key.shape[0]
        joined = derived(tuple(edges), ("joined", *offsets), lambda: torch.cat(
            [index + index.new_tensor(offset).unsqueeze(1) for index, offset in zip(edges, offsets, strict=True)], 1))
        heads = torch.cat(values, -2)
        scores = Bilinear(self._heads(queries), torch.cat(keys, -2)).scaled(1 / math.sqrt(heads.shape[-1]))
        graph = Graph(joined, num_inputs=rows, num_outputs=total)
        y = attend(heads.transpose(0, 1).flatten(1), heads, scores, graph)[0]
        outputs = self.out_lin({name: gelu(y[first:first + x_dict[name].shape[0]]) for name, first in firsts.items()
                              if name in self.dst_node_types})
        for name, out in outputs.items():
            if out.shape[-1] == x_dict[name].shape[-1]:
                share = self.skip[parameter_key(name)].sigmoid()
                outputs[name] = share * out + (1 - share) * x_dict[name]
        return outputs

    def _heads(self, flat: Tensor) -> Tensor:
        return EyeBlocks.of(self.heads, flat.shape[-1]).heads(flat)

    def __repr__(self) -> str:
        return f"HGTConv(-1, {self.out_channels}, heads={self.heads})"


class Relations(nn.Module):
    """A square matrix (D, D) for each head and type of edges."""

    def __init__(self, kinds: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(kinds, dim, dim))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.weight.shape[-1])
        self.weight.uniform_(-bound, bound)
