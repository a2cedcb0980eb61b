"""What tests of models over images share."""

import torch


def drawn(count=6, side=12, classes=3, seed=0):
    """Random images (B, side, side), and a label of each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, side, side, generator=generator), torch.arange(count) % classes
