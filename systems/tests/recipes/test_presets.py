"""Presets of all recipes: each resolves, says its goal, and keeps what the user sets."""

from __future__ import annotations

import pytest

from structconv.errors import ConfigError
from structconv_systems.recipes.register import RECIPES
from structconv_systems.train.config import from_json, resolve, to_json
from structconv_systems.train.options import Measured

PRESETS = [(name, preset) for name, entry in RECIPES.items() if issubclass(entry.recipe, Measured)
           for preset in ("default", *entry.recipe.presets)]


@pytest.mark.parametrize(("name", "preset"), PRESETS)
def test_a_preset_resolves_and_is_written_down(name, preset, tmp_path):
    kind = RECIPES[name].recipe
    recipe = resolve(kind, ["seeds=7", *([f"data={tmp_path}"] if kind.folder else [])], preset)
    assert recipe.preset == preset
    assert recipe.seeds == 7
    assert from_json(kind, to_json(recipe)) == recipe


@pytest.mark.parametrize("name", sorted({name for name, _ in PRESETS}))
def test_each_has_a_quick_preset_with_a_goal_and_a_published_figure(name):
    kind = RECIPES[name].recipe
    assert {"quick"} <= kind.presets.keys() & kind.goals.keys()
    assert kind.published


@pytest.mark.parametrize(("name", "figure"), [("cora-gcn", "70.3"), ("cora-cheb", "69.6"), ("cora-gat", "72.5")])
def test_the_published_figure_is_that_of_the_data_set(name, figure):
    kind = RECIPES[name].recipe
    assert resolve(kind, ["dataset=citeseer"]).paper.startswith(f"{figure} ")
    assert resolve(kind).paper == kind.published


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
