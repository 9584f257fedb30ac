"""Gemma 3 with pictures, whose tokens see each other, against transformers on a folder that it saved."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.cache.forward_batch import ForwardPart
from ingot.kernels.device import Device, current_device
from ingot.media.image_processors import read_processor
from ingot.models.adapter import load_model_adapter
from tests.models.vision.looking import prompt_with
from tests.models.vision.test_families import close, unpatched, visual
from tests.models.vision.tiny_configs import CONFIGS
from tests.models.vision.tiny_families import FILES

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.oracle


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, Path]:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(3)
    stated = CONFIGS["gemma3"]
    vision = {**stated["vision_config"], "vision_use_head": False}  # as published ones have it
    config = Gemma3Config(**{**stated, "vision_config": vision, "initializer_range": 0.1})
    model = Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():  # many begin as nothing
        torch.nn.init.normal_(parameter, std=0.2)
    folder = tmp_path_factory.mktemp("oracle") / "gemma3"
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(FILES["gemma3"]))
    return model, folder


@pytest.mark.parametrize("kind", ["cpu", "cuda", "metal"])
def test_pictures_give_the_logits_of_transformers(oracle: tuple[torch.nn.Module, Path], kind: str) -> None:
    model, folder = oracle
    device = current_device() if kind == "cpu" else Device(kind, "acting", current_device().memory)
    adapter = load_model_adapter(folder, device, dtype="float32", with_vision=True)
    tokens, items = prompt_with(read_processor(folder), 5, ["image", "image", "image"])
    marked = np.zeros(len(tokens), dtype=np.int64)
    for begin, end in (run for item in items for run in item.runs):
        marked[begin:end] = 1
    pixels = np.concatenate([np.array(unpatched(adapter, item)) for item in items])
    with torch.no_grad():
        wanted = model(
            input_ids=torch.tensor([tokens]),
            pixel_values=torch.tensor(pixels),
            token_type_ids=torch.tensor(marked)[None],
        ).logits[0]
    rows = adapter.new_batch_state()
    bidirectional = tuple(run for item in items for run in item.runs)
    part = ForwardPart((rows.new(),), len(tokens), bidirectional=bidirectional)
    found = adapter.run(rows, mx.array(tokens), [part], visual=visual(items, adapter, 0, len(tokens)))
    assert close(found, mx.array(wanted.numpy()))
