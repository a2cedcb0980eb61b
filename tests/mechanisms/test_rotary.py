"""`Rotary`: both layouts, places, and the scaling of checkpoints, against the formulas written out number by number."""

import math

import pytest
import torch

from structconv import ConfigError, Conv, DotProduct, Rotary
from structconv.mechanisms import LearnedEncoding, SinusoidalEncoding

LLAMA = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def llama_rate(rate: float) -> float:
    """Dubey et al. 2024, as their code has it: by the length of a wave."""
    length = 2 * math.pi / rate
    if length > 64 / 1.0:
        return rate / 8
    if length < 64 / 4.0:
        return rate
    smooth = (64 / length - 1.0) / (4.0 - 1.0)
    return (1 - smooth) * rate / 8 + smooth * rate


def yarn_rate(j: int, rate: float, channels: int) -> float:
    """Peng et al. 2023, section 3.2: by how often a wave turns in the context of training, 32 times and once."""
    def place(turns: float) -> float:
        return channels * math.log(64 / (turns * 2 * math.pi)) / (2 * math.log(10000.0))

    low, high = max(math.floor(place(32)), 0), min(math.ceil(place(1)), channels - 1)
    ramp = min(max((j - low) / (high - low), 0.0), 1.0)
    return rate / 4 * ramp + rate * (1 - ramp)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("scaling", [None, {"type": "linear", "factor": 2.0}, LLAMA, YARN])
def test_pairs_are_turned_by_the_rates_of_the_papers(layout, scaling):
    channels, places = 16, torch.tensor([0, 3, 50])
    t = torch.randn(2, 3, channels, dtype=torch.float64)
    y = Rotary(layout=layout, scaling=scaling)(t, places)
    kind = None if scaling is None else scaling.get("rope_type", scaling.get("type"))
    gain = 0.1 * math.log(4.0) + 1 if kind == "yarn" else 1.0
    for j in range(channels // 2):
        rate = 10000.0 ** (-2 * j / channels)
        rate = {None: lambda r: r, "linear": lambda r: r / 2, "llama3": llama_rate,
                "yarn": lambda r: yarn_rate(j, r, channels)}[kind](rate)  # noqa: B023 - called at once
        first, second = (2 * j, 2 * j + 1) if layout == "interleaved" else (j, j + channels // 2)
        for m, place in enumerate(places.tolist()):
            cos, sin = math.cos(place * rate), math.sin(place * rate)
            torch.testing.assert_close(y[:, m, first], gain * (t[:, m, first] * cos - t[:, m, second] * sin))
            torch.testing.assert_close(y[:, m, second], gain * (t[:, m, first] * sin + t[:, m, second] * cos))


def test_the_first_channels_only_and_positions_of_each_sample():
    t = torch.randn(5, 8)
    y = Rotary(channels=4)(t)
    torch.testing.assert_close(y[:, :4], Rotary()(t[:, :4]))
    assert torch.equal(y[:, 4:], t[:, 4:])
    t, places = torch.randn(2, 3, 4, 8), torch.tensor([[0, 1, 2, 3], [5, 6, 7, 9]])
    expected = [Rotary()(own, at) for own, at in zip(t, places, strict=True)]
    torch.testing.assert_close(Rotary()(t, places), torch.stack(expected))


@pytest.mark.parametrize("options", [
    {"layout": "quarters"}, {"scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"scaling": {"rope_type": "linear"}},
    {"scaling": {**LLAMA, "beta": 1}}, {"channels": 3}, {"channels": 10}])
def test_what_is_not_known_is_told(options):
    with pytest.raises(ConfigError, match="Rotary"):
        Conv(DotProduct(heads=1, dim=8, rotary=Rotary(**options)).softmax(), 4, 4)(torch.zeros(2, 4))


@pytest.mark.parametrize("encoding", [SinusoidalEncoding(8), LearnedEncoding(20, 8)])
def test_encodings_of_places(encoding):
    x = torch.randn(2, 9, 8)
    whole, places = encoding(x), torch.tensor([6, 2])
    torch.testing.assert_close(encoding(x[:, 4:], 4), whole[:, 4:])
    torch.testing.assert_close(encoding(x[:, places], places), whole[:, places])
