"""LLaVA 1.6 sees a picture whole and in tiles, whose features stand in lines, as its makers have it.

mlx-vlm puts the ends of lines behind all features, and keeps those of the canvas's edges: its transformer's states and
its projector are what is compared with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.cache.forward_batch import Part
from ingot.errors import ModelError
from ingot.kernels.device import current
from ingot.media.families.registry import processor_in
from ingot.media.layout import PictureWish
from ingot.media.size import Size
from ingot.models.adapter import load
from ingot.models.vision.loading import load_tower
from ingot.models.vision.visual import Visual
from tests.memory import freed_at_once, settled
from tests.models.vision.looking import drawn_frame, item_at, looked, reference
from tests.models.vision.tiny_families import saved

pytest.importorskip("mlx_vlm")
SIZES = [Size(128, 128), Size(300, 90), Size(33, 170), Size(91, 90), Size(50, 49)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("llava_next", tmp_path_factory.mktemp("anyres") / "llava_next")


def packed_features(model: Any, tiles: mx.array, size: Size, canvas: Size, along: int) -> np.ndarray:
    """As transformers packs them, line by line."""
    *_, states = model.vision_tower(tiles, output_hidden_states=True)
    features = np.array(model.multi_modal_projector(states[model.vision_feature_layer][:, 1:]))
    rows, columns = canvas.height // 64, canvas.width // 64
    grid = features[1:].reshape(rows, columns, along, along, -1).transpose(0, 2, 1, 3, 4)
    grid = grid.reshape(rows * along, columns * along, -1)
    if size.width / size.height > grid.shape[1] / grid.shape[0]:
        edge = (grid.shape[0] - int(round(size.height * (grid.shape[1] / size.width), 7))) // 2
        grid = grid[edge : grid.shape[0] - edge]
    else:
        edge = (grid.shape[1] - int(round(size.width * (grid.shape[0] / size.height), 7))) // 2
        grid = grid[:, edge : grid.shape[1] - edge]
    end = np.array(model.image_newline)
    return np.concatenate([features[0], *(np.concatenate([line, end[None]]) for line in grid)])


def test_features_and_logits_are_those_of_its_makers_arrangement(folder: Path) -> None:
    adapter, model = load(folder, current(), dtype="float32", sees=True), reference(folder)
    assert adapter.tower is not None
    random = np.random.default_rng(1)
    for size in SIZES:
        layout = processor_in(folder).picture(size, PictureWish())  # type: ignore[union-attr]
        item = item_at(2, "image", layout, [drawn_frame(random, *size)])
        patches = adapter.tower.pixels(item).reshape(-1, 8, 8, 8, 8, 3)
        tiles = mx.array(patches.transpose(0, 1, 3, 2, 4, 5).reshape(-1, 64, 64, 3))
        wanted = packed_features(model, tiles, size, layout.size, layout.grid.h)
        found = looked(adapter.tower, item).embeddings
        assert found.shape == wanted.shape == (layout.features, 32)
        assert np.abs(np.array(found) - wanted).max() < 1e-4 * np.abs(wanted).max()
        tokens = [3, 4, *[120] * layout.features, 6]
        embeds = model.language_model.model.embed_tokens(mx.array([tokens]))
        embeds[0, 2:-1] = mx.array(wanted)
        logits = model.language_model(mx.array([tokens]), inputs_embeds=embeds).logits[0]
        rows = adapter.new_rows()
        visual = Visual(mx.arange(2, 2 + layout.features), found)
        ours = adapter.run(rows, mx.array(tokens), [Part((rows.new(),), len(tokens))], visual=visual)
        assert mx.abs(ours - logits).max().item() < 2e-3 * mx.abs(logits).max().item()


@freed_at_once
def test_little_detail_is_the_whole_picture_alone_in_the_memory_that_was_predicted(folder: Path) -> None:
    tower = load_tower(folder, json.loads((folder / "config.json").read_text()), current(), "float32")
    for wish in (PictureWish(), PictureWish(detail="low")):
        layout = processor_in(folder).picture(Size(300, 90), wish)  # type: ignore[union-attr]
        item = item_at(0, "image", layout, [drawn_frame(np.random.default_rng(2), 300, 90)])
        before = settled()
        features = looked(tower, item)
        mx.eval(features.embeddings)
        assert features.embeddings.shape[0] == layout.features
        assert mx.get_peak_memory() - before <= tower.needs(layout).peak
    assert layout.features == 64 and layout.grid.t == 1


@pytest.mark.parametrize("change", [{"vision_feature_select_strategy": "full"}, {"vision_feature_layer": [-2, -1]}])
def test_what_a_checkpoint_asks_for_and_is_not_there_is_refused_by_name(folder: Path, change: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text()) | change
    with pytest.raises(ModelError, match=next(iter(change))):
        load_tower(folder, config, current())
