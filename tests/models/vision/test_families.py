"""Families that see in tiles give the logits of mlx-vlm, alone and beside text, in the memory that was predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from ingot.cache.forward_batch import ForwardPart
from ingot.errors import ModelError
from ingot.kernels.device import Device, current_device
from ingot.media.image_processors import read_processor
from ingot.media.items import MediaItem
from ingot.media.layout import ImageLayoutOptions, Size
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.convert import Conversion, choose_quantization
from ingot.models.files.progress import no_progress
from ingot.models.probe import logits_gap
from ingot.models.vision.loading import load_vision_tower
from ingot.models.vision.tower import VisualInputs
from tests.memory import freed_at_once, settled
from tests.models.vision import references
from tests.models.vision.looking import looked, prompt_with, reference
from tests.models.vision.tiny_configs import CONFIGS, OWN_SHAPE
from tests.models.vision.tiny_families import packed, saved

pytest.importorskip("mlx_vlm")


@pytest.fixture(scope="session", params=[*CONFIGS, *OWN_SHAPE])
def tiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each family."""
    return saved(request.param, tmp_path_factory.mktemp("tiled") / request.param)


def unpatched(adapter: ModelAdapter, item: MediaItem) -> mx.array:
    """The tiles that a tower is given, as mlx-vlm takes them: [tiles, 3, height, width]."""
    patches = adapter.tower.pixels(item)
    _, rows, columns = item.grid
    side = adapter.tower.patch
    whole = patches.reshape(-1, rows, columns, side, side, 3).transpose(0, 5, 1, 3, 2, 4)
    return mx.array(np.ascontiguousarray(whole.reshape(whole.shape[0], 3, rows * side, columns * side)))


def embedded(model: Any, family: str, tokens: list[int], items: list[MediaItem], adapter: ModelAdapter) -> mx.array:
    """mlx-vlm's embeddings of a prompt. Pictures are given to it alone, as some of its classes take one."""
    rows: list[mx.array] = []
    ids = mx.array([tokens])
    for item in items:
        tiles = unpatched(adapter, item)
        height, width = tiles.shape[2:]
        pixels = tiles[None] if family in ("idefics3", "smolvlm") else tiles
        own = [token if item.begin <= at < item.end else 1 for at, token in enumerate(tokens)]
        options = {"image_sizes": [(height, width)], "mask": mx.ones((1, len(tokens)), dtype=mx.int32)}
        seen = model.get_input_embeddings(mx.array([own]), pixels, **options).inputs_embeds[0]
        rows.append(seen)
    text = model.get_input_embeddings(ids).inputs_embeds[0]
    for item, seen in zip(items, rows, strict=True):
        at = mx.array([position for begin, end in item.runs for position in range(begin, end)])
        text[at] = seen[at]
    return text[None]


def language_logits(model: Any, family: str, tokens: list[int], embeds: mx.array, items: list[MediaItem]) -> mx.array:
    """mlx-vlm's, but that its class for Gemma 3 lets every token see all others wherever there is a picture. Here those
    of a picture see each other, as transformers has it."""
    if family != "gemma3":
        return model.language_model(mx.array([tokens]), inputs_embeds=embeds).logits[0]
    decoder = model.language_model.model
    states, stated = embeds * decoder.config.hidden_size**0.5, decoder.config
    positions = np.arange(len(tokens))
    for number, layer in enumerate(decoder.layers):
        seen = positions[None] <= positions[:, None]
        for begin, end in (run for item in items for run in item.runs):
            seen[begin:end, begin:end] = True
        if (number + 1) % stated.sliding_window_pattern:
            seen &= positions[None] > positions[:, None] - stated.sliding_window
        states = layer(states, mx.array(seen), None)
    return decoder.embed_tokens.as_linear(decoder.norm(states))[0]


def expected_logits(
    model: Any, family: str, tokens: list[int], items: list[MediaItem], adapter: ModelAdapter
) -> mx.array:
    if family in OWN_SHAPE:
        return references.logits(model, adapter, tokens, items)
    embeds = embedded(model, family, tokens, items, adapter)
    return language_logits(model, family, tokens, embeds, items)


def visual(items: list[MediaItem], adapter: ModelAdapter, begin: int, end: int, ahead: int = 0) -> VisualInputs | None:
    positions: list[int] = []
    parts = []
    for item in items:
        at = [position for first, last in item.runs for position in range(first, last)]
        within = [number for number, position in enumerate(at) if begin <= position < end]
        if within:
            positions += [at[number] - begin + ahead for number in within]
            features = looked(adapter.tower, item)
            parts.append(features.embeddings[mx.array(within)])
    return VisualInputs(mx.array(positions), mx.concatenate(parts), added=features.added) if parts else None


def close(found: mx.array, wanted: mx.array) -> bool:
    return bool(mx.abs(found - wanted).max().item() < 2e-3 * mx.abs(wanted).max().item())


