"""Presets of all recipes: each resolves, says its goal, and keeps what the user sets."""

import json
import math

import pytest

from structconv.errors import ConfigError
from structconv_systems.recipes.register import RECIPES
from structconv_systems.train.config import from_json, resolve, to_json
from structconv_systems.train.effect import NOT_SHOWN, PARTLY, REPRODUCED, Effect
from structconv_systems.train.options import Measured

NAMES = sorted(name for name, entry in RECIPES.items() if issubclass(entry.recipe, Measured))
PRESETS = [(name, preset) for name, entry in RECIPES.items() if issubclass(entry.recipe, Measured)
           for preset in ("default", *entry.recipe.presets)]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_preset_resolves_and_is_written_down(name, preset, tmp_path):
    kind = RECIPES[name].recipe
    recipe = resolve(kind, ["seeds=7", *([f"data={tmp_path}"] if kind.folder else [])], preset)
    assert recipe.preset == preset
    assert recipe.seeds == 7
    assert from_json(kind, to_json(recipe)) == recipe


def test_an_option_that_a_run_lacks_is_that_of_its_preset():
    recipe = resolve(RECIPES["transformer"].recipe, preset="quick")
    text = json.loads(to_json(recipe))
    del text["rates"], text["channels"]
    assert from_json(type(recipe), json.dumps(text)) == recipe


@pytest.mark.parametrize("name", NAMES)
def test_each_has_a_quick_preset_and_a_published_figure(name):
    kind = RECIPES[name].recipe
    assert "quick" in kind.presets
    assert kind.published
    assert resolve(kind, preset="quick").seeds <= resolve(kind).seeds


@pytest.mark.parametrize("name", [name for name in NAMES if RECIPES[name].recipe.effect is not None])
def test_an_effect_can_be_missed_and_reached(name):
    """Of figures in which the system gains a part of the published effect: less than nothing, 0, a little, all."""
    effect = resolve(RECIPES[name].recipe).expected
    published = effect.published if effect.published is not None else 2.0
    size = math.log(published) if effect.ratio else published

    def state(share, noise=0.0):
        gain = effect.margin + share * (size - effect.margin)
        figures = {}
        for system, baseline in effect.pairs:
            figures[baseline] = [50.0, 50.0, 50.0]
            gains = [(gain + off) * (1 if effect.higher else -1) for off in (-noise, 0, noise)]
            figures[system] = [50 * math.exp(one) if effect.ratio else 50 + one for one in gains]
        return effect.measured(figures)

    spread = size - effect.margin
    assert state(1.0).state == REPRODUCED
    assert state(1.0).value == pytest.approx(published)
    assert state(0.25).state == (PARTLY if effect.published is not None else REPRODUCED)
    for missed in (state(0.0), state(-1.0), state(1.0, noise=spread)):
        assert missed.state == NOT_SHOWN and missed.reason
    one = effect.measured({name: [50.0 if name == effect.pairs[0][1] else 60.0] for pair in effect.pairs
                           for name in pair})
    assert (one.state, one.low) == (NOT_SHOWN, None)


@pytest.mark.parametrize(("options", "said"), [
    ({"pairs": (("a", "a"),)}, "pairs must be of a system and of another group"), ({"pairs": ()}, "pairs must be"),
    ({"published": -1.0}, "the published effect must be above no effect"),
    ({"published": 0.9, "ratio": True}, "the published effect must be above no effect"),
    ({"share": 0.0}, "share must be above 0"), ({"margin": -3.0}, "margin must be 0, or below 0")])
def test_an_effect_that_no_figure_can_miss_is_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        Effect(**{"claim": "gain", "figure": "test_bleu", "pairs": (("a", "b"),), **options})


def test_the_effect_is_the_least_over_pairs_with_its_interval():
    effect = Effect(claim="gain", figure="test_bleu", pairs=(("a", "b"), ("a", "once")), published=8.0)
    actual = effect.measured({"a": [10.0, 12.0, 14.0], "b": [9.0, 8.0, 13.0], "once": [8.0]})
    assert actual.value == pytest.approx(2.0)  # of 1, 4 and 1
    half = 4.302653 * 3 ** 0.5 / 3 ** 0.5
    assert (actual.low, actual.high) == pytest.approx((2 - half, 2 + half), rel=1e-5)
    assert (actual.state, actual.reason) == (NOT_SHOWN, "the interval includes no effect")
    assert effect.measured({"a": [1.0]}).value is None


def test_errors_of_zero_have_no_ratio_and_show_nothing():
    effect = Effect(claim="error", figure="test_rmse", pairs=(("a", "b"),), ratio=True, higher=False, published=2.0)
    for figures in ({"a": [0.0, 1.0], "b": [1.0, 2.0]}, {"a": [1.0], "b": [0.0]}):
        actual = effect.measured(figures)
        assert (actual.value, actual.state) == (None, NOT_SHOWN) and "a figure is 0" in actual.reason


@pytest.mark.parametrize(("name", "figure"), [("cora-gcn", "70.3"), ("cora-cheb", "69.6"), ("cora-gat", "72.5")])
def test_the_published_figure_is_that_of_the_data_set(name, figure):
    kind = RECIPES[name].recipe
    assert resolve(kind, ["dataset=citeseer"]).paper.startswith(f"{figure} ")
    assert resolve(kind).paper == kind.published


@pytest.mark.parametrize(("options", "published"), [
    ([], 1.5), (["dataset=Citeseer"], 2.2), (["dataset=pubmed"], None), (["dataset=mine"], None)])
def test_gat_is_compared_with_the_gcn_of_its_paper(options, published):
    effect = resolve(RECIPES["cora-gat"].recipe, options).expected
    assert effect.pairs == (("cora-gat", "gcn"),)
    assert effect.published == (published and pytest.approx(published))


def test_attention_is_compared_with_all_other_layers_where_marks_are_far():
    effect = resolve(RECIPES["architectures"].recipe).expected
    figures = {"attention-far": [99.0], "convolution-far": [25.0], "dilated-far": [98.0], "recurrence-far": [97.0]}
    assert effect.measured(figures).value == 1.0


def test_overrides_are_options_that_change_a_result():
    kind = RECIPES["cora-gcn"].recipe
    assert resolve(kind, ["threads=2", "data=/tmp", "hidden=16"]).overrides == {}
    assert resolve(kind, ["hidden=2", "seeds=3", "epochs=60"], "quick").overrides == {"hidden": 2, "seeds": 3}


def test_what_is_fixed_and_what_is_unknown_is_refused(tmp_path):
    kind = RECIPES["characters"].recipe
    with pytest.raises(ConfigError, match="'preset'"):
        resolve(kind, ["preset=quick", f"data={tmp_path}"])
    with pytest.raises(ConfigError, match="preset must be one of default, quick, paper"):
        resolve(kind, [f"data={tmp_path}"], "fast")
