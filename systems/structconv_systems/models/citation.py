"""Two-layer networks for citation graphs: GCN, Chebyshev and GAT, on sparse bags of words."""

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from structconv import STRUCTURE, Adjacency, BiAffine, Chebyshev, Conv, Graph, Identity, Mechanism
from structconv.bases.sparse import Sparse
from structconv.derived import derived
from structconv_systems.models.sparse_input import SparseConv, drop_values

__all__ = ["CitationNetwork", "chebyshev", "gat", "gcn", "perceptron"]


class CitationNetwork(nn.Module):
    """Dropout, sparse first layer, activation, dropout, second layer: words (P -> M) and a graph -> logits (M, Q).

    Example:

        >>> from structconv import Graph
        >>> from structconv.bases import Sparse
        >>> from structconv_systems.models.citation import gcn
        >>> words = Sparse(Graph(torch.tensor([[0, 4, 2], [0, 1, 2]]), num_inputs=5, num_outputs=3), torch.ones(3))
        >>> graph = Graph(torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]]), num_nodes=3)
        >>> model = gcn(5, 2).eval()                       # three papers, five words, two classes
        >>> model(words, graph).shape, type(model).__name__
        (torch.Size([3, 2]), 'CitationNetwork')
    """

    def __init__(self, first: SparseConv, second: Conv, *, dropout: float, activation: Callable[[Tensor], Tensor],
                 self_loops: bool = False) -> None:
        super().__init__()
        self.first, self.second = first, second
        self.dropout, self.activation, self.self_loops = dropout, activation, self_loops

    def forward(self, words: Sparse, graph: Graph) -> Tensor:
        if self.self_loops:
            graph = derived(graph, "with self-loops", graph.with_self_loops)
        words = drop_values(words, self.dropout, self.training)
        h = self.activation(self.first(words, graph))
        return self.second(F.dropout(h, self.dropout, self.training), structure=graph)


def gcn(words: int, classes: int, *, hidden: int = 16, dropout: float = 0.5) -> CitationNetwork:
    """Kipf and Welling (2017), eq. 9: symmetrically normalized adjacency with self-loops; no bias.

    Example:

        >>> from structconv_systems.models.citation import gcn
        >>> gcn(5, 2).second.mechanism                     # see `CitationNetwork` for a call
        Adjacency(self_loops=True)
    """
    return _convolutions(Adjacency(normalize="sym", self_loops=True), words, classes, hidden, dropout)


def perceptron(words: int, classes: int, *, hidden: int = 16, dropout: float = 0.5) -> CitationNetwork:
    """The network of `gcn` without a graph: each paper is classified by its own words.

    Example:

        >>> from structconv_systems.models.citation import perceptron
        >>> perceptron(5, 2).second.mechanism              # see `CitationNetwork` for a call
        Identity()
    """
    return _convolutions(Identity(), words, classes, hidden, dropout)


def chebyshev(words: int, classes: int, *, hidden: int = 16, order: int = 2, dropout: float = 0.5) -> CitationNetwork:
    """Defferrard et al. (2016) as in Kipf and Welling (2017), eq. 5: T_0 to T_order of the Laplacian; no bias.

    Example:

        >>> from structconv_systems.models.citation import chebyshev
        >>> chebyshev(5, 2).second.mechanism               # see `CitationNetwork` for a call
        Chebyshev(2)
    """
    return _convolutions(Chebyshev(order=order), words, classes, hidden, dropout)


def gat(words: int, classes: int, *, heads: int = 8, hidden: int = 8, dropout: float = 0.6,
        uniform: bool = False) -> CitationNetwork:
    """Velickovic et al. (2018), section 3.3: `heads` heads side by side, ELU, one head; each node sees itself too.
    If `uniform`, its attention vectors are zero and do not train, so that all neighbors have the same weight.

    Example:

        >>> from structconv_systems.models.citation import gat
        >>> gat(5, 2, heads=3).first.theta.shape           # see `CitationNetwork` for a call
        torch.Size([3, 5, 8])
    """
    def attention(heads: int) -> Mechanism:
        scores = BiAffine(heads=heads, bilinear=False, on="projected").leaky_relu(0.2)
        return scores.masked(keep=STRUCTURE).softmax().dropout(dropout)

    network = _glorot(CitationNetwork(SparseConv(attention(heads), words, hidden, bias=True, concat=True),
                                      Conv(attention(1), heads * hidden, classes), dropout=dropout, activation=F.elu,
                                      self_loops=True))
    for layer in (network.first, network.second) if uniform else ():
        for vector in layer.mechanism.parameters():
            nn.init.zeros_(vector).requires_grad_(False)
    return network


def _convolutions(mechanism: Mechanism, words: int, classes: int, hidden: int, dropout: float) -> CitationNetwork:
    """Build two layers of a mechanism without parameters."""
    return _glorot(CitationNetwork(SparseConv(mechanism, words, hidden), Conv(mechanism, hidden, classes, bias=False),
                                   dropout=dropout, activation=F.relu))


def _glorot(network: CitationNetwork) -> CitationNetwork:
    """The published initialization of the second layer's weight; `SparseConv` has it already."""
    for theta in network.second.weight.parameters():
        for theta_PQ in theta.data:
            nn.init.xavier_uniform_(theta_PQ)
    return network
