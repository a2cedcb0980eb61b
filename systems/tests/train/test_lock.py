"""One process at a time in a run's folder, and files of a run that are no UTF-8."""

import os
import signal
import subprocess
import sys

import pytest

from structconv.errors import ConfigError, DataError
from structconv_systems.train.run import Run, locked
from systems.tests.train.test_loop import Toy

HOLDER = """
import sys, time
from pathlib import Path
from structconv_systems.train.run import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def test_the_second_is_told_who_holds_it_and_a_killed_one_lets_go(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        message = rf"Run: .* must be free; got held by process {holder.pid} on .* since 20"
        with pytest.raises(ConfigError, match=message), locked(tmp_path):
            pytest.fail("both hold it")
        holder.send_signal(signal.SIGKILL)
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    with locked(tmp_path):
        assert (tmp_path / ".lock").read_text().count("process") == 1


def test_a_configuration_in_another_encoding_is_named(tmp_path):
    run = Run.create(tmp_path / "run", Toy())
    path = run.folder / "config.json"
    path.write_bytes(path.read_bytes() + b"\xff")
    line = path.read_bytes().count(b"\n") + 1
    with pytest.raises(DataError, match=rf"config\.json, line {line}: expected text in UTF-8; got the byte 0xff"):
        _ = Run.open(run.folder).config_text


def test_measurements_in_another_encoding_are_dropped(tmp_path):
    run = Run.create(tmp_path / "run", Toy())
    for step in (1, 2, 3):
        run.metrics.append("job", step, {"loss": 1.0})
    run.metrics.flush()
    content = run.metrics.path.read_bytes().splitlines()
    run.metrics.path.write_bytes(b"\n".join([content[0], b"\xff" + content[1], content[2], b""]))
    assert [line["step"] for line in run.metrics] == [1, 3]
    run.metrics.truncate("job", 2)
    assert run.metrics.path.read_text() == content[0].decode() + "\n"
