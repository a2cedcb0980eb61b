"""R-GCN (Schlichtkrull et al. 2018): classes of entities, and links by DistMult."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.nn import functional as F

from structconv.bases.typed import relational
from structconv.derived import derived
from structconv.errors import ConfigError, StructureError
from structconv.mechanisms import Adjacency, DotProduct
from structconv.nn import Conv, RelationalConv
from structconv.shapes import check_positive
from structconv.structures import Graph, KnowledgeGraph
from structconv.weights import Eye

__all__ = ["EntityClassifier", "EntityTable", "LinkPredictor"]


class EntityTable(nn.Module):
    """y_n = sum_r mean_(m: m -r-> n) e_mr + e_n + b: a `RelationalConv` of entities without features, x = I.

    x_m Theta_r is row m of Theta_r. Only the rows of the U <= T different pairs (m, r) of heads and relations are
    stored and trained; the others of these K M rows would never get a gradient. The basis leads from these U pairs to N
    entities, A[(m, r), n] = 1 / (neighbors of n under r).

    Args:
        graph: whose pairs have rows. channels: Q.

    Calling it: the same graph, or one of some of its triples -> (N, Q). O(T Q) flops, O((U + N) Q) memory.

    Raises:
        StructureError: in a call, the graph has other numbers of entities or relations, or a pair without a row.

    Example:

        >>> from structconv import KnowledgeGraph
        >>> from structconv_systems.models.rgcn import EntityTable
        >>> graph = KnowledgeGraph(torch.tensor([[0, 0, 1], [1, 1, 2]]), 3, ("knows", "likes"))
        >>> EntityTable(graph, channels=4)(graph).shape
        torch.Size([3, 4])
    """

    def __init__(self, graph: KnowledgeGraph, channels: int) -> None:
        super().__init__()
        self.sizes = graph.num_entities, graph.num_relations
        self.register_buffer("pairs", _pairs(graph).unique())
        self.rows = nn.Parameter(torch.empty(len(cast(Tensor, self.pairs)), channels))
        self.own = nn.Parameter(torch.empty(graph.num_entities, channels))
        self.conv = Conv(Adjacency(normalize=None), channels, channels, weight=Eye())
        bound = (6 / (graph.num_entities + channels)) ** 0.5  # Glorot's, of each whole Theta_r (N, Q)
        for table in (self.rows, self.own):
            nn.init.uniform_(table, -bound, bound)

    def forward(self, graph: KnowledgeGraph) -> Tensor:
        if (graph.num_entities, graph.num_relations) != self.sizes:
            raise StructureError("EntityTable", f"the graph must have (entities, relations) = {self.sizes}",
                                 f"({graph.num_entities}, {graph.num_relations})")
        edges = derived((graph.triples, cast(Tensor, self.pairs)), ("from pairs", self.sizes, self.rows.dtype),
                        lambda: self._edges(graph))
        y: Tensor = self.conv(self.rows, structure=edges)
        return y + self.own

    def _edges(self, graph: KnowledgeGraph) -> Graph:
        """Return the graph from the row of each triple to its tail."""
        known, pairs = F.pad(cast(Tensor, self.pairs), (0, 1), value=-1), _pairs(graph)
        rows = torch.searchsorted(known[:-1], pairs)
        rows = torch.where(known[rows] == pairs, rows, -1)  # a traced program refuses such an edge as it runs
        if not is_compiling() and bool((rows < 0).any()):
            raise StructureError("EntityTable", "each (head, relation) must be one that it was made with", "another",
                                 "Make it with the graph of all triples.")
        return Graph(torch.stack([rows, graph.triples[:, 2]]), num_inputs=len(self.rows),
                     num_outputs=graph.num_entities, edge_weight=relational(graph, "row", self.rows.dtype).values)


def _pairs(graph: KnowledgeGraph) -> Tensor:
    """Number the (head, relation) of each triple."""
    return graph.triples[:, 0].long() * graph.num_relations + graph.triples[:, 1].long()


class EntityClassifier(nn.Module):
    """softmax(R-GCN(relu(R-GCN(I)))): classes of entities that have no features (Schlichtkrull et al. 2018, eq. 2, 5).

    Args:
        graph: with the inverse of each relation. hidden: channels between the two layers. classes: Q.
        num_bases: number of bases of the second layer's weights, eq. 3; default: a matrix for each relation.
        dropout: probability of dropout on the hidden units.

    Calling it: the graph -> logits (N, Q).

    Example:

        >>> from structconv import KnowledgeGraph
        >>> from structconv_systems.models.rgcn import EntityClassifier
        >>> graph = KnowledgeGraph(torch.tensor([[0, 0, 1], [1, 1, 2]]), 3, ("knows", "likes"))
        >>> EntityClassifier(graph, hidden=8, classes=2).eval()(graph).shape
        torch.Size([3, 2])
    """

    def __init__(self, graph: KnowledgeGraph, hidden: int, classes: int, *, num_bases: int | None = None,
                 dropout: float = 0.0) -> None:
        super().__init__()
        self.first = EntityTable(graph, hidden)
        self.second = RelationalConv(hidden, classes, graph.num_relations, num_bases=num_bases)
        self.dropout = nn.Dropout(dropout)

    def forward(self, graph: KnowledgeGraph) -> Tensor:
        logits: Tensor = self.second(self.dropout(F.relu(self.first(graph))), graph)
        return logits


class LinkPredictor(nn.Module):
    """s(m, r, n) = <h_m, R_r h_n> with R_r diagonal (DistMult; Yang et al. 2015), h = e + R-GCN layers over e.

    Without layers h = e is a learned table: DistMult itself.

    Args:
        entities, relations: N and the relations of the graph, inverses included; a query may ask for any of them.
        channels: D. layers: of the encoder. num_blocks, num_bases: of its weights, eq. 4 or eq. 3.
        dropout: of e, and of the hidden units between layers.

    Calling it: the graph that is known, queries (B, 2) of a head m and a relation r -> scores (B, N) of all tails.
    O(layers (T D + N K D^2 / num_blocks) + B N D).

    Example:

        >>> from structconv import KnowledgeGraph
        >>> from structconv_systems.models.rgcn import LinkPredictor
        >>> graph = KnowledgeGraph(torch.tensor([[0, 0, 1], [1, 1, 2]]), 3, ("knows", "likes"))
        >>> model = LinkPredictor(entities=3, relations=2, channels=8).eval()
        >>> model(graph, torch.tensor([[0, 1]])).shape     # scores of all tails of (entity 0, "likes", ?)
        torch.Size([1, 3])
    """

    def __init__(self, entities: int, relations: int, channels: int, *, layers: int = 0, num_blocks: int | None = None,
                 num_bases: int | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        if layers < 0:
            raise ConfigError("LinkPredictor", "layers must be at least 0", layers)
        self.entities = nn.Embedding(check_positive("LinkPredictor", "entities", entities), channels)
        self.relations = nn.Embedding(check_positive("LinkPredictor", "relations", relations), channels)
        self.layers = nn.ModuleList(RelationalConv(channels, channels, relations, num_blocks=num_blocks,
                                                   num_bases=num_bases) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.scores = DotProduct().bound(channels)
        for table in (self.entities, self.relations):
            nn.init.normal_(table.weight, std=channels ** -0.25)

    def forward(self, graph: KnowledgeGraph, queries: Tensor) -> Tensor:
        h = self.encoded(graph)
        queries_of_entities = h[queries[:, 0]] * self.relations(queries[:, 1])
        return self.scores.basis(h, z=queries_of_entities).dense().squeeze(-3).mT

    def encoded(self, graph: KnowledgeGraph) -> Tensor:
        """Return h of the entities, (N, D)."""
        h: Tensor = self.dropout(self.entities.weight)
        for place, layer in enumerate(self.layers):
            update = layer(h, graph)
            h = h + (update if place + 1 == len(self.layers) else self.dropout(F.relu(update)))
        return h
