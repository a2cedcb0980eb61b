"""A small network for images as entries on a grid; variants differ in the basis only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from structconv import Adjacency, Basis, Chebyshev, Cuboid, DotProduct, Graph, Grid, Identity, Mechanism
from structconv.nn import Conv, Linear
from structconv.weights import Full, LowRank, Separable, Weight

__all__ = ["VARIANTS", "PixelNetwork", "Variant"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A way of relating pixels: the mechanism and weight of every layer, and the structure they read.

    `learned` says that the basis depends on the image.

    Example:

        >>> from structconv import Identity
        >>> from structconv_systems.models.digits import Variant
        >>> Variant(title="each pixel alone", mechanism=Identity).mechanism()
        Identity()
    """

    title: str
    learned: bool = False
    mechanism: Callable[[], Mechanism]
    weight: Callable[[], Weight | Sequence[Weight]] = Full
    pixel_graph: bool = False


def _attention() -> Mechanism:
    return DotProduct(heads=2, dim=12).scaled().softmax()


VARIANTS: dict[str, Variant] = {
    "identity": Variant(title="1x1 identity", mechanism=Identity),
    "shifts": Variant(title="grid shifts 3x3", mechanism=lambda: Cuboid((3, 3), padding="zeros")),
    "separable": Variant(title="separable shifts", mechanism=lambda: Cuboid((3, 3), padding="zeros"),
                         weight=lambda: Separable(rank=2)),
    "gcn": Variant(title="pixel-graph GCN", pixel_graph=True,
                   mechanism=lambda: Adjacency(normalize="sym", self_loops=True)),
    "chebyshev": Variant(title="pixel-graph Chebyshev", pixel_graph=True, mechanism=lambda: Chebyshev(order=3)),
    "attention": Variant(title="attention", learned=True, mechanism=_attention,
                         weight=lambda: LowRank(12)),
    "mixed": Variant(title="attention | shifts", learned=True,
                     mechanism=lambda: _attention() | Cuboid((3, 3), padding="zeros"),
                     weight=lambda: [LowRank(12), Full()]),
}


class PixelNetwork(nn.Module):
    """Embedding and learned positions, two structured layers with residual connections, mean and maximum, logits.

    Args:
        variant: what relates the pixels. shape: of the pixel grid. channels: of the hidden layers. classes: number of
            logits.

    Calling it: images (B, M, 1) -> logits (B, classes).

    Example:

        >>> from structconv_systems.models.digits import VARIANTS, PixelNetwork
        >>> model = PixelNetwork(VARIANTS["shifts"], (8, 8), channels=8, classes=10).eval()
        >>> model(torch.rand(2, 64, 1)).shape
        torch.Size([2, 10])
    """

    def __init__(self, variant: Variant, shape: tuple[int, ...], *, channels: int, classes: int) -> None:
        super().__init__()
        self.variant, self.shape = variant, shape
        grid = Grid(shape)
        self.structure: Grid | Graph = grid.graph() if variant.pixel_graph else grid
        self.embed = Linear(1, channels)
        self.position = nn.Parameter(0.5 * nn.init.normal_(self.embed.weight.new_empty(grid.num_entries, channels)))
        self.layers = nn.ModuleList(Conv(variant.mechanism(), channels, channels, weight=variant.weight())
                                    for _ in range(2))
        self.classify = Linear(2 * channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        h = self.entries(images)
        return self.classify(torch.cat([h.mean(-2), h.amax(-2)], -1))

    def first_basis(self, image: Tensor) -> Basis:
        """Return the basis of the first layer for one image (M, 1)."""
        layer = cast(Conv, self.layers[0])
        return layer.basis(self.embed(image) + self.position, structure=self.structure)

    def entries(self, images: Tensor, *, smooth: bool = False) -> Tensor:
        """The last hidden embedding of every pixel, (B, M, C); `smooth` for receptive fields: SiLU for ReLU."""
        activation: Any = F.silu if smooth else F.relu
        h = self.embed(images) + self.position
        for layer in self.layers:
            h = h + activation(layer(h, structure=self.structure))
        return h
