from __future__ import annotations

import mlx.core as mx
import pytest

from ingot.cache.codecs.hadamard import rotate, rotate_back, signs, size_problem
from tests.cache.codecs.vectors import drawn

SIZES = [8, 16, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_rotated_is_as_long_and_comes_back(size: int) -> None:
    assert size_problem(size) is None
    x = drawn(50, size)
    turned = rotate(x)
    assert mx.allclose(mx.linalg.norm(turned, axis=-1), mx.linalg.norm(x, axis=-1), rtol=1e-4)
    assert mx.allclose(rotate_back(turned), x, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_a_single_channel_is_spread_over_all(size: int) -> None:
    for channel in (0, size - 1):
        turned = rotate(mx.eye(size)[channel])
        assert mx.allclose(mx.abs(turned), mx.full(size, size**-0.5), rtol=1e-4)


def test_signs_stay_what_they_are_as_files_depend_on_them() -> None:
    assert "".join("+" if sign > 0 else "-" for sign in signs(64)[:24].tolist()) == "-+-+++---+--++--+-++-+++"
