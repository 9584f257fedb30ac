from __future__ import annotations

import numpy as np
import pytest

from ingot.cache.codecs.lloyd_max import codebook


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
    book = codebook(size, bits)
    assert book.distortion == pytest.approx(distortion, abs=1e-5)
    assert book.levels[-1] == pytest.approx(largest, abs=1e-4)


@pytest.mark.parametrize("size", [8, 48, 128])
@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_levels_mirror_each_other_and_borders_lie_amid_them(size: int, bits: int) -> None:
    book = codebook(size, bits)
    levels, borders = np.array(book.levels), np.array(book.borders)
    assert len(levels) == 1 << bits and len(borders) == len(levels) - 1
    assert np.allclose(levels, -levels[::-1]) and np.all(np.diff(levels) > 0)
    assert np.allclose(borders, (levels[1:] + levels[:-1]) / 2)
