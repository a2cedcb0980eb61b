"""A small CNN with or without a non-local block, by which each pixel reads all others (Wang et al. 2018)."""

from typing import cast

import torch
from torch import Tensor, nn

from structconv.errors import ConfigError
from structconv.nn import Conv2d, Linear, NonLocalBlock, to_entries, to_image
from structconv.shapes import check_choice

__all__ = ["FUNCTIONS", "NonLocalNetwork"]

FUNCTIONS = ("none", *NonLocalBlock.FUNCTIONS)


class NonLocalNetwork(nn.Module):
    """Logits W mean_n h_n of pixels: h = conv 3x3/2, conv 3x3, x + block, conv 3x3/2 of an image, each conv with a
    batch norm and a ReLU.

    Without a block a pixel of h has a receptive field of 11 x 11, and the logits are a mean over such patches, so that
    they cannot depend on the relation of two patches. With a block, x_n + (sum_m f(x_m, x_n) x_m V) O / C(x), each
    pixel reads all.

    Args:
        classes: number of logits. function: f, see `NonLocalBlock`, or "none". channels: channels of the layers; the
            first has half of them. inner: channels within the block.

    Calling it: images (B, H, W) -> (B, classes). The block reads H / 2 x W / 2 pixels.

    Example:

        >>> from structconv_systems.models.non_local import NonLocalNetwork
        >>> model = NonLocalNetwork(classes=2, channels=8, inner=4).eval()
        >>> model(torch.rand(2, 16, 16)).shape
        torch.Size([2, 2])
    """

    def __init__(self, classes: int, *, function: str = "embedded_gaussian", channels: int = 32,
                 inner: int = 16) -> None:
        super().__init__()
        check_choice("NonLocalNetwork", "function", function, FUNCTIONS)
        self.features = nn.Sequential(*_conv(1, channels // 2, 2), *_conv(channels // 2, channels, 1))
        self.block = None if function == "none" else NonLocalBlock(channels, inner, function)
        self.last = nn.Sequential(*_conv(channels, channels, 2))
        self.classify = Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.features(images.unsqueeze(1))
        x = self.last(x if self.block is None else self.block(x))
        return cast(Tensor, self.classify(to_entries(x, 2)[0].mean(-2)))

    @torch.no_grad()
    def looks(self, image: Tensor, place: tuple[int, int]) -> Tensor:
        """Return the weights of all pixels for the one at a place of the block, (H / 2, W / 2), of one image (H, W).

        Raises:
            ConfigError: the model has no block.
        """
        if self.block is None:
            raise ConfigError("looks", "the model must have a block", "NonLocalNetwork(function='none')")
        x = self.features(image[None, None])
        _, grid = to_entries(x, 2)
        entry = int(grid.ravel(torch.tensor(place)))
        return to_image(self.block.basis(x).dense()[0, 0, :, entry].unsqueeze(-1), grid)[0]


def _conv(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
    return [Conv2d(inputs, outputs, 3, stride=stride, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
