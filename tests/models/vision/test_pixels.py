"""Towers are given the very pixels that the families' own processors make of a picture."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ingot.kernels.device import current_device
from ingot.media.image_processors import read_processor
from ingot.media.layout import ImageLayoutOptions, Size
from ingot.models.vision.loading import load_vision_tower
from tests.models.vision.looking import drawn_frame, item_at
from tests.models.vision.tiny_families import FILES, saved

pytest.importorskip("mlx_vlm")
PROCESSORS = {
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil"),
    "llava": ("clip", "CLIPImageProcessorPil"),
    "llava_next": ("llava_next", "LlavaNextImageProcessorPil"),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessorPil"),
    "pixtral": ("pixtral", "PixtralImageProcessorPil"),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil"),
}
SIZES = [Size(64, 64), Size(200, 90), Size(33, 170), Size(91, 90), Size(400, 31), Size(20, 20), Size(129, 257)]


def official(family: str, frame: Any) -> Any:
    """[tiles, 3, height, width]"""
    from PIL import Image

    folder, name = PROCESSORS[family]
    module = importlib.import_module(f"transformers.models.{folder}.image_processing_pil_{folder}")
    processor = getattr(module, name)(**FILES[family])
    found = processor(Image.fromarray(frame), return_tensors="np")["pixel_values"]
    return np.asarray(found[0] if found.ndim == 5 else found)


@pytest.mark.parametrize("family", PROCESSORS)
def test_pixels_are_those_of_the_familys_own_processor(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    tower: Any = load_vision_tower(folder, json.loads((folder / "config.json").read_text()), current_device())
    random = np.random.default_rng(3)
    for size in SIZES:
        frame = drawn_frame(random, *size)
        layout = read_processor(folder).image_layout(size, ImageLayoutOptions())
        wanted = official(family, frame)
        patches = tower.pixels(item_at(0, "image", layout, [frame]))
        side, (_, rows, columns) = tower.patch, layout.grid
        whole = patches.reshape(-1, rows, columns, side, side, 3).transpose(0, 5, 1, 3, 2, 4)
        found = whole.reshape(whole.shape[0], 3, rows * side, columns * side)
        assert found.shape == wanted.shape, size
        assert np.abs(found - wanted).max() < 1e-5, size
