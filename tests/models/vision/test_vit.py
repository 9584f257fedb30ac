"""A tower's work in slices: none takes more arithmetic than a stream may wait for, whatever picture and tower."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from ingot.kernels.device import Device, DeviceKind
from ingot.media.layout import Grid
from ingot.models.vision import vit as blocks
from ingot.models.vision import vit as slicing
from ingot.models.vision.vit import (
    FEWEST_ROWS,
    VisionWork,
    Vit,
    VitLayer,
    WorkSlicing,
    multiplications_per_row,
    run_by_rows,
)

KINDS: tuple[DeviceKind, ...] = ("cpu", "metal", "cuda")
PUBLISHED = {"SigLIP": (1152, 4304, 16), "Qwen 2.5 VL": (1280, 3 * 3420 // 2, 16), "InternViT 6B": (3200, 12_800, 25)}


def on(kind: DeviceKind) -> WorkSlicing:
    return WorkSlicing.on(Device(kind, "acting", 1 << 30))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tower", PUBLISHED)
@pytest.mark.parametrize("keys", [256, 4096, 16_384])
def test_a_slice_of_a_published_tower_is_within_what_a_stream_waits_for(
    kind: DeviceKind, tower: str, keys: int
) -> None:
    width, inner, heads = PUBLISHED[tower]
    behind = width**2 + 2 * width * inner
    each = 2 * width * keys + behind
    rows = on(kind).queries(heads, width // heads, keys, behind)
    assert rows % FEWEST_ROWS == 0
    assert rows == FEWEST_ROWS or rows * each <= slicing.SLICE_WORK[kind]


class Counted(nn.Linear):
    """Counts the multiplications that are asked of it."""

    made = 0

    def __call__(self, x: mx.array) -> mx.array:
        Counted.made += x.shape[0] * self.weight.size
        found: mx.array = super().__call__(x)
        return found


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Counted]]:
    attend = blocks._attend_tile

    def counting(queries: mx.array, keys: mx.array, values: mx.array, slicing: WorkSlicing) -> mx.array:
        Counted.made += 2 * queries.size * keys.shape[1]
        return attend(queries, keys, values, slicing)

    monkeypatch.setattr(blocks, "_attend_tile", counting)
    Counted.made = 0
    yield Counted


def ran(work: VisionWork, counted: type[Counted]) -> list[int]:
    """What each slice multiplied."""
    slices = []
    for made in work:
        mx.eval(*made)
        slices.append(counted.made)
        counted.made = 0
    return slices


def layer(width: int, inner: int) -> VitLayer:
    mlp = nn.Sequential(Counted(width, inner), Counted(inner, width))
    return VitLayer(nn.LayerNorm(width), Counted(width, 3 * width), Counted(width, width), nn.LayerNorm(width), mlp)


@pytest.mark.parametrize(("tiles", "patches"), [(1, 400), (6, 25), (3, 90)])
def test_no_slice_of_a_tower_multiplies_more_than_it_may(
    counted: type[Counted], monkeypatch: pytest.MonkeyPatch, tiles: int, patches: int
) -> None:
    most = 60_000 * FEWEST_ROWS
    monkeypatch.setitem(slicing.SLICE_WORK, "cpu", most)
    patch = nn.Conv2d(3, 32, 4, 4)
    vit = Vit(patch, [layer(32, 100) for _ in range(2)], 4, on("cpu"))
    pixels = mx.array(np.random.default_rng(0).normal(size=(tiles, patches, 48)).astype(np.float32))
    slices = ran(vit.states(pixels, Grid(tiles, 1, patches)), counted)
    assert max(slices) <= most and sum(slices) > 3 * most


def test_rows_that_are_cut_are_given_back_in_their_order() -> None:
    x, others = mx.arange(100).reshape(50, 2), mx.arange(50)[:, None]
    work = run_by_rows(lambda rows, more: rows + more, 16, x, others)
    with pytest.raises(StopIteration) as done:
        while True:
            mx.eval(*next(work))
    assert mx.array_equal(done.value.value, x + others)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_matrices_count_as_what_they_hold(bits: int) -> None:
    plain: Any = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64))
    wanted = multiplications_per_row(plain)
    nn.quantize(plain, group_size=32, bits=bits)
    assert wanted == 2 * 64 * 96 == multiplications_per_row(plain)
