"""Towers of Qwen's: pixels of the official processors, features of mlx-vlm's own tower, in slices and within memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.errors import ModelError
from ingot.kernels.device import current_device
from ingot.media.image_processors import read_processor
from ingot.media.layout import ImageLayoutOptions, Size, VideoHeader, VideoLayoutOptions
from ingot.models.vision import qwen, vit
from ingot.models.vision.loading import has_vision_tower, load_vision_tower
from ingot.models.vision.qwen import contiguous_mrope_axes, interleaved_mrope_axes, mrope_positions
from ingot.models.vision.tower import VisionTower
from ingot.upstream import load_config
from tests.media.seeing import TIMED, UNTIMED
from tests.memory import settled
from tests.models.vision.looking import IMAGE, VIDEO, drawn_frame, item_at, looked, prompt_with, reference


def tower_of(folder: Path) -> VisionTower:
    return load_vision_tower(folder, load_config(folder), current_device(), "float32")


def test_pixels_are_those_of_the_official_processor_where_nothing_is_resized(checkpoint: Path) -> None:
    from ingot.upstream import import_upstream

    processing = import_upstream("mlx_vlm.models.qwen3_vl.processing_qwen3_vl")
    tower, processor = tower_of(checkpoint), read_processor(checkpoint)
    unit = processor.unit
    random = np.random.default_rng(1)
    options = {"patch_size": unit // 2, "merge_size": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    frame = drawn_frame(random, 3 * unit, 5 * unit)
    item = item_at(0, "image", processor.image_layout(Size(3 * unit, 5 * unit), ImageLayoutOptions()), [frame])
    made = processing.Qwen3VLImageProcessor(min_pixels=unit, max_pixels=10**6, **options)([frame.transpose(2, 0, 1)])
    assert made["image_grid_thw"].tolist() == [list(item.grid)]
    assert np.abs(made["pixel_values"] - tower.pixels(item)).max() <= 1e-5


def test_a_clip_is_cut_in_pairs_of_frames_time_first(checkpoint: Path) -> None:
    tower, processor = tower_of(checkpoint), read_processor(checkpoint)
    unit = processor.unit
    layout = processor.video_layout(VideoHeader(Size(2 * unit, unit), 4, 2.0), VideoLayoutOptions(frames=4))
    frames = [np.full((unit, 2 * unit, 3), value, dtype=np.uint8) for value in (0, 255, 0, 255)]
    pixels = tower.pixels(item_at(0, "video", layout, frames)).reshape(layout.grid.patches, 3, 2, -1)
    assert np.allclose(pixels[:, :, 0], -1) and np.allclose(pixels[:, :, 1], 1)


@pytest.mark.parametrize("rows", [8, 64])
def test_features_are_those_of_mlx_vlms_own_tower_however_they_are_sliced(
    checkpoint: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(vit.SLICE_ROWS, "cpu", rows)
    monkeypatch.setattr(qwen, "PATCHES_TOGETHER", 2 * rows)
    tower, processor = tower_of(checkpoint), read_processor(checkpoint)
    model = reference(checkpoint)
    random = np.random.default_rng(2)
    image = item_at(
        0, "image", processor.image_layout(Size(150, 90), ImageLayoutOptions()), [drawn_frame(random, 150, 90)]
    )
    layout = processor.video_layout(VideoHeader(Size(70, 90), 6, 2.0), VideoLayoutOptions(frames=6))
    video = item_at(0, "video", layout, [drawn_frame(random, 70, 90) for _ in layout.frames])
    for item in (image, video):
        found = looked(tower, item)
        seen: Any = model.vision_tower(mx.array(tower.pixels(item)), mx.array([list(item.grid)]))
        own, deep = seen if isinstance(seen, tuple) else (seen, [])
        assert found.embeddings.shape == (item.layout.features, 32)
        for array, wanted in zip(found.arrays, [own, *deep], strict=True):
            assert mx.abs(array - wanted).max().item() < 1e-4 * max(1.0, mx.abs(wanted).max().item())


def test_what_looking_takes_is_known_before(checkpoint: Path) -> None:
    tower, processor = tower_of(checkpoint), read_processor(checkpoint)
    layout = processor.image_layout(Size(400, 400), ImageLayoutOptions())
    item = item_at(0, "image", layout, [drawn_frame(np.random.default_rng(3), 400, 400)])
    needs = tower.needs(layout)
    assert tower.pixels(item).nbytes <= needs.pixels
    before = settled()
    features = looked(tower, item)
    assert mx.get_peak_memory() - before <= needs.pixels + needs.work + needs.features
    assert features.nbytes <= needs.features


def test_a_checkpoint_without_weights_of_its_tower_is_known_and_says_how_to_serve_it(
    checkpoint: Path, tmp_path: Path
) -> None:
    stored = mx.load(str(checkpoint / "model.safetensors"))
    assert isinstance(stored, dict)
    text = {name: weight for name, weight in stored.items() if not name.startswith("vision_tower.")}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), text)
    config = load_config(checkpoint)
    assert has_vision_tower(checkpoint, config) and not has_vision_tower(tmp_path, config)
    with pytest.raises(ModelError, match="--text-only"):
        load_vision_tower(tmp_path, config, current_device())


def test_slices_of_wide_towers_end_where_patches_are_merged(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few rows a processor has time for."""
    processor, random = read_processor(checkpoint), np.random.default_rng(2)
    side = 8 * processor.unit
    layout = processor.image_layout(Size(side, side), ImageLayoutOptions())
    item = item_at(0, "image", layout, [drawn_frame(random, side, side)])
    wanted = looked(tower_of(checkpoint), item)
    monkeypatch.setitem(vit.SLICE_WORK, "cpu", 1)
    found = looked(tower_of(checkpoint), item)
    for one, other in zip(found.arrays, wanted.arrays, strict=True):
        assert mx.abs(one - other).max().item() < 1e-4


