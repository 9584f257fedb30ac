"""Towers of Qwen's: pixels of the official processors, features of mlx-vlm's own tower, in slices and within memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.errors import ModelError
from ingot.kernels.device import current
from ingot.media.families.registry import processor_in
from ingot.media.layout import ClipHeader, ClipWish, PictureWish
from ingot.media.size import Size
from ingot.models.vision import qwen, slicing
from ingot.models.vision.loading import has_tower, load_tower
from ingot.models.vision.tower import Tower
from ingot.upstream import load_config
from tests.memory import settled
from tests.models.vision.looking import drawn_frame, item_at, looked, reference


def tower_of(folder: Path) -> Tower:
    return load_tower(folder, load_config(folder), current(), "float32")


def test_pixels_are_those_of_the_official_processor_where_nothing_is_resized(checkpoint: Path) -> None:
    from ingot.upstream import import_upstream

    processing = import_upstream("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    tower, processor = tower_of(checkpoint), processor_in(checkpoint)
    unit = processor.unit
    random = np.random.default_rng(1)
    options = {"patch_size": unit // 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    frame = drawn_frame(random, 3 * unit, 5 * unit)
    item = item_at(0, "image", processor.picture(Size(3 * unit, 5 * unit), PictureWish()), [frame])
    made = processing.Qwen3VLImageProcessor(min_pixels=unit, max_pixels=10**6, **options)([frame.transpose(2, 0, 1)])
    assert made["image_grid_thw"].tolist() == [list(item.grid)]
    assert np.abs(made["pixel_values"] - tower.pixels(item)).max() <= 1e-5


def test_a_clip_is_cut_in_pairs_of_frames_time_first(checkpoint: Path) -> None:
    tower, processor = tower_of(checkpoint), processor_in(checkpoint)
    unit = processor.unit
    layout = processor.clip(ClipHeader(Size(2 * unit, unit), 4, 2.0), ClipWish(frames=4))
    frames = [np.full((unit, 2 * unit, 3), value, dtype=np.uint8) for value in (0, 255, 0, 255)]
    pixels = tower.pixels(item_at(0, "video", layout, frames)).reshape(layout.grid.patches, 3, 2, -1)
    assert np.allclose(pixels[:, :, 0], -1) and np.allclose(pixels[:, :, 1], 1)


@pytest.mark.parametrize("rows", [8, 64])
def test_features_are_those_of_mlx_vlms_own_tower_however_they_are_sliced(
    checkpoint: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(slicing.ROWS, "cpu", rows)
    monkeypatch.setattr(qwen, "TOGETHER", 2 * rows)
    tower, processor = tower_of(checkpoint), processor_in(checkpoint)
    model = reference(checkpoint)
    random = np.random.default_rng(2)
    picture = item_at(0, "image", processor.picture(Size(150, 90), PictureWish()), [drawn_frame(random, 150, 90)])
    layout = processor.clip(ClipHeader(Size(70, 90), 6, 2.0), ClipWish(frames=6))
    clip = item_at(0, "video", layout, [drawn_frame(random, 70, 90) for _ in layout.frames])
    for item in (picture, clip):
        found = looked(tower, item)
        seen: Any = model.vision_tower(mx.array(tower.pixels(item)), mx.array([list(item.grid)]))
        own, deep = seen if isinstance(seen, tuple) else (seen, [])
        assert found.embeddings.shape == (item.layout.features, 32)
        for array, wanted in zip(found.arrays, [own, *deep], strict=True):
            assert mx.abs(array - wanted).max().item() < 1e-4 * max(1.0, mx.abs(wanted).max().item())


def test_what_looking_takes_is_known_before(checkpoint: Path) -> None:
    tower, processor = tower_of(checkpoint), processor_in(checkpoint)
    layout = processor.picture(Size(400, 400), PictureWish())
    item = item_at(0, "image", layout, [drawn_frame(np.random.default_rng(3), 400, 400)])
    needs = tower.needs(layout)
    assert tower.pixels(item).nbytes <= needs.pixels
    before = settled()
    features = looked(tower, item)
    assert mx.get_peak_memory() - before <= needs.pixels + needs.work + needs.features
    assert features.nbytes <= needs.features


def test_a_checkpoint_without_weights_of_its_tower_says_how_to_serve_it(checkpoint: Path, tmp_path: Path) -> None:
    stored = mx.load(str(checkpoint / "model.safetensors"))
    assert isinstance(stored, dict)
    text = {name: weight for name, weight in stored.items() if not name.startswith("vision_tower.")}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), text)
    config = load_config(checkpoint)
    assert has_tower(config)
    with pytest.raises(ModelError, match="--text-only"):
        load_tower(tmp_path, config, current())


def test_slices_of_wide_towers_end_where_patches_are_merged(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows a processor has time for."""
    processor, random = processor_in(checkpoint), np.random.default_rng(2)
    side = 8 * processor.unit
    layout = processor.picture(Size(side, side), PictureWish())
    item = item_at(0, "image", layout, [drawn_frame(random, side, side)])
    wanted = looked(tower_of(checkpoint), item)
    monkeypatch.setitem(slicing.WORK, "cpu", 1)
    found = looked(tower_of(checkpoint), item)
    for one, other in zip(found.arrays, wanted.arrays, strict=True):
        assert mx.abs(one - other).max().item() < 1e-4
