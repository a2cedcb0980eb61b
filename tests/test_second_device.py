"""Layers on another device than the CPU, without one: see `tests.support.second_device`."""

from __future__ import annotations

import subprocess
import sys

from tests.support.drawn import EVERY


def test_layers_compute_on_a_second_device_as_on_the_cpu():
    """In a process of its own, because a process has one such device for good."""
    done = subprocess.run([sys.executable, "-m", "tests.on_second_device", "1" if EVERY else "4"], capture_output=True,
                          text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    *faults, count = done.stdout.splitlines()
    assert not faults and int(count.removesuffix(" calls")) > 200