def test_a_picture_spans_rows_and_columns_and_text_goes_on_behind_the_longer_side() -> None:
    tokens, (item,) = prompt_with(TIMED, 1, ["image"])
    rows, columns = item.grid.h // 2, item.grid.w // 2
    found = mrope_positions(len(tokens), [item], 2)
    own = found[:, item.begin : item.end] - item.begin
    assert (own[0] == 0).all()
    assert own[1].tolist() == [row for row in range(rows) for _ in range(columns)]
    assert own[2].tolist() == list(range(columns)) * rows
    assert (found[:, item.end] == item.begin + max(rows, columns)).all()


def test_a_run_that_is_not_as_long_as_its_grid_says_is_no_prompt() -> None:
    tokens, (item,) = prompt_with(TIMED, 1, ["image"])
    with pytest.raises(ValueError, match="does not fit a grid"):
        mrope_positions(len(tokens), [item], 1)


def test_axes_take_turns_or_follow_each_other() -> None:
    assert interleaved_mrope_axes([3, 2, 2]) == (0, 1, 2, 0, 1, 2, 0)
    assert interleaved_mrope_axes([24, 20, 20])[57:] == (0, 1, 2, 0, 0, 0, 0)
    assert contiguous_mrope_axes([3, 2, 2]) == (0, 0, 0, 1, 1, 2, 2)


@pytest.mark.oracle
@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_positions_are_those_of_transformers_for_random_mixes(family: str) -> None:
    torch = pytest.importorskip("torch")
    walk = _walk(family)
    processor, pace = (TIMED, None) if family.startswith("qwen3") else (UNTIMED, 2.0 if "5" in family else None)
    random = np.random.default_rng(7)
    for seed in range(200):
        shown = [str(kind) for kind in random.choice(["image", "video"], size=int(random.integers(1, 5)))]
        tokens, items = prompt_with(processor, seed, shown)
        grids = {kind: [list(item.grid) for item in items if item.kind == kind] for kind in ("image", "video")}
        kinds = [1 if token == IMAGE else 2 if token == VIDEO else 0 for token in tokens]
        intervals = [item.layout.interval for item in items if item.kind == "video"]
        expected, deltas = walk(
            torch.tensor([tokens]),
            mm_token_type_ids=torch.tensor([kinds]),
            image_grid_thw=torch.tensor(grids["image"]) if grids["image"] else None,
            video_grid_thw=torch.tensor(grids["video"]) if grids["video"] else None,
            **({"second_per_grid_ts": torch.tensor(intervals)} if pace and intervals else {}),
        )
        found = mrope_positions(len(tokens), items, 2, pace)
        assert (found == expected[:, 0].numpy()).all()
        assert found.max() + 1 - len(tokens) == deltas.item()


def _walk(family: str) -> Any:
    """transformers' own, without a model around it."""
    import importlib

    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    name = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_5": "Qwen3_5"}[family]
    model = getattr(module, f"{name}Model")
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    alone = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    alone.get_vision_position_ids = lambda *args, **kwargs: model.get_vision_position_ids(alone, *args, **kwargs)
    return lambda *args, **kwargs: model.get_rope_index(alone, *args, **kwargs)
