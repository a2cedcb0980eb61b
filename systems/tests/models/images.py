"""What tests of models over images share."""

from __future__ import annotations

import torch
from torch.nn import functional as F


def drawn(count=6, side=12, classes=3, seed=0):
    """Random images (B, side, side), and a label of each."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, side, side, generator=generator), torch.arange(count) % classes


def check_overfits(model, images, labels, steps=60, rate=1e-2):
    """The loss of a small batch falls below a tenth."""
    optimizer, losses = torch.optim.Adam(model.parameters(), rate), []
    for _ in range(steps):
        losses.append(F.cross_entropy(model(images), labels))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] / 10


def check_apart(model, images):
    """An image has alone the logits that it has in a batch."""
    torch.testing.assert_close(model(images[1:2]), model(images)[1:2], rtol=1e-5, atol=1e-5)


def check_exported(model, images):
    """With any number of images."""
    samples = torch.export.Dim("samples")
    program = torch.export.export(model, (images,), dynamic_shapes=({0: samples},)).module()
    torch.testing.assert_close(program(images[:3]), model(images[:3]), rtol=1e-5, atol=1e-5)
