"""No call of an operator ends the process: see `raw_processes`."""

import os
import subprocess
import sys

import pytest
import torch

from structconv.errors import ShapeError
from structconv.primitives.native import core
from tests.native import guarded
from tests.primitives import raw_native
from tests.primitives.raw_calls import K, M, N, valid
from tests.support.drawn import EVERY

#: `make test-every` makes more of them.
ROUNDS = 60 if EVERY else 3


def test_wrong_calls_end_in_exceptions(tmp_path):
    """One process and its copies, whose tensors are guarded where they can be."""
    guard = guarded.build(tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1"} if guard is None else guarded.environment(guard)
    cases = ["without_kernels", *(["with_kernels", "native"] if core() else [])]
    done = subprocess.run([sys.executable, "-m", "tests.primitives.raw_processes", str(tmp_path), str(ROUNDS), *cases],
                          env=env, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    ended = dict(map(str.split, done.stdout.splitlines()))
    assert list(ended) == cases
    for name, status in ended.items():
        out, errors = ((tmp_path / f"{name}.{kind}").read_text() for kind in ("out", "err"))
        assert status == "0", f"{name}: {errors[-6000:]}"
        assert "refused" in out and "wrong" not in out, out
        assert name != "native" or guard is None or "guarded tensors" in out


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
def test_nodes_compute_no_gradient_of_inputs_that_need_none():
    """The features that a network reads need none; the product would take up to a third of a step."""
    native, count = core(), 0
    for name, arguments in raw_native.recorded(native).items():
        names = [argument.name for argument in getattr(torch.ops.structconv_native, name).default._schema.arguments]
        if "of_x" in names:
            at, operator, count = names.index("of_x"), getattr(native, name), count + 1
            whole, rest = (operator(*arguments[:at], flag, *arguments[at + 1:]) for flag in (True, False))
            assert whole[0] is not None and rest[0] is None, name
            torch.testing.assert_close(rest[1:], whole[1:])
    assert count == 9


@pytest.mark.parametrize("factor", [torch.ones(1, K, 4), torch.ones(M, K, 4, dtype=torch.float64), torch.ones(N, K, 4)])
def test_a_factor_that_does_not_fit_is_refused(factor):
    q, k, x, vector, *options = valid(torch.float32)["dense_additive_attention"]
    with pytest.raises(ShapeError, match="factor must have the shape"):
        torch.ops.structconv.dense_additive_attention(q, k, x, vector, *options[:3], factor, *options[4:])


def test_degrees_without_end_are_refused():
    *arguments, _, _, chebyshev = valid(torch.float32)["polynomial_analysis"]
    with pytest.raises(ShapeError, match="degrees must be at most"):
        torch.ops.structconv.polynomial_analysis(*arguments, 1 << 40, 1 << 40, chebyshev)


MOST, INDEX, ONE = torch.iinfo(torch.int64).max, torch.tensor([[0, 1], [1, 0]]), torch.ones(1, 2, 3)
IMAGE = torch.ones(1, 1, 9, 7)


@pytest.mark.skipif(core() is None, reason="there are no native kernels")
@pytest.mark.parametrize("name, arguments, message", [
    ("sample", (INDEX[0], INDEX[1], *[None] * 4, INDEX[0, :1], None, None, -1, False, False, 0, 0, MOST),
     "base must leave a number to each node"),
    ("number", (torch.full((8, 1), -1), INDEX[0], MOST, 1), "next must leave a number to each key"),
    ("number", (torch.zeros(2, 1, dtype=torch.int32), torch.tensor([0, 2]), 0, 1), "keys must be in the table"),
    ("number", (torch.zeros(2, 1, dtype=torch.int32), torch.tensor([-1]), 0, 2), "keys must be in the table"),
    ("number", (torch.zeros(2, 1, dtype=torch.int32), INDEX[0], 1 << 31, 1), "next must leave a number of 32 bits"),
    ("adjacency", (INDEX, 2, MOST, True, True, 0, None, False), "outputs must be below"),
    ("drop_block", (ONE.clone(), ONE.clone(), None, MOST, 1, 2, 0.5, 0, 1), "first_head must be a number"),
    ("window_means", (IMAGE, 2 + (3 << 20), 2 + (2 << 20), MOST, False), "padding at most half of it"),
    ("window_means_backward", (IMAGE[..., :4, :3], [9, MOST], 2 + (3 << 20), 2 + (2 << 20), 1 << 20, False),
     "x must have sizes from 1"),
    ("conditioned_sums", ("layout", ONE[0], ONE[0], 0, MOST, ONE[0]), "heads must be heads of the values"),
    ("sddmm", ("layout", ONE, ONE, MOST), "result must have fewer than 2.63 bytes"),
])
def test_numbers_that_overflow_are_refused(name, arguments, message):
    arguments = [core().layouts(INDEX, 2, 2)[0] if isinstance(a, str) else a for a in arguments]
    with pytest.raises(ValueError, match=message):
        getattr(core(), name)(*arguments)
