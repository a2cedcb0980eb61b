"""Scenes: what is drawn are pictures, the same for the same arguments, and what moves has its frames."""

import io

import pytest
import torch

from structconv_systems.pictures import agreement, graphs, images_gif, map_of, motion_gif, paths, videos

pytest.importorskip("matplotlib")
POINTS = torch.rand(4, 2, generator=torch.Generator().manual_seed(0))
WAYS = torch.rand(6, 4, 2, generator=torch.Generator().manual_seed(1))
DRAWINGS = {
    "agreement": lambda: agreement({"train": (POINTS[:, 0], POINTS[:, 1]), "test": (torch.zeros(1), torch.ones(1))}),
    "graphs": lambda: graphs(POINTS, {"pairs": torch.tensor([[0, 1], [1, 2]]), "weights": torch.eye(4).roll(1, 0)}),
    "paths": lambda: paths({"true": WAYS, "predicted": WAYS + 0.1}),
    "map": lambda: map_of(POINTS, {"error": torch.arange(4.0)}, label="mph"),
    "videos": lambda: videos({"seen": torch.eye(5).expand(3, 5, 5), "came": torch.rand(
        4, 5, 5, generator=torch.Generator().manual_seed(3))}),
}
VIDEOS = {"motion": lambda: motion_gif({"true": WAYS}), "images": lambda: images_gif({"frames": torch.rand(
    6, 5, 5, generator=torch.Generator().manual_seed(2))})}


@pytest.mark.parametrize("name", DRAWINGS)
def test_drawings_are_png_and_svg(name):
    drawing = DRAWINGS[name]()
    assert drawing.png.startswith(b"\x89PNG") and drawing.svg.startswith(b"<?xml")
    assert drawing == DRAWINGS[name]()


@pytest.mark.parametrize("name", VIDEOS)
def test_videos_have_a_frame_a_step(name):
    image = pytest.importorskip("PIL.Image").open(io.BytesIO(VIDEOS[name]()))
    assert image.format == "GIF" and image.n_frames == 6
