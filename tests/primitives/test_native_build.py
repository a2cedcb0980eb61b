"""How the native core is built, found and loaded, and what happens where it cannot be."""

import subprocess
import sys
import warnings

import pytest
import torch

from structconv.primitives.csr import spmm
from structconv.primitives.edge_attention import affine_attention
from structconv.primitives.layout import compress
from structconv.primitives.native import build, core, dispatch, indices, loader, status
from tests.support.drawn import slow


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """Nothing installed, an empty cache."""
    monkeypatch.setattr(build, "installed", lambda: tmp_path / "absent.so")
    monkeypatch.delenv("STRUCTCONV_NATIVE", raising=False)
    monkeypatch.setenv("STRUCTCONV_CACHE", str(tmp_path / "cache"))
    return tmp_path


def outcome():
    return loader._outcome.__wrapped__()


@pytest.mark.parametrize(("cxx", "reason"), [(None, "compiler"), ("/bin/false", "false")])
def test_without_a_compiler_that_works_there_is_a_reason(nowhere, monkeypatch, cxx, reason):
    if cxx is None:
        monkeypatch.setattr(build, "compiler", lambda: None)
    else:
        monkeypatch.setenv("CXX", cxx)
    actual, told = outcome()
    assert actual is None and reason in told


def test_the_environment_turns_it_off(monkeypatch):
    monkeypatch.setenv("STRUCTCONV_NATIVE", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        actual, reason = outcome()
    assert actual is None and "STRUCTCONV_NATIVE" in reason


def test_missing_kernels_are_said_once():
    loader._say.cache_clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            loader._say("none")
    assert [str(warning.message) for warning in caught] == [
        "structconv's native kernels are not available, torch's operators are used: none"]


def test_a_blank_compiler_is_none(monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    expected = build.compiler()
    monkeypatch.setenv("CXX", " ")
    assert build.compiler() == expected


def test_a_checksum_that_is_no_text_is_not_sound(tmp_path):
    (tmp_path / "core.so").write_bytes(b"")
    (tmp_path / "core.sha256").write_bytes(b"\xff\xfe")
    assert not build.is_sound(tmp_path / "core.so")


def test_a_source_that_does_not_compile_leaves_nothing(nowhere, monkeypatch):
    if build.compiler() is None:
        pytest.skip("no compiler")
    (nowhere / "isa.cpp").write_text("this is not C++\n")
    monkeypatch.setattr(build, "SOURCES", nowhere)
    with pytest.raises(build.BuildError, match=r"isa\.cpp"):
        build.build(nowhere / "made" / "core.so", ["generic"])
    assert not list((nowhere / "made").iterdir())


def test_the_name_follows_the_sources(monkeypatch, tmp_path):
    before = build.digest("g++")
    assert before == build.digest("g++") != build.digest("clang++")
    for path in build.SOURCES.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    assert build.digest("g++") == before
    (tmp_path / "spmm.cpp").write_text("// changed\n")
    assert build.digest("g++") != before


@slow
def test_built_in_the_cache_once_and_the_same_numbers(nowhere, monkeypatch):
    if core() is None:
        pytest.skip("the native core cannot be built here")
    monkeypatch.setattr(loader, "_torch_level", lambda: "generic")
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))
    (first, _), (second, _) = outcome(), outcome()
    assert (first.status.origin, second.status.origin) == ("built now", "cache")
    assert first.status.level == "generic" and first.status.path.startswith(str(nowhere))
    source, target = torch.randint(50, (2, 600))
    inputs = [torch.randn(*shape, requires_grad=True) for shape in ((50, 4), (50, 4), (50, 4, 24))]
    actual = []
    monkeypatch.setattr(dispatch.Loaded, "asked", True)
    for kernels in (core(), second):
        monkeypatch.setattr(indices, "core", lambda kernels=kernels: kernels)
        monkeypatch.setattr(dispatch.Loaded, "core", kernels)
        layouts = compress(target, source, 50), compress(source, target, 50)  # each core proves them itself
        y = affine_attention(*layouts, *inputs)
        actual.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    torch.testing.assert_close(*actual)


def test_a_damaged_or_foreign_core_is_built_anew_once_and_never_loaded(nowhere, monkeypatch):
    built = []

    def build_badly(target, *_, **options):
        built.append(target)
        target.write_bytes(b"\x7fELF, and then nothing")
        if len(built) == 1:
            target.with_suffix(".sha256").write_text("of something else")

    monkeypatch.setattr(build, "build", build_badly)
    monkeypatch.setattr(loader.ctypes, "CDLL", lambda path, **_: pytest.fail(f"{path} was loaded")
                        if str(path).startswith(str(nowhere)) else None)
    for times in (1, 2):
        core_found, reason = outcome()
        assert core_found is None and "is not what was built" in reason and len(built) == times


def test_a_core_that_cannot_register_is_refused_and_torchs_operators_run(monkeypatch):
    if core() is None:
        pytest.skip("the native core cannot be built here")
    source, target = torch.randint(50, (2, 600))
    arguments = compress(target, source, 50), compress(source, target, 50), torch.rand(600), torch.randn(1, 50, 8)
    expected = spmm(*arguments)
    monkeypatch.setattr(loader, "_NUMBER", iter([0]))  # the namespace of the core that there is
    actual, reason = outcome()
    assert actual is None and "refused" in reason and "\n" not in reason
    monkeypatch.setattr(loader, "_outcome", lambda: (actual, reason))
    monkeypatch.setattr(dispatch.Loaded, "asked", False)
    monkeypatch.setattr(dispatch.Loaded, "core", None)
    loader._say.cache_clear()
    with pytest.warns(UserWarning, match="torch's operators are used: .*refused"):
        torch.testing.assert_close(spmm(*arguments), expected)


def test_one_openmp_runtime_in_the_process():
    if core() is None or core().status.runtime is None or sys.platform != "linux":
        pytest.skip("no shared OpenMP runtime here")
    code = ("import torch\nfrom structconv.primitives.native import status\nassert status().available\n"
            "torch.randn(300, 300) @ torch.randn(300, 300)\n"
            "print(*{l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l.rsplit('/', 1)[-1]}, sep='\\n')")
    actual = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(actual) == 1, actual


def test_status_tells_what_is_used():
    actual = status()
    assert actual.available == (core() is not None) and (actual.reason is None) == actual.available
    if actual.available:
        assert actual.level in build.LEVELS and actual.threads >= 1
        assert actual.origin in ("installed", "cache", "built now")


def test_only_what_the_kernels_take_goes_to_them():
    x = torch.ones(2, 3, 4)
    assert dispatch.usable(x.double(), 5) is None and dispatch.usable(x.half(), 5) is None
    assert dispatch.usable(x, 2**31) is None
    assert dispatch.usable(torch.empty(1, 1, dispatch.MAX_CHANNELS + 1), 5) is None
    assert dispatch.usable(x.to("meta"), 5) is None and dispatch.usable(x, 5) is core()


def test_an_editable_installation_has_the_level_of_its_processor_and_is_left_where_another_has_none():
    class Library:
        structconv_runs = staticmethod(lambda number: number <= 1)
        structconv_spmm_avx2 = structconv_spmm_avx512 = None

    assert loader._level(Library(), ("generic", "avx2", "avx512")) == "avx2"
    del Library.structconv_spmm_avx2
    with pytest.raises(OSError, match="this processor runs none"):
        loader._level(Library(), ("generic", "avx2", "avx512"))
    if build.compiler():
        assert build.own_level() in build.levels()
