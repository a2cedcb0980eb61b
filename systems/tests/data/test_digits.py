"""The digits: sizes, range, and a split that depends on its seed alone."""

import pytest
import torch

from structconv.errors import ConfigError
from structconv_systems.data.digits import load_digits


def test_sizes_and_range():
    digits = load_digits(validation=200, test=500)
    assert (len(digits.train), len(digits.validation), len(digits.test)) == (1097, 200, 500)
    assert digits.train.images.shape == (1097, 64, 1)
    assert digits.train.images.dtype == torch.float32
    assert digits.train.images.min() == 0
    assert digits.train.images.max() == 1
    assert digits.train.labels.unique().tolist() == list(range(10))


def test_parts_are_disjoint_and_reproducible():
    torch.manual_seed(3)
    first, second, other = load_digits(), load_digits(), load_digits(seed=1)
    assert torch.equal(first.test.images, second.test.images)
    assert not torch.equal(first.test.labels, other.test.labels)
    total = sum(part.images.double().sum() for part in (first.train, first.validation, first.test))
    assert total == sum(part.images.double().sum() for part in (other.train, other.validation, other.test))


def test_parts_must_leave_something_to_train_on():
    with pytest.raises(ConfigError, match="must leave some of 1797 images"):
        load_digits(validation=1000, test=797)
