"""Images by filters on the graph of their pixels, and by a CNN of the same size (Defferrard et al. 2016)."""

from collections.abc import Sequence
from itertools import pairwise
from typing import cast

from torch import Tensor, nn
from torch.nn import functional as F

from structconv.nn import ChebConv, Conv2d, GroupPool, Linear, StructureBuffer
from structconv.shapes import check_positive
from structconv.structures import Graph, Grid
from structconv.structures.coarsening import coarsened, nearest_neighbors

__all__ = ["GraphLeNet", "GridLeNet", "pixel_graph"]


def pixel_graph(height: int, width: int, neighbors: int = 8) -> Graph:
    """The pixels of an image, each joined to its nearest ones with Gaussian weights; see `nearest_neighbors`.

    Example:

        >>> from structconv_systems.models.mnist_cheb import pixel_graph
        >>> pixel_graph(8, 8, neighbors=4)
        Graph(M=64, N=64, E=286, int64, weighted)
    """
    return nearest_neighbors(Grid((height, width)).coordinates().float(), neighbors)


class GraphLeNet(nn.Module):
    """Logits of signals on a graph: for each level the maximum over clusters of ReLU(sum_k T_k(L)^T x Theta_k + b),
    then a network with one hidden layer.

    GC32-P4-GC64-P4-FC512 by default (Defferrard et al. 2016, section 5.1, table 1). P4 is the maximum over clusters of
    nodes that are paired twice, see `coarsened`, without fake nodes.

    Args:
        graph: of the N numbers of a signal. classes: number of logits. channels: of each level. order: K, polynomials
            of a filter. hidden: channels of the hidden layer. dropout: probability of dropout on these.

    Calling it: signals (B, N), or images (B, H, W) of N pixels -> (B, classes).

    Example:

        >>> from structconv_systems.models.mnist_cheb import GraphLeNet, pixel_graph
        >>> model = GraphLeNet(pixel_graph(8, 8), classes=10, channels=(4, 8), order=3, hidden=16).eval()
        >>> model(torch.rand(2, 8, 8)).shape
        torch.Size([2, 10])
    """

    def __init__(self, graph: Graph, classes: int, *, channels: Sequence[int] = (32, 64), order: int = 25,
                 hidden: int = 512, dropout: float = 0.5) -> None:
        super().__init__()
        self.graphs, self.clusters, self.filters, self.pools = (nn.ModuleList() for _ in range(4))
        for inputs, outputs in pairwise((1, *channels)):
            clusters, coarser = coarsened(graph, 2)
            self.graphs.append(StructureBuffer(graph, persistent=False))
            self.clusters.append(StructureBuffer(clusters, persistent=False))
            self.filters.append(ChebConv(inputs, outputs, order))
            self.pools.append(GroupPool(outputs, "max"))
            graph = coarser
        self.classify = _classifier(graph.num_nodes * channels[-1], hidden, classes, dropout)

    def forward(self, signals: Tensor) -> Tensor:
        x = signals.flatten(1).unsqueeze(-1)
        for graph, clusters, filters, pool in zip(self.graphs, self.clusters, self.filters, self.pools, strict=True):
            x = F.relu(pool(filters(x, graph()), clusters()))
        return cast(Tensor, self.classify(x.flatten(1)))


class GridLeNet(nn.Module):
    """The same network on images, with shifts of the grid instead of polynomials: C32-P4-C64-P4-FC512.

    Args:
        shape: (H, W). kernel: pixels on a side of a filter, odd. classes, channels, hidden, dropout: see `GraphLeNet`.

    Calling it: images (B, H, W) -> (B, classes).

    Example:

        >>> from structconv_systems.models.mnist_cheb import GridLeNet
        >>> model = GridLeNet((16, 16), classes=10, channels=(4, 8), kernel=3, hidden=16).eval()
        >>> model(torch.rand(2, 16, 16)).shape
        torch.Size([2, 10])
    """

    def __init__(self, shape: tuple[int, int], classes: int, *, channels: Sequence[int] = (32, 64), kernel: int = 5,
                 hidden: int = 512, dropout: float = 0.5) -> None:
        super().__init__()
        self.filters = nn.ModuleList(Conv2d(inputs, outputs, kernel, padding=kernel // 2)
                                     for inputs, outputs in pairwise((1, *channels)))
        self.pool = nn.MaxPool2d(2)
        height, width = (check_positive("GridLeNet", "sides halved at each level", side >> len(channels))
                         for side in shape)
        self.classify = _classifier(height * width * channels[-1], hidden, classes, dropout)

    def forward(self, images: Tensor) -> Tensor:
        x = images.unsqueeze(1)
        for filters in self.filters:
            x = F.relu(self.pool(filters(x)))
        return cast(Tensor, self.classify(x.flatten(1)))


def _classifier(inputs: int, hidden: int, classes: int, dropout: float) -> nn.Module:
    return nn.Sequential(Linear(inputs, hidden), nn.ReLU(), nn.Dropout(dropout), Linear(hidden, classes))
