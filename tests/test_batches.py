"""Batches do not leak: over every specimen and named layer, samples side by side give what each gives alone."""

from __future__ import annotations

import pytest

from structconv.errors import StructureError
from structconv.testing.batches import check_samples, takes_samples
from structconv.testing.layers import uses

#: Masks that are made for one number of entries say nothing of a batch of other sizes.
REFUSED = {"mha_padded", "masked_by_graph", "over_padded", "over_padded_batch", "over_padded_window",
           "over_padded_pairs", "over_masked_columns", "over_everything_masked", "over_masked_then_capped",
           "over_masked_sum"}
USES = {name: make for name, make in uses().items() if takes_samples(make())}


@pytest.mark.parametrize("name", sorted(USES.keys() - REFUSED))
def test_a_batch_gives_what_each_sample_gives_alone(name):
    check_samples(USES[name]())


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_mask_of_one_size_is_refused_for_a_batch_of_others(name):
    with pytest.raises(StructureError, match="must have"):
        check_samples(USES[name]())


def test_only_layers_of_images_and_of_a_mask_as_their_structure_take_no_samples():
    left = {name for name in uses() if name not in USES}
    images = {"conv1d", "conv2d", "conv2d_grouped", "conv3d", "separable", "pool1d", "pool2d", "pool3d"}
    assert {name for name in left if not name.startswith("non_local_")} == images | {"mha_window"}