@pytest.mark.parametrize("kind", ["cpu", "cuda", "metal"])
def test_pictures_give_the_logits_of_mlx_vlm_whole_in_pieces_and_beside_text(tiled: Path, kind: Any) -> None:
    device = current_device() if kind == "cpu" else Device(kind, "acting", current_device().memory)
    adapter = load_model_adapter(tiled, device, dtype="float32", with_vision=True)
    model = reference(tiled)
    for shown in ([], ["image"], ["image", "image", "image"]):
        tokens, items = prompt_with(read_processor(tiled), 5, shown)
        wanted = expected_logits(model, tiled.name, tokens, items, adapter)
        positions = adapter.tower.positions(len(tokens), items)
        # Gemma's pictures are computed whole.
        cuts = [] if not items else [items[0].begin + (0 if adapter.tower.bidirectional else 2)]
        for ends in ([len(tokens)], [*cuts, len(tokens)]):
            rows = adapter.new_batch_state()
            row, other, begin, found = rows.new(), rows.new(), 0, []
            other_tokens = [3, 7]
            for end in ends:
                whole = [item for item in items if begin <= item.begin < end and adapter.tower.bidirectional]
                bidirectional = tuple((item.begin - begin, item.end - begin) for item in whole)
                parts = [
                    ForwardPart((other,), len(other_tokens)),
                    ForwardPart(
                        (row,),
                        end - begin,
                        None if positions is None else mx.array(positions[:, begin:end]),
                        None if positions is None else 0,
                        bidirectional=bidirectional,
                    ),
                ]
                inputs = mx.array([*other_tokens, *tokens[begin:end]])
                logits = adapter.run(rows, inputs, parts, visual=visual(items, adapter, begin, end, len(other_tokens)))
                found.append(logits[len(other_tokens) :])
                mx.eval(found[-1], rows.pending())
                begin = end
            found_logits = mx.concatenate(found)
            scored = wanted.shape[-1]  # an output head may have no rows for the tokens of images
            assert (found_logits[:, scored:] == -mx.inf).all()
            assert close(found_logits[:, :scored], wanted)


def test_of_a_large_picture_no_more_is_sent_than_is_looked_at(tiled: Path) -> None:
    """The rest of it stays with the worker that unpacked it: of 8000 by 6000 pixels, 144 MB."""
    tower = load_vision_tower(tiled, json.loads((tiled / "config.json").read_text()), current_device())
    size = Size(8000, 6000)
    layout = read_processor(tiled).image_layout(size, ImageLayoutOptions())
    views = tower.views(size, layout)
    sent = sum(3 * view[-1].area for view in views)
    assert views and sent <= 2 * tower.needs(layout).pixels


@pytest.mark.sampled(3)
def test_a_converted_model_sees_what_it_saw_and_says_what_it_said(tiled: Path, tmp_path: Path) -> None:
    Conversion(tiled, tiled.name, choose_quantization(bits=8, group_size=32), None).run(tmp_path / "made", no_progress)
    tokens, [item] = prompt_with(read_processor(tiled), 1, ["image"])
    seen, said = list[mx.array](), list[mx.array]()
    for folder in (tiled, tmp_path / "made"):
        adapter = load_model_adapter(folder, current_device(), dtype="float32", with_vision=True)
        assert adapter.tower is not None
        seen.append(looked(adapter.tower, item).embeddings)
        rows = adapter.new_batch_state()
        each = [*range(len(tokens))]
        said.append(adapter.run(rows, mx.array(tokens), [ForwardPart((rows.new(),), len(tokens))], each))
    assert mx.array_equal(*seen)
    # Molmo's output heads have no rows behind these.
    gaps = [logits_gap(one[None, :112], other[None, :112]) for one, other in zip(*said, strict=True)]
    assert 0 < np.median(gaps) < 0.1


@pytest.mark.parametrize("family", [*CONFIGS, *OWN_SHAPE])
def test_a_packed_tower_sees_what_it_did_unpacked(family: str, tmp_path: Path) -> None:
    folders = saved(family, tmp_path / "whole"), packed(family, tmp_path / "packed")
    found = []
    for folder in folders:
        tower = load_vision_tower(folder, json.loads((folder / "config.json").read_text()), current_device())
        _, [item] = prompt_with(read_processor(folder), 1, ["image"])
        found.append(looked(tower, item).embeddings.astype(mx.float32))
    assert mx.abs(found[0] - found[1]).max().item() < 0.15 * mx.abs(found[0]).max().item()
    assert not mx.array_equal(*found)


