from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from ingot.cache.arrays import copied


@pytest.mark.parametrize("shape", [(3, 1, 8, 4), (3, 2, 8, 4), (3, 2, 1, 4), (3, 5), (3, 1)])
def test_a_copied_row_is_the_same_in_memory_of_its_own(shape: tuple[int, ...]) -> None:
    whole = mx.random.normal(shape, key=mx.random.key(1))
    copy = copied(whole[1:2])
    mx.eval(whole, copy)
    assert mx.array_equal(copy, whole[1:2]).item()
    assert not np.shares_memory(np.array(whole, copy=False), np.array(copy, copy=False))


def test_a_view_of_a_row_shares_its_memory_which_is_why_it_is_copied() -> None:
    whole = mx.random.normal((3, 2, 8, 4), key=mx.random.key(1))
    view = mx.contiguous(whole[1:2])
    mx.eval(whole, view)
    assert np.shares_memory(np.array(whole, copy=False), np.array(view, copy=False))
