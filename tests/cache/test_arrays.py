from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.arrays import copy_array, resize_rows


def shared(one: mx.array, other: mx.array) -> bool:
    mx.eval(one, other)
    return np.shares_memory(np.array(one, copy=False), np.array(other, copy=False))


@given(shape=st.lists(st.integers(1, 5), min_size=1, max_size=4), rows=st.integers(1, 3))
def test_any_copy_is_the_same_in_memory_of_its_own(shape: list[int], rows: int) -> None:
    whole = mx.random.normal(shape, key=mx.random.key(1))
    copy = copy_array(whole[:rows])
    assert mx.array_equal(copy, whole[:rows]).item()
    assert not shared(whole, copy)


def test_nothing_can_be_copied_too() -> None:
    assert copy_array(mx.zeros((1, 2, 0, 4))).shape == (1, 2, 0, 4)


@given(shape=st.tuples(*[st.integers(1, 4)] * 4), rows=st.integers(1, 5))
def test_what_is_made_larger_or_smaller_lets_go_of_the_old_memory(shape: tuple[int, ...], rows: int) -> None:
    old = mx.random.normal(shape, key=mx.random.key(1))
    assert not shared(old, resize_rows(old, rows))
    assert mx.array_equal(resize_rows(old, rows)[: shape[0]], old[:rows]).item()


@pytest.mark.parametrize("shape", [(3, 1, 8, 4), (3, 2, 8, 4), (3, 2, 1, 4), (3, 5), (3, 1)])
def test_a_copied_row_is_the_same_in_memory_of_its_own(shape: tuple[int, ...]) -> None:
    whole = mx.random.normal(shape, key=mx.random.key(1))
    copy = copy_array(whole[1:2])
    mx.eval(whole, copy)
    assert mx.array_equal(copy, whole[1:2]).item()
    assert not np.shares_memory(np.array(whole, copy=False), np.array(copy, copy=False))


def test_a_view_of_a_row_shares_its_memory_which_is_why_it_is_copied() -> None:
    whole = mx.random.normal((3, 2, 8, 4), key=mx.random.key(1))
    view = mx.contiguous(whole[1:2])
    mx.eval(whole, view)
    assert np.shares_memory(np.array(whole, copy=False), np.array(view, copy=False))
