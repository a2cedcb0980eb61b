"""Options of models that do not fit each other."""

from functools import partial

import pytest

from structconv.errors import ConfigError
from structconv_systems.models.architectures import layer_of, predicted
from structconv_systems.models.convlstm import ConvLSTM
from structconv_systems.models.luong import Luong, alignment
from structconv_systems.models.mnist_cheb import GridLeNet
from structconv_systems.models.molecules import MessagePassing
from structconv_systems.models.non_local import NonLocalNetwork
from structconv_systems.models.pervasive import Pervasive
from structconv_systems.models.pooling import PoolingClassifier
from structconv_systems.models.series import Forecaster
from structconv_systems.models.tours import TourModel
from structconv_systems.models.transformer import Transformer

CASES = [(make, options, said) for make, cases in (
    (partial(Luong, 13, 13), [
        ({"score": None, "window": "local-m", "radius": 2}, "left out with score=None; got 'local-m', 2 and None"),
        ({"score": "cosine"}, "score must be one of 'location'"), ({"window": "wide"}, "window must be one of"),
        ({"window": "local-m"}, "radius must be given with window='local-m'"), ({"radius": 3}, "radius must be left"),
        ({"score": "location"}, "length must be given"), ({"length": 7}, "length must be left out"),
        ({"window": "local-p", "radius": 0}, "radius"), ({"score": "location", "length": -1}, "length")]),
    (alignment, [({"score": "additive"}, "dim must be given")]),
    (partial(Transformer, 13, channels=16), [
        ({"heads": 3}, "heads must divide"), ({"norm": "none"}, "norm"), ({"positions": "rotary"}, "positions"),
        ({"layers": 0}, "layers")]),
    (partial(ConvLSTM, size=8, ahead=2), [({"patch": 3}, "patch"), ({"ahead": 0}, "ahead"), ({"layers": 0}, "layers")]),
    (partial(MessagePassing, 8, 2), [
        ({"readout": "median"}, "kind must be one of"), ({"message_steps": 0}, "message_steps"),
        ({"edge_hidden": 0}, "hidden must be")]),
    (partial(Pervasive, 13, 13), [({"kernel": 4}, "odd"), ({"pooling": "mean"}, "pooling")]),
    (partial(Forecaster, history=24, horizon=4), [
        ({"patch": 5}, "patch"), ({"patch": 3}, "patch"), ({"attention": "self"}, "attention")]),
    (TourModel, [({"heads": 3}, "heads"), ({"layers": 0}, "layers")]),
    (layer_of, [({"architecture": "perceptron", "channels": 8}, "architecture"),
                ({"architecture": "attention", "channels": 8, "heads": 3}, "heads")]),
    (partial(predicted, entries=8, channels=8, kernel=3), [({"architecture": "perceptron"}, "architecture")]),
    (GridLeNet, [({"shape": (3, 12), "classes": 2, "channels": (2, 2)}, "sides halved")]),
    (partial(PoolingClassifier, length=6, in_channels=9, classes=3), [({"name": "maximum"}, "name")]),
    (NonLocalNetwork, [({"classes": 3, "function": "cosine"}, "function")])) for options, said in cases]


@pytest.mark.parametrize(("make", "options", "said"), CASES)
def test_options_that_do_not_fit(make, options, said):
    with pytest.raises(ConfigError, match=said):
        make(**options)