@freed_at_once
def test_no_more_memory_is_taken_than_was_predicted(tiled: Path) -> None:
    tower = load_vision_tower(tiled, json.loads((tiled / "config.json").read_text()), current_device(), "float32")
    _, [item] = prompt_with(read_processor(tiled), 1, ["image"])
    pixels = tower.pixels(item)
    needs = tower.needs(item.layout)
    assert pixels.nbytes <= needs.pixels
    before = settled()
    work = tower.encode(pixels, item.layout)
    features = None
    while features is None:
        try:
            mx.eval(*next(work))
        except StopIteration as done:
            features = done.value
    mx.eval(features.embeddings)
    assert features.nbytes <= needs.features
    assert mx.get_peak_memory() - before <= needs.peak


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any], dict[str, Any]], Any]]] = {
    "pan and scan": ("gemma3", lambda config, files: files.update(do_pan_and_scan=True)),
    "several layers": ("llava", lambda config, files: config.update(vision_feature_layer=[-2, -1])),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_checkpoint_asks_for_and_is_not_there_is_refused_by_name(name: str, tmp_path: Path) -> None:
    family, change = REFUSED[name]
    folder = saved(family, tmp_path / family)
    config, files = (json.loads((folder / f).read_text()) for f in ("config.json", "preprocessor_config.json"))
    change(config, files)
    (folder / "preprocessor_config.json").write_text(json.dumps(files))
    with pytest.raises(ModelError, match=r"do_pan_and_scan|vision_feature_layer"):
        load_vision_tower(folder, config, current_device())


def test_a_draft_head_behind_the_layers_of_a_language_part_is_left_out(tmp_path: Path) -> None:
    folder = saved("glm_ocr", tmp_path / "glm_ocr")
    weights = mx.load(str(folder / "model.safetensors"))
    weights["language_model.model.layers.3.eh_proj.weight"] = mx.zeros((32, 64))
    mx.eval(weights)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    assert len(load_model_adapter(folder, current_device(), dtype="float32").model.layers) == 3


@pytest.mark.parametrize("version", [4.0, "3.0"])
def test_older_minicpms_are_read_by_their_makers_names_and_versions(version: Any, tmp_path: Path) -> None:
    """Of 4.0, whose language model is Llama's; that of 3.0 is not known."""
    folders = saved("minicpmo", tmp_path / "new"), saved("minicpmo", tmp_path / "old")
    stored, named = mx.load(str(folders[1] / "model.safetensors")), {}
    assert isinstance(stored, dict)
    joined = {kind: [stored.pop(f"resampler.attn.{name}_proj.{kind}") for name in "qkv"] for kind in ("weight", "bias")}
    for name, weight in stored.items():
        if not name.endswith(("q_norm.weight", "k_norm.weight")):
            named[name.replace("language_model.", "llm.").replace("vision_tower.", "vpm.")] = weight
    named |= {f"resampler.attn.in_proj_{kind}": mx.concatenate(parts) for kind, parts in joined.items()}
    mx.eval(named)
    mx.save_safetensors(str(folders[1] / "model.safetensors"), named, metadata={"format": "pt"})
    config = json.loads((folders[1] / "config.json").read_text())
    config |= {
        "model_type": "minicpmv",
        "version": version,
        "vision_config": {**config["vision_config"], "model_type": "siglip"},
    }
    (folders[1] / "config.json").write_text(json.dumps(config))
    if version == "3.0":
        with pytest.raises(ModelError, match=r"MiniCPM of version 3\.0 is not supported: 2\.6, 4\.0, 4\.5 are"):
            load_model_adapter(folders[1], current_device(), dtype="float32")
        return
    adapter = load_model_adapter(folders[1], current_device(), dtype="float32", with_vision=True)
    assert type(adapter.model).__mro__[1].__module__ == "mlx_lm.models.llama"
    tower = load_vision_tower(
        folders[0], json.loads((folders[0] / "config.json").read_text()), current_device(), "float32"
    )
    _, [item] = prompt_with(read_processor(folders[0]), 1, ["image"])
    assert mx.array_equal(looked(adapter.tower, item).embeddings, looked(tower, item).embeddings)


def test_phi_4_needs_no_config_of_its_language_model_alone(tmp_path: Path) -> None:
    folder = saved("phi4-siglip", tmp_path / "phi4")
    config = json.loads((folder / "config.json").read_text())
    del config["text_config"]
    (folder / "config.json").write_text(json.dumps(config))
    adapter = load_model_adapter(folder, current_device(), dtype="float32", with_vision=True)
    _, [item] = prompt_with(read_processor(folder), 1, ["image"])
    assert looked(adapter.tower, item).embeddings.shape == (item.layout.features, 32)


@pytest.mark.cpus
def test_convolutions_are_products_on_cpus_unless_each_channel_has_its_own(tmp_path: Path) -> None:
    folder = saved("gemma3n", tmp_path / "gemma3n")
    config = json.loads((folder / "config.json").read_text())
    towers = [load_vision_tower(folder, config, current_device(), dtype) for dtype in (None, "float32")]
    _, [item] = prompt_with(read_processor(folder), 1, ["image"])
    for tower in towers:
        layers = [layer for part in tower.modules for _, layer in part.named_modules()]
        assert all(layer.groups > 1 for layer in layers if isinstance(layer, nn.Conv2d))
        assert sum(isinstance(layer, nn.Linear) for layer in layers) > 20
    own, plain = (looked(tower, item).embeddings for tower in towers)
    assert close(own.astype(mx.float32), plain)
