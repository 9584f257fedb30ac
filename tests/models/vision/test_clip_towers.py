"""Phi 3.5 sees tiles of a padded picture and the whole, in the arrangement that its makers gave them.

mlx-vlm's own arrangement takes tiles that stand side by side for ones that stand one below another, so that its
transformer's states are what is compared with.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from ingot.cache.forward_batch import ForwardPart
from ingot.errors import ModelError
from ingot.kernels.device import current_device
from ingot.media.image_processors import read_processor
from ingot.media.layout import ImageLayoutOptions, Size
from ingot.models.adapter import load_model_adapter
from ingot.models.vision.clip_towers import WHITE, fill_canvas
from ingot.models.vision.loading import load_vision_tower, mlx_vlm_package, unloaded_mlx_vlm_model
from ingot.models.vision.tiles import on_canvas, resize_bicubic
from ingot.models.vision.tower import VisualInputs
from tests.memory import freed_at_once, settled
from tests.models.vision.looking import drawn_frame, item_at, looked, reference
from tests.models.vision.tiny_families import saved

pytest.importorskip("mlx_vlm")
CONFIG = {
    "model_type": "phi3_v",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "img_processor": {"image_dim_out": 1024, "name": "clip_vision_model", "num_img_tokens": 144},
}


@pytest.fixture
def phi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint whose tower has three layers instead of 24."""
    package = mlx_vlm_package(CONFIG)
    stated = package.VisionModel.CLIP_VIT_LARGE_PATCH14_336_CONFIG
    monkeypatch.setattr(stated, "num_hidden_layers", 3)
    monkeypatch.setattr(stated, "intermediate_size", 64)
    random = np.random.default_rng(0)
    weights = {}
    for name, weight in tree_flatten(unloaded_mlx_vlm_model(package, CONFIG).parameters()):
        values = random.normal(0, 0.02, weight.shape).astype(np.float32)
        weights[name] = mx.array(values + (1 if "norm" in name and name.endswith("weight") else 0))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), weights, metadata={"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"num_crops": 4}))
    return tmp_path


def arranged(model: Any, tiles: mx.array, rows: int, columns: int) -> mx.array:
    """The makers' arrangement of mlx-vlm's states."""
    vision_encoder = model.model.vision_embed_tokens
    states = vision_encoder.img_processor.vision_model(tiles, True)[-1][-2][:, 1:]
    count, along, width = states.shape[0], 12, states.shape[-1]
    blocks = states.reshape(count, along, 2, along, 2, width).transpose(0, 1, 3, 2, 4, 5)
    blocks = blocks.reshape(count, along, along, 4 * width)
    tiled = blocks[1:].reshape(rows, columns, along, along, -1).transpose(0, 2, 1, 3, 4)
    lines = []
    for part in (tiled.reshape(rows * along, columns * along, -1), blocks[0]):
        ends = mx.broadcast_to(vision_encoder.sub_GN[0], (part.shape[0], 1, part.shape[-1]))
        lines.append(mx.concatenate([part, ends], axis=1).reshape(-1, part.shape[-1]))
    x = mx.concatenate([lines[0], vision_encoder.glb_GN[0], lines[1]])
    for layer in vision_encoder.img_projection:
        x = layer(x)
    return x


def test_pictures_give_the_features_and_logits_of_mlx_vlm(phi: Path) -> None:
    adapter = load_model_adapter(phi, current_device(), dtype="float32", with_vision=True)
    model = unloaded_mlx_vlm_model(mlx_vlm_package(CONFIG), CONFIG)
    model.load_weights(str(phi / "model.safetensors"))
    random = np.random.default_rng(1)
    for size in (Size(300, 200),):
        layout = read_processor(phi).image_layout(size, ImageLayoutOptions())
        item = item_at(2, "image", layout, [drawn_frame(random, *size)])
        pixels = adapter.tower.pixels(item)
        tiles = pixels.reshape(-1, 24, 24, 14, 14, 3).transpose(0, 1, 3, 2, 4, 5).reshape(-1, 336, 336, 3)
        wanted = arranged(model, mx.array(tiles), layout.size.height // 336, layout.size.width // 336)
        found = looked(adapter.tower, item).embeddings
        assert found.shape == wanted.shape == (layout.features, 32)
        assert mx.abs(found - wanted).max().item() < 1e-4 * mx.abs(wanted).max().item()
        tokens = [3, 4, *[5] * layout.features, 6]
        embeds = model.model.embed_tokens(mx.array([tokens]))
        embeds[0, 2:-1] = wanted
        logits = model(mx.array([tokens]), inputs_embeds=embeds).logits[0]
        rows = adapter.new_batch_state()
        visual = VisualInputs(mx.arange(2, 2 + layout.features), found)
        ours = adapter.run(rows, mx.array(tokens), [ForwardPart((rows.new(),), len(tokens))], visual=visual)
        assert mx.abs(ours - logits).max().item() < 2e-3 * mx.abs(logits).max().item()


def test_a_picture_stands_in_the_middle_of_white() -> None:
    assert fill_canvas(Size(300, 100), Size(672, 336)) == (672, 224)
    made = on_canvas(np.zeros((224, 672, 3), np.uint8), Size(672, 336), WHITE)
    assert made.shape == (336, 672, 3)
    assert not made[56:280].any() and (made[:56] == 255).all() and (made[280:] == 255).all()
    aside = on_canvas(np.zeros((672, 224, 3), np.uint8), Size(336, 672), WHITE)
    assert np.array_equal(aside, made.swapaxes(0, 1))


@pytest.mark.oracle
def test_numbers_are_resized_as_by_torch() -> None:
    torch = pytest.importorskip("torch")
    frame = np.random.default_rng(0).normal(size=(50, 90, 3)).astype(np.float32)
    for size in (Size(33, 33), Size(180, 20), Size(90, 50)):
        theirs = torch.nn.functional.interpolate(
            torch.tensor(frame).permute(2, 0, 1)[None], size=(size.height, size.width), mode="bicubic"
        )[0].permute(1, 2, 0)
        assert np.abs(resize_bicubic(frame, size) - theirs.numpy()).max() < 5e-5  # torch finds places in float32


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
    adapter, model = load_model_adapter(folder, current_device(), dtype="float32", with_vision=True), reference(folder)
    assert adapter.tower is not None
    random = np.random.default_rng(1)
    for size in SIZES:
        layout = read_processor(folder).image_layout(size, ImageLayoutOptions())  # type: ignore[union-attr]
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
        rows = adapter.new_batch_state()
        visual = VisualInputs(mx.arange(2, 2 + layout.features), found)
        ours = adapter.run(rows, mx.array(tokens), [ForwardPart((rows.new(),), len(tokens))], visual=visual)
        assert mx.abs(ours - logits).max().item() < 2e-3 * mx.abs(logits).max().item()


@freed_at_once
def test_little_detail_is_the_whole_picture_alone_in_the_memory_that_was_predicted(folder: Path) -> None:
    tower = load_vision_tower(folder, json.loads((folder / "config.json").read_text()), current_device(), "float32")
    for layout_options in (ImageLayoutOptions(), ImageLayoutOptions(detail="low")):
        layout = read_processor(folder).image_layout(Size(300, 90), layout_options)  # type: ignore[union-attr]
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
        load_vision_tower(folder, config, current_device())
