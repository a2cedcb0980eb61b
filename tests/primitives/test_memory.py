"""Memory of large results: which memory a result gets, and that nobody else writes to it while it is used."""

import copy
import io
import subprocess
import sys
import threading

import pytest
import torch

from structconv.errors import ConfigError
from structconv.primitives import memory
from structconv.primitives.memory import LEAST, keep_memory, new_empty, release_memory, reserved_memory

pytestmark = pytest.mark.skipif(not memory._SUPPORTED, reason="the system has no huge pages to advise on")
LARGE = LEAST // 4
MAPPED = torch.empty(0)


@pytest.fixture(autouse=True)
def nothing_kept():
    keep_memory()
    release_memory()
    yield
    keep_memory(0)


def large(rows: int = LARGE) -> torch.Tensor:
    return new_empty(MAPPED, (rows,)).fill_(1.0)


def test_nothing_is_kept_by_default_and_a_process_may_end_while_results_are_held():
    code = f"""
import torch, structconv
from structconv.primitives.memory import reserved_memory, new_empty
new_empty(torch.empty(0), ({LARGE},)).fill_(1.0)
print(reserved_memory())
structconv.keep_memory()
new_empty(torch.empty(0), ({LARGE},)).fill_(1.0)
print(reserved_memory())
x = new_empty(torch.empty(0), ({LARGE},)).requires_grad_()  # a process may end while results are held
(x * 2).sum().backward()
y = x.grad
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", str(LEAST)]


def test_small_results_are_torchs_own():
    assert new_empty(MAPPED, (LARGE - 1,)).untyped_storage().resizable()
    assert reserved_memory() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_shape_and_dtype(dtype):
    x = new_empty(MAPPED, (3, LARGE, 2), dtype)
    assert (x.shape, x.dtype, x.is_contiguous()) == ((3, LARGE, 2), dtype, True)
    assert new_empty(x, (3, LARGE, 2)).dtype is dtype


def test_freed_memory_is_given_to_the_next_result_of_its_size():
    x = large()
    start = x.data_ptr()
    del x
    assert reserved_memory() == LEAST
    assert large(2 * LARGE).data_ptr() != start
    y = large(LARGE)
    assert y.data_ptr() == start
    assert reserved_memory() == 2 * LEAST


@pytest.mark.parametrize("use", [lambda x: x[1:], lambda x: x.detach(), lambda x: x.numpy(), lambda x: [x.mT],
                                 lambda x: x.view(torch.int32), lambda x: x.untyped_storage()])
def test_memory_in_use_is_not_given_away(use):
    x = large(LARGE).view(2, -1)
    held = use(x)
    del x
    assert reserved_memory() == 0
    other = large()
    del held
    assert reserved_memory() == LEAST
    assert (other == 1).all()


def test_a_saved_tensor_is_in_use_until_its_graph_is_gone():
    w = torch.ones(1, requires_grad=True)
    y = large() * w
    assert reserved_memory() == 0
    y.sum().backward()
    assert reserved_memory() == LEAST
    assert w.grad.item() == LARGE


def test_no_more_is_kept_than_the_limit():
    keep_memory(2 * LEAST)
    held = [large() for _ in range(5)]
    del held
    assert 0 < reserved_memory() <= 2 * LEAST
    keep_memory(LEAST)
    assert reserved_memory() <= LEAST
    keep_memory(0)
    large()
    assert reserved_memory() == 0
    with pytest.raises(ConfigError, match="at least 0"):
        keep_memory(-1)


def test_the_tensors_are_like_any_other():
    x = large()
    stored = io.BytesIO()
    torch.save(x, stored)
    stored.seek(0)
    assert torch.equal(torch.load(stored, weights_only=True), x)
    assert torch.equal(copy.deepcopy(x), x)
    assert torch.equal(x.clone().share_memory_(), x)
    assert x.add_(1).sum().item() == 2 * LARGE


def test_threads_never_share_a_block():
    clashes = []

    def work(number: int) -> None:
        for _ in range(50):
            x = new_empty(MAPPED, (LARGE,))
            x[::4096] = number
            clashes.extend(value for value in x[::4096].unique().tolist() if value != number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not clashes
