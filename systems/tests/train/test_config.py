"""Recipes: overrides, conversion, bounds, suggestions, JSON."""

import dataclasses

import pytest

from structconv.errors import ConfigError
from structconv_systems.train.config import Recipe, from_json, option, options, resolve, to_json


@dataclasses.dataclass(frozen=True, kw_only=True)
class Toy(Recipe):
    name = "toy"
    hidden: int = option(16, "units", minimum=1)
    dropout: float = option(0.5, "share dropped", minimum=0, below=1)
    bias: bool = option(True, "whether to add one")
    data: str = option("", "folder")
    seeds: tuple[int, ...] = option((0, 1), "seeds", minimum=0)


def test_overrides_are_converted():
    toy = resolve(Toy, ["hidden=32", "dropout=0", "bias=no", "data=a=b", "seeds=3,4,5"])
    assert toy == Toy(hidden=32, dropout=0.0, bias=False, data="a=b", seeds=(3, 4, 5))
    assert isinstance(toy.dropout, float)


@pytest.mark.parametrize(("override", "message"), [
    ("hiden=3", r"toy: a key must be one of the recipe's; got 'hiden'\. Did you mean 'hidden'\?"),
    ("zzz=3", "Known: threads, device, compile, hidden, dropout, bias, data, seeds"),
    ("hidden", "must read key=value"),
    ("hidden=3.5", "hidden must be an integer; got '3.5'"),
    ("hidden=0", "hidden must be at least 1; got 0"),
    ("dropout=1", "dropout must be below 1"),
    ("dropout=nan", "dropout must be a number"),
    ("bias=maybe", "bias must be true or false"),
    ("seeds=1,x", "seeds must be an integer; got 'x'"),
    ("seeds=-1", "seeds must be at least 0"),
])
def test_bad_overrides_are_named(override, message):
    with pytest.raises(ConfigError, match=message):
        resolve(Toy, [override])


def test_a_key_given_twice_is_refused():
    with pytest.raises(ConfigError, match="hidden must be given once"):
        resolve(Toy, ["hidden=3", "hidden=4"])


def test_python_values_are_checked_too():
    with pytest.raises(ConfigError, match="hidden must be an integer; got True"):
        Toy(hidden=True)
    with pytest.raises(ConfigError, match=r"hidden must be an integer; got 2\.0"):
        resolve(Toy, {"hidden": 2.0})
    with pytest.raises(dataclasses.FrozenInstanceError):
        Toy().hidden = 3


def test_json_round_trip_and_strictness():
    toy = Toy(hidden=3, seeds=(7,))
    assert from_json(Toy, to_json(toy)) == toy
    with pytest.raises(ConfigError, match="recipe 'toy'"):
        from_json(Toy, '{"recipe": "other"}')
    with pytest.raises(ConfigError, match="must be JSON"):
        from_json(Toy, "{")
    with pytest.raises(ConfigError, match="Did you mean 'bias'"):
        from_json(Toy, '{"recipe": "toy", "biass": true}')


def test_options_carry_defaults_and_help():
    assert [(o.key, o.default) for o in options(Toy)][:5] == [
        ("threads", 1), ("device", "cpu"), ("compile", False), ("hidden", 16), ("dropout", 0.5)]
    assert options(Toy)[3].help == "units"
