"""Videos of images that move and bounce off the sides: the next frame is determined, and no two videos are equal."""

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.errors import ConfigError

__all__ = ["Videos"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Videos:
    """F videos of T square frames, in each of which D images move (moving MNIST: Srivastava et al. 2015, section 4.1).

    A frame is drawn on request; `chosen` and `positions` define the videos.

    Attributes:
        images: (S, H, W), float32 in [0, 1].
        chosen: (F, D), numbers of the images in each video.
        positions: (F, D, T, 2), the row and column of their first pixels.
        size: rows and columns of a frame.

    Example:

        >>> from structconv_systems.data.moving import Videos
        >>> videos = Videos.drawn(torch.rand(10, 8, 8), 3, frames=5, size=24, seed=0)
        >>> videos.at(torch.tensor([0, 2])).shape          # two of them, drawn now
        torch.Size([2, 5, 24, 24])
    """

    images: Tensor
    chosen: Tensor
    positions: Tensor
    size: int

    @classmethod
    def drawn(cls, images: Tensor, videos: int, *, frames: int, size: int, digits: int = 2, speed: float = 0.1,
              seed: int = 0) -> Self:
        """Draw videos of images that start anywhere and move straight on in any direction.

        Args:
            images: (S, H, W), float32 in [0, 1]. videos: F. frames: T. size: of a frame. digits: D.
            speed: of an image in a frame, as a share of its free space. seed: of all draws.

        Raises:
            ConfigError: the images are not smaller than a frame.
        """
        room = torch.tensor([size - side for side in images.shape[1:]])
        if room.min() < 1:
            raise ConfigError("Videos", f"size must be above that of the images, {tuple(images.shape[1:])}", size)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(images), (videos, digits), generator=generator)
        begin = torch.rand(videos, digits, 1, 2, generator=generator)
        angle = 2 * math.pi * torch.rand(videos, digits, 1, 1, generator=generator)
        way = begin + speed * torch.arange(frames).unsqueeze(-1) * torch.cat([angle.sin(), angle.cos()], -1)
        bounced = 1 - (way.remainder(2) - 1).abs()
        return cls(images=images, chosen=chosen, positions=(bounced * room).round().long(), size=size)

    def __len__(self) -> int:
        return len(self.chosen)

    def at(self, videos: Tensor) -> Tensor:
        """Return the frames of some videos, (B, T, size, size); the brighter pixel wins. O(B D T size^2)."""
        padded = F.pad(self.images[self.chosen[videos]], (1, 1, 1, 1))
        rows, columns = ((torch.arange(self.size) - place.unsqueeze(-1) + 1).clamp(0, side + 1) for place, side in
                         zip(self.positions[videos].unbind(-1), self.images.shape[1:], strict=True))
        video, image = torch.arange(len(videos)).view(-1, 1, 1, 1, 1), torch.arange(rows.shape[1]).view(-1, 1, 1, 1)
        return padded[video, image, rows.unsqueeze(-1), columns.unsqueeze(-2)].amax(1)
