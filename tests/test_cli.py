"""The command as a user meets it: help, errors, exit codes, verbs of the library, and those of plug-ins."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from structconv.cli import main
from structconv.commands import bench, plugins


@pytest.fixture
def single(monkeypatch):
    """No other distribution brings verbs."""
    monkeypatch.setattr(plugins, "plugins", lambda: ())


def test_help_imports_no_heavy_library():
    code = ("import sys\nfrom structconv.cli import main\ncode = main(sys.argv[1:])\n"
            "heavy = {'torch', 'numpy', 'scipy', 'matplotlib', 'rich', 'sklearn'} & set(sys.modules)\n"
            "print('HEAVY', sorted(heavy), code)")
    done = subprocess.run([sys.executable, "-c", code, "show", "--help"], capture_output=True, text=True, check=True)
    assert "usage: structconv" in done.stdout
    assert done.stdout.endswith("HEAVY [] 0\n")


@pytest.mark.parametrize(("words", "message"), [
    (["trian"], "invalid choice: 'trian'"),
    (["show", "shfit"], "Did you mean 'shift'?"),
    (["show", "shift", "--out", "a.txt"], "--out must name a .png"),
    (["plan", "cuboid", "--grid", "-3"], "must be"),
    (["show", "shift", "--grid", "8xa"], "--grid must be integers"),
    (["show", "shift", "--grid", "8", "--offset", "2,4"], "one number for each axis"),
    (["list", "--all"], "every argument must be known; got --all"),
])
def test_bad_usage_is_one_line_code_two_and_no_run_folder(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert not list(tmp_path.iterdir())


def test_list_is_readable_by_programs(capsys, single):
    assert main(["list", "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"basis"} == {line["kind"] for line in lines}
    assert "structconv show shift" in {line["command"] for line in lines}


@pytest.mark.parametrize("words", [["plan"], ["nothing"], ["show", "shift", "--dpi", "high"], ["list", "--nothing"]])
def test_words_that_do_not_fit_are_an_object_for_programs(words, capsys):
    for given in (words, [*words, "--json"]):
        assert main(given) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("structconv") and captured.err.count("\n") == 1
        assert bool(captured.out) == (given is not words)
    answer = json.loads(captured.out)
    assert answer["exit_code"] == 2 and answer["error"] in captured.err


@pytest.mark.parametrize("words", [["compare", "digits"], ["train", "cora-gat", "--help"], ["resume", "run"],
                                   ["sample"], ["reproduce", "--all", "--json"]])
def test_a_verb_of_systems_names_the_distribution_to_install(words, capsys, single):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err == (f"structconv {words[0]}: the distribution structconv-systems must be "
                            "installed; got none. Install it: pip install structconv-systems.\n")
    assert bool(captured.out) == ("--json" in words)


@pytest.mark.parametrize("words", [["bench"], ["bench", "--suite", "compat", "--json"]])
def test_bench_says_how_to_get_the_benchmarks(words, capsys, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.err == ('structconv bench: the package benchmarks must be importable; got none. '
                            'Clone the repository and run there: pip install -e ".[all]" -e systems.\n')
    assert bool(captured.out) == ("--json" in words)


def test_help_lists_no_verb_that_is_not_installed(capsys, single):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "doctor" in said and "bench" in said and "train" not in said


def test_a_plug_in_adds_verbs_and_what_is_listed(capsys, monkeypatch):
    def add(verbs, shared):
        verbs.add_parser("greet", help="say hello", parents=[shared]).set_defaults(run=lambda args, rest: 7)

    plugin = SimpleNamespace(add=add, listed=lambda: {"greeting": {"greet you": "hello"}})
    monkeypatch.setattr(plugins, "plugins", lambda: (plugin,))
    assert main(["greet"]) == 7
    assert main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[0])["command"] == "structconv greet you"


def test_doctor(capsys):
    assert main(["doctor", "--json"]) == 0
    actual = json.loads(capsys.readouterr().out)
    assert actual["torch_threads"] >= 1
    assert actual["safetensors"]
    assert "triton" in actual["gpu_kernels"].lower() or "torch operators" in actual["gpu_kernels"]
    assert main(["doctor"]) == 0
    assert "cache folder" in capsys.readouterr().out


def test_figure_two_of_the_paper(tmp_path, capsys):
    assert main(["show", "shift", "--grid", "10", "--offset", "2", "--out", str(tmp_path / "a.png")]) == 0
    drawn = [line for line in capsys.readouterr().out.splitlines() if set(line) <= {"█", "·"}]
    assert len(drawn) == 10
    for m, line in enumerate(drawn):
        assert line == "".join("██" if n == m + 2 else "··" for n in range(10))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["show", "shift", "--grid", "8x10", "--offset", "2,4", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["shape"] == [1, 80, 80]
    assert shown["nonzeros"] == 6 * 6


def test_every_named_basis_is_drawn_and_planned(capsys):
    from structconv.commands.options import NAMED

    for name in NAMED:
        assert main(["show", name, "--grid", "4x6", "--json"]) == 0, name
        assert main(["plan", name, "--grid", "4x6", "--json"]) == 0, name
        shown, planned = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert shown["shape"][1] == 24
        assert planned["candidates"][0]["rejected"] == ""
        assert planned["candidates"][0]["seconds"] > 0


def test_leaving_at_once_is_no_saved_interruption(monkeypatch, capsys):
    from structconv.commands import doctor

    def interrupted(args, rest):
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "_run", interrupted)
    assert main(["doctor"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_a_basis_too_large_to_draw_is_refused(capsys):
    assert main(["show", "identity", "--grid", "300x300"]) == 2
    assert "Take a smaller --grid." in capsys.readouterr().err


@pytest.mark.parametrize(("words", "begins"), [
    (["show", "nothing"], "structconv: a basis must be one of"),
    (["plan", "shift", "--grid", "9xx9"], "structconv: --grid"),
    (["show", "shift", "--out", "no/such.png"], "structconv show: --out must be in a folder that there is; got no/"),
])
def test_an_error_names_the_command_once(words, begins, capsys):
    assert main(words) == 2
    assert capsys.readouterr().err.startswith(begins)


@pytest.mark.parametrize("words", [["list"], ["list", "--json"]])
def test_a_closed_pipe_ends_the_command_quietly(words):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run([sys.executable, "-m", "structconv.cli", *words], stdout=writing, stderr=subprocess.PIPE,
                          text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
