"""Memory of pages that exists only where it was written, and tokens that are copied and written in place."""

from __future__ import annotations

import resource
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.kernels.cpu import native
from tests.memory import settled

pytestmark = pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")

SHAPE = (6, 2, 64, 32)
MIB = 1 << 20


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def numbered(dtype: mx.Dtype = mx.float32) -> mx.array:
    return mx.arange(int(np.prod(SHAPE))).reshape(SHAPE).astype(dtype)


def test_what_is_reserved_reads_as_zeros_and_takes_memory_only_where_it_was_written() -> None:
    before = resident()
    state = native.reserve_memory((4096, 4, 512, 128), mx.float16)
    assert state.nbytes == 2048 * MIB and state.dtype == mx.float16
    ones = mx.ones((4, 512, 128), mx.float16)
    for page in (0, 77, 4095):
        state = native.write_tokens(state, page, 0, ones)
    assert np.array(native.copy_tokens([state], [(77, 5, 3)])[0][5, :, :4, 0]).tolist() == [[1, 1, 1, 0]] * 4
    mx.eval(state)
    assert resident() - before < 64 * MIB


def test_what_was_reserved_is_given_back_when_the_array_dies() -> None:
    def once() -> None:
        state = native.write_tokens(
            native.reserve_memory((4, 1, 512, 32768), mx.float16), 2, 0, mx.ones((1, 512, 32768))
        )
        mx.eval(state)

    once()
    before = resident()
    for _ in range(4):
        once()
    assert resident() - before < 32 * MIB


@pytest.mark.parametrize("shape", [(0, 2, 64, 8), (3, 0, 64, 8), (1,)])
def test_arrays_of_any_shape_can_be_reserved(shape: tuple[int, ...]) -> None:
    state = native.reserve_memory(shape, mx.float32)
    assert state.shape == shape and not np.array(state).any() and np.array(state + 1).all()


def test_shapes_that_no_array_has_are_refused() -> None:
    with pytest.raises(ValueError, match="not negative"):
        native.reserve_memory((1, -1), mx.float32)
    with pytest.raises(ValueError, match="that large"):
        native.reserve_memory((2**31 - 1,) * 3, mx.float32)
    with pytest.raises(MemoryError):
        native.reserve_memory((2**31 - 1, 2**28), mx.float32)


def test_what_is_discarded_reads_as_zeros_and_takes_no_memory() -> None:
    state = native.reserve_memory((8, 1, 512, 8192), mx.float16)
    for page in range(8):
        state = native.write_tokens(state, page, 0, mx.ones((1, 512, 8192), mx.float16))
    mx.eval(state)
    before = resident()
    native.discard_pages(state, [1, 6])
    assert before - resident() > 12 * MIB
    assert np.array(state[:, 0, 511, -1]).tolist() == [1, 0, 1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("size", [8, 20, 200])
def test_pages_that_share_memory_pages_are_discarded_alone(size: int, reserved: bool) -> None:
    shape = (5, 1, 64, size)
    state = native.reserve_memory(shape, mx.float16) if reserved else mx.zeros(shape, mx.float16)
    for page in range(5):
        state = native.write_tokens(state, page, 0, mx.full((1, 64, size), page + 1, mx.float16))
    native.discard_pages(state, [1, 4])
    assert np.array(state).reshape(5, -1).mean(axis=1).tolist() == [1, 0, 3, 4, 0]


def test_pages_that_are_not_there_are_not_discarded() -> None:
    state = native.reserve_memory(SHAPE, mx.float32)
    native.discard_pages(state, [])
    for page in (-1, 6):
        with pytest.raises(ValueError, match="no such row"):
            native.discard_pages(state, [page])


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.uint8])
def test_tokens_are_copied_from_page_to_page_in_all_arrays_in_order(dtype: mx.Dtype) -> None:
    arrays = [numbered(dtype), numbered(dtype)[:, :, :, :5] + 1]
    expected = [np.array(array) for array in arrays]
    for state in expected:
        for source, target, tokens in ((0, 3, 10), (3, 4, 64), (5, 5, 7), (1, 2, 0)):
            state[target, :, :tokens] = state[source, :, :tokens]
    found = native.copy_tokens(
        [mx.contiguous(array) for array in arrays], [(0, 3, 10), (3, 4, 64), (5, 5, 7), (1, 2, 0)]
    )
    assert all(np.array_equal(np.array(a), b) for a, b in zip(found, expected, strict=True))


def test_tokens_are_written_into_a_page_where_they_belong() -> None:
    state, tokens = numbered(), mx.random.normal((2, 11, 32))
    expected = np.array(state)
    expected[4, :, 53:] = np.array(tokens)
    assert np.array_equal(np.array(native.write_tokens(state, 4, 53, tokens)), expected)
    assert np.array_equal(np.array(native.write_tokens(mx.array(expected), 4, 64, tokens[:, :0])), expected)


def test_tokens_are_taken_in_any_strides_and_as_the_numbers_that_the_pages_hold() -> None:
    tokens = mx.random.normal((3, 32, 2)).transpose(2, 0, 1)
    found = native.write_tokens(mx.zeros(SHAPE, mx.float16), 0, 0, tokens)
    assert mx.array_equal(found[0, :, :3], tokens.astype(mx.float16)).item()


def test_copies_and_writes_are_done_in_place() -> None:
    state = mx.zeros((64, 1, 512, 64))
    mx.eval(state)
    before = settled()
    for page in range(3):
        state = native.write_tokens(state, page, 5, mx.ones((1, 1, 64)))
        (state,) = native.copy_tokens([state], [(page, page + 10, 6)])
        mx.eval(state)
    assert mx.get_peak_memory() - before < state.nbytes
    assert np.array(state)[:, 0, :, 0].sum(axis=1).nonzero()[0].tolist() == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("copy", [(-1, 0, 1), (0, 6, 1), (6, 0, 1), (0, -1, 1), (0, 1, 65), (0, 1, -1)])
def test_copies_that_do_not_fit_are_refused(copy: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"no such page|fewer tokens"):
        native.copy_tokens([numbered()], [copy])
    assert native.copy_tokens([], [copy]) == []


@pytest.mark.parametrize(
    ("page", "begin", "shape"),
    [
        (-1, 0, (2, 1, 32)),
        (6, 0, (2, 1, 32)),
        (0, -1, (2, 1, 32)),
        (0, 64, (2, 1, 32)),
        (0, 0, (1, 1, 32)),
        (0, 0, (2, 1, 31)),
    ],
)
def test_tokens_that_do_not_fit_are_refused(page: int, begin: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"such page|not fit|as the pages have them"):
        native.write_tokens(numbered(), page, begin, mx.ones(shape))


def test_reserved_arrays_live_on_in_what_was_made_from_them() -> None:
    state = native.reserve_memory(SHAPE, mx.float32)
    views = [state[page] for page in range(6)]
    state = native.write_tokens(state, 3, 0, mx.ones((2, 64, 32)))
    mx.eval(state)
    kept = state[3]
    del state, views
    assert np.array(kept).all()
