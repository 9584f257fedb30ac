"""Models that see give mlx-vlm's own logits, whole and in pieces, alone and beside text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.device import Device, current_device
from ingot.media.image_processors import read_processor
from ingot.media.items import MediaItem
from ingot.models.adapter import ModelAdapter, load_model_adapter
from ingot.models.vision.tower import VisionFeatures, VisualInputs
from tests.models.vision.looking import looked, prompt_with, reference, saved

SHOWN = ["image", "video", "image"]


def expected(folder: Path, tokens: list[int], items: list[MediaItem], adapter: ModelAdapter) -> mx.array:
    """By mlx-vlm's language model, over features of its own tower and positions of transformers' rules."""
    model = reference(folder)
    ids = mx.array([tokens])
    embeds = model.language_model.model.embed_tokens(ids)
    deep: list[list[mx.array]] = []
    indices: list[int] = []
    for item in items:
        seen = model.vision_tower(mx.array(adapter.tower.pixels(item)), mx.array([list(item.grid)]))
        own, further = seen if isinstance(seen, tuple) else (seen, [])
        at = [index for begin, end in item.runs for index in range(begin, end)]
        embeds[0, mx.array(at)] = own
        deep.append(list(further))
        indices += at
    positions = mx.array(adapter.tower.positions(len(tokens), items))[:, None]
    visible = np.zeros((1, len(tokens)), dtype=bool)
    visible[0, indices] = True
    stacked = [mx.concatenate(list(each)) for each in zip(*deep, strict=True)] or None
    options: dict[str, Any] = {"position_ids": positions}
    if stacked:
        options |= {"visual_pos_masks": mx.array(visible), "deepstack_visual_embeds": stacked}
    return model.language_model(ids, inputs_embeds=embeds, **options).logits[0]


def shown(items: list[MediaItem], features: list[VisionFeatures], begin: int, end: int) -> VisualInputs | None:
    """What of the items stands in tokens [begin, end)."""
    indices, parts = [], []
    for item, own in zip(items, features, strict=True):
        at = [index for first, last in item.runs for index in range(first, last)]
        within = [number for number, index in enumerate(at) if begin <= index < end]
        if within:
            indices += [at[number] - begin for number in within]
            parts.append([array[mx.array(within)] for array in own.arrays])
    if not parts:
        return None
    joined = [mx.concatenate(list(each)) for each in zip(*parts, strict=True)]
    return VisualInputs(mx.array(indices), joined[0], tuple(joined[1:]))


def logits(adapter: ModelAdapter, tokens: list[int], items: list[MediaItem], cuts: list[int]) -> mx.array:
    features = [looked(adapter.tower, item) for item in items]
    positions = adapter.tower.positions(len(tokens), items)
    rows = adapter.new_batch_state()
    row = rows.new()
    found = []
    for begin, end in zip([0, *cuts], [*cuts, len(tokens)], strict=True):
        part = ForwardPart((row,), end - begin, mx.array(positions[:, begin:end]), following=0)
        inputs = mx.array(tokens[begin:end])
        found.append(adapter.run(rows, inputs, [part], visual=shown(items, features, begin, end)))
        mx.eval(found[-1], rows.pending())
    return mx.concatenate(found)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "metal"])
def test_a_prompt_with_pictures_and_clips_gives_the_logits_of_mlx_vlm(checkpoint: Path, kind: Any) -> None:
    assert_agrees(checkpoint, current_device() if kind == "cpu" else Device(kind, "acting", current_device().memory))


def test_so_does_a_mixture_of_experts(tmp_path: Path) -> None:
    assert_agrees(saved("qwen3_vl_moe", tmp_path / "mixture"), current_device())


def assert_agrees(folder: Path, device: Device) -> None:
    adapter = load_model_adapter(folder, device, dtype="float32", with_vision=True)
    assert adapter.mixed
    tokens, items = prompt_with(read_processor(folder), 3, SHOWN)
    wanted = expected(folder, tokens, items, adapter)
    middle = (items[1].runs[0][0] + items[1].runs[0][1]) // 2
    for cuts in ([], [4, middle, items[2].end]):
        assert mx.abs(logits(adapter, tokens, items, cuts) - wanted).max().item() < 2e-3 * mx.abs(wanted).max().item()
