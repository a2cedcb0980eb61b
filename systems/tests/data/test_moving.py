"""Videos of images that move: whole images inside of the frame, straight ways that bounce, and a seed that decides."""

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.data.moving import Videos

IMAGES = torch.rand(5, 4, 6, generator=torch.Generator().manual_seed(0)) + 0.1


def drawn(**options):
    return Videos.drawn(IMAGES, **{"videos": 20, "frames": 30, "size": 16, "seed": 3, **options})


def test_images_are_whole_and_stand_in_their_positions():
    videos = drawn(digits=1)
    frames = videos.at(torch.arange(20))
    assert frames.shape == (20, 30, 16, 16)
    for video, time in ((0, 0), (7, 12), (19, 29)):
        row, column = videos.positions[video, 0, time].tolist()
        expected = torch.zeros(16, 16)
        expected[row:row + 4, column:column + 6] = IMAGES[videos.chosen[video, 0]]
        assert torch.equal(frames[video, time], expected)


def test_of_two_the_brighter_pixel_is_seen():
    videos = drawn()
    single = [Videos(images=IMAGES, chosen=videos.chosen[:, i:i + 1], positions=videos.positions[:, i:i + 1], size=16)
             for i in range(2)]
    chosen = torch.tensor([4, 2])
    assert torch.equal(videos.at(chosen), torch.maximum(*(own.at(chosen) for own in single)))


def test_ways_are_straight_and_bounce_off_the_sides():
    videos = drawn(videos=300, speed=0.02, size=206)
    room = torch.tensor([202, 200])
    assert videos.positions.min() == 0 and torch.equal(videos.positions.amax((0, 1, 2)), room)
    steps = videos.positions.diff(dim=2).double() / room
    assert steps.norm(dim=-1).max() < 0.02 + 2 / 200
    straight = ((videos.positions > 15) & (videos.positions < room - 15)).all(-1).all(-1).all(-1)
    assert straight.any()
    assert (videos.positions[straight].diff(n=2, dim=2).abs() <= 2).all()


def test_a_seed_decides_all():
    one, same, other = drawn(), drawn(), drawn(seed=4)
    assert torch.equal(one.at(torch.arange(3)), same.at(torch.arange(3))) and len(one) == 20
    assert not torch.equal(one.positions, other.positions)


def test_images_must_be_smaller_than_a_frame():
    with pytest.raises(ConfigError, match=r"size must be above that of the images, \(4, 6\); got 6"):
        drawn(size=6)
