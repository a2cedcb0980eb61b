"""Films of images that move and bounce off the sides: the next frame is determined, and no two films are equal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from structconv.errors import ConfigError

__all__ = ["Films"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Films:
    """F films of T square frames, in each of which D images move (moving MNIST: Srivastava et al. 2015, section 4.1).

    A frame is drawn on request; `chosen` and `places` define the films.

    Attributes:
        images: (S, H, W), float32 in [0, 1].
        chosen: (F, D), numbers of the images in each film.
        places: (F, D, T, 2), the row and column of their first pixels.
        size: rows and columns of a frame.
    """

    images: Tensor
    chosen: Tensor
    places: Tensor
    size: int

    @classmethod
    def drawn(cls, images: Tensor, films: int, *, frames: int, size: int, together: int = 2, speed: float = 0.1,
              seed: int = 0) -> Films:
        """Films of images drawn evenly, which begin anywhere and move straight on in any direction.

        Args:
            images: (S, H, W), float32 in [0, 1]. films: F. frames: T. size: of a frame. together: D.
            speed: of an image in a frame, as a share of the room that it has. seed: of all draws.

        Raises:
            ConfigError: the images are not smaller than a frame.
        """
        room = torch.tensor([size - side for side in images.shape[1:]])
        if room.min() < 1:
            raise ConfigError("Films", f"size must be above that of the images, {tuple(images.shape[1:])}", size)
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randint(len(images), (films, together), generator=generator)
        begin = torch.rand(films, together, 1, 2, generator=generator)
        angle = 2 * math.pi * torch.rand(films, together, 1, 1, generator=generator)
        way = begin + speed * torch.arange(frames).unsqueeze(-1) * torch.cat([angle.sin(), angle.cos()], -1)
        bounced = 1 - (way.remainder(2) - 1).abs()
        return cls(images=images, chosen=chosen, places=(bounced * room).round().long(), size=size)

    def __len__(self) -> int:
        return len(self.chosen)

    def at(self, films: Tensor) -> Tensor:
        """The frames of some films, (B, T, size, size): where images overlap, the brighter pixel. O(B D T size^2)."""
        padded = F.pad(self.images[self.chosen[films]], (1, 1, 1, 1))
        rows, columns = ((torch.arange(self.size) - place.unsqueeze(-1) + 1).clamp(0, side + 1) for place, side in
                         zip(self.places[films].unbind(-1), self.images.shape[1:], strict=True))
        film, image = torch.arange(len(films)).view(-1, 1, 1, 1, 1), torch.arange(rows.shape[1]).view(-1, 1, 1, 1)
        return padded[film, image, rows.unsqueeze(-1), columns.unsqueeze(-2)].amax(1)
