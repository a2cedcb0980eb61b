"""Layers on another device than the CPU, without one: see `tests.support.second_device`."""

from tests.support.drawn import EVERY
from tests.support.second_device import faults_of


def test_layers_compute_on_a_second_device_as_on_the_cpu():
    faults, count = faults_of("tests.on_second_device", "1" if EVERY else "4")
    assert not faults and count > 200
