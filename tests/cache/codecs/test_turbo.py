from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from ingot.cache.codecs.turbo import (
    lloyd_max_codebook,
    rotate_vectors,
    rotate_vectors_back,
    rotation_problem,
    sign_array,
)
from tests.cache.codecs.vectors import drawn

SIZES = [8, 16, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512]


@pytest.mark.parametrize("size", SIZES)
def test_what_is_rotated_is_as_long_and_comes_back(size: int) -> None:
    assert rotation_problem(size) is None
    x = drawn(50, size)
    turned = rotate_vectors(x)
    assert mx.allclose(mx.linalg.norm(turned, axis=-1), mx.linalg.norm(x, axis=-1), rtol=1e-4)
    assert mx.allclose(rotate_vectors_back(turned), x, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_a_single_channel_is_spread_over_all(size: int) -> None:
    for channel in (0, size - 1):
        turned = rotate_vectors(mx.eye(size)[channel])
        assert mx.allclose(mx.abs(turned), mx.full(size, size**-0.5), rtol=1e-4)


def test_signs_stay_what_they_are_as_files_depend_on_them() -> None:
    assert "".join("+" if sign > 0 else "-" for sign in sign_array(64)[:24].tolist()) == "-+-+++---+--++--+-++-+++"


@pytest.mark.parametrize(
    ("size", "bits", "distortion", "largest"),
    [
        (128, 1, 0.36089, 0.79944),
        (128, 2, 0.11600, 1.50520),
        (128, 3, 0.03397, 2.13149),
        (128, 4, 0.00932, 2.68891),
        (64, 4, 0.00913, 2.64641),
        (256, 3, 0.03426, 2.14168),
    ],
)
def test_the_tables_are_those_of_the_law(size: int, bits: int, distortion: float, largest: float) -> None:
    book = lloyd_max_codebook(size, bits)
    assert book.distortion == pytest.approx(distortion, abs=1e-5)
    assert book.levels[-1] == pytest.approx(largest, abs=1e-4)


@pytest.mark.parametrize("size", [8, 48, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_mirror_each_other_and_borders_lie_amid_them(size: int, bits: int) -> None:
    book = lloyd_max_codebook(size, bits)
    levels, borders = np.array(book.levels), np.array(book.borders)
    assert len(levels) == 1 << bits and len(borders) == len(levels) - 1
    assert np.allclose(levels, -levels[::-1]) and np.all(np.diff(levels) > 0)
    assert np.allclose(borders, (levels[1:] + levels[:-1]) / 2)
