"""Towers are given the very pixels that the families' own processors make of a picture."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
import pytest

from ingot.kernels.device import current_device
from ingot.media.image_processors import read_processor
from ingot.media.layout import ImageLayoutOptions, Size
from ingot.models.vision.loading import load_vision_tower
from tests.models.vision.looking import drawn_frame, item_at
from tests.models.vision.references import merged_blocks, patches_of, tiles_of
from tests.models.vision.tiny_families import FILES, saved

pytest.importorskip("mlx_vlm")
PROCESSORS = {
    "gemma3": ("gemma3", "Gemma3ImageProcessorPil"),
    "gemma3n": ("siglip", "SiglipImageProcessorPil"),
    "llava": ("clip", "CLIPImageProcessorPil"),
    "llava_next": ("llava_next", "LlavaNextImageProcessorPil"),
    "idefics3": ("idefics3", "Idefics3ImageProcessorPil"),
    "smolvlm": ("smolvlm", "SmolVLMImageProcessorPil"),
    "pixtral": ("pixtral", "PixtralImageProcessorPil"),
    "internvl": ("got_ocr2", "GotOcr2ImageProcessorPil"),
}
OWN_SHAPE = {
    "gemma4": ("transformers.models.gemma4.image_processing_pil_gemma4", "Gemma4ImageProcessorPil"),
    "glm4v": ("transformers.models.glm4v.image_processing_pil_glm4v", "Glm4vImageProcessorPil"),
    "minimax_m3_vl": ("mlx_vlm.models.minimax_m3_vl.processing_minimax_m3_vl", "MiniMaxM3VLImageProcessor"),
    "minicpmv4_6": ("mlx_vlm.models.minicpmv4_6.processing_minicpmv4_6", "MiniCPMVImageProcessor"),
    "phi4-siglip": ("transformers.models.siglip2.image_processing_pil_siglip2", "Siglip2ImageProcessorPil"),
    "minicpmo": ("mlx_vlm.models.minicpmo.processing_minicpmo", "MiniCPMOImageProcessor"),
    "kimi_vl": ("mlx_vlm.models.kimi_vl.processing_kimi_vl", "KimiVLImageProcessor"),
    "kimi_k25": ("mlx_vlm.models.kimi_k25.processing_kimi_k25", "KimiK25ImageProcessor"),
    "molmo": ("mlx_vlm.models.molmo.processing_molmo", "MolmoImageProcessor"),
    "lfm2_vl": ("mlx_vlm.models.lfm2_vl.processing_lfm2_vl", "Lfm2VlNumpyImageProcessor"),
    "paddleocr_vl": ("mlx_vlm.models.paddleocr_vl.processing_paddleocr_vl", "ImageProcessor"),
}
"""Families whose pixels are patches, and what makes them."""
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


def official_patches(family: str, frame: Any) -> tuple[np.ndarray, int | None]:
    """The patches [patches, numbers] of all tiles, and how many features its makers count, where they say so."""
    from PIL import Image

    module, name = OWN_SHAPE[family]
    options = dict(FILES[family])
    if family == "gemma4":  # takes numbers that it was trained with alone
        options["max_soft_tokens"] = 70
    if family == "kimi_k25":
        media = options["media_proc_cfg"]
        options = {"patch_size": 8, "in_token_limit": media["in_patch_limit"], "merge_kernel_size": [2, 2]}
    image = Image.fromarray(frame)
    if family == "phi4-siglip":  # its makers' own makes images no larger than need be
        least, most = options.pop("min_num_patches"), options.pop("max_num_patches")
        own = (image.width // 8) * (image.height // 8)
        processor = getattr(importlib.import_module(module), name)(
            **options, max_num_patches=min(max(own, least), most)
        )
        made = processor(image, return_tensors="np")
        return made["pixel_values"][0][made["pixel_attention_mask"][0].astype(bool)], None
    processor = getattr(importlib.import_module(module), name)(**options)
    if family == "molmo":  # which rounds colours down where they are given as shares of one
        patches, tokens, _, _ = processor.preprocess(frame.astype(np.float32), 1, 2, 3, 4)
        return patches.reshape(-1, 192), int((tokens == 1).sum())
    if family == "lfm2_vl":
        made = processor([image])
        masks = np.asarray(made["pixel_attention_mask"]).astype(bool)
        rows = [own[mask] for own, mask in zip(np.asarray(made["pixel_values"]), masks, strict=True)]
        return np.concatenate(rows), None
    if family == "minicpmv4_6":
        made = processor([[image]])
        rows = [own.reshape(3, 8, -1, 8).transpose(2, 1, 3, 0).reshape(-1, 192) for own in made["pixel_values"][0]]
        return np.concatenate(rows), sum(int(np.prod(size)) // 16 for size in made["tgt_sizes"][0])
    if family == "minicpmo":
        return patches_of(processor([[image]])["pixel_values"][0][0].transpose(1, 2, 0), 8).reshape(-1, 192), None
    made = processor([image] if family.startswith("kimi") else image, return_tensors="np")
    found = np.asarray(made["pixel_values"])
    if family == "gemma4":
        count = int(made["num_soft_tokens_per_image"][0])
        return found[0][: count * 9] * 2 - 1, count
    return (found if found.ndim == 2 else found.reshape(-1, *found.shape[-3:])), None


def own_patches(family: str, tiles: list[np.ndarray]) -> np.ndarray:
    """As the family's own processor arranges them."""
    if family in ("glm4v", "minimax_m3_vl"):
        return merged_blocks(tiles[0], 8)
    patches = np.concatenate([patches_of(tile, 8) for tile in tiles])
    if family.startswith("kimi") or family == "paddleocr_vl":
        return patches.transpose(0, 3, 1, 2)
    return patches.reshape(len(patches), -1)


@pytest.mark.parametrize("family", OWN_SHAPE)
def test_patches_and_their_number_are_those_of_the_familys_own_processor(family: str, tmp_path: Path) -> None:
    folder = saved(family, tmp_path)
    other = {"gemma4": {"max_soft_tokens": 70}, "minicpmo": {"slice_mode": False}}.get(family, {})
    (folder / "preprocessor_config.json").write_text(json.dumps({**FILES[family], **other}))
    tower: Any = load_vision_tower(folder, json.loads((folder / "config.json").read_text()), current_device())
    random = np.random.default_rng(3)
    for size in SIZES:
        if family == "kimi_vl" and min(size) < 8:
            continue
        frame = drawn_frame(random, *size)
        layout = read_processor(folder).image_layout(size, ImageLayoutOptions())
        wanted, count = official_patches(family, frame)
        found = own_patches(family, tiles_of(tower, item_at(0, "image", layout, [frame])))
        assert found.size == wanted.size, size
        assert np.abs(found.reshape(wanted.shape) - wanted).max() < 1e-5, size
        assert count in (None, layout.features), size


def interpolated(frame: np.ndarray, size: Any, resample: Any) -> np.ndarray:
    """Resized as torch does without antialiasing, in floating point, and rounded."""
    found = frame.astype(np.float64)
    for axis, new in enumerate(size):
        old = found.shape[axis]
        at = (np.arange(new) + 0.5) * old / new - 0.5
        found = np.apply_along_axis(lambda line, at=at: np.interp(at, np.arange(len(line)), line), axis, found)
    return np.rint(found).astype(np.float32) / 255


def test_molmo_2_is_given_what_its_makers_resize_without_antialiasing(tmp_path: Path) -> None:
    """mlx-vlm, which cuts crops as they do, resizes with it."""
    theirs = importlib.import_module("mlx_vlm.models.molmo2.processing")
    folder = saved("molmo2", tmp_path)
    tower: Any = load_vision_tower(folder, json.loads((folder / "config.json").read_text()), current_device())
    random = np.random.default_rng(3)
    for size in (*SIZES, Size(900, 700)):
        frame = drawn_frame(random, *size)
        layout = read_processor(folder).image_layout(size, ImageLayoutOptions())
        with mock.patch.object(theirs, "resize_image_pil", interpolated):
            made = theirs.Molmo2ImageProcessor(**FILES["molmo2"]).preprocess([frame])
        found = tower.pixels(item_at(0, "image", layout, [frame])).reshape(made["pixel_values"].shape)
        off = np.abs(found - made["pixel_values"])
        # Halves may be rounded otherwise in single precision.
        assert off.max() < 0.008 and (off > 1e-5).mean() < 0.05, size
        assert layout.features == len(made["image_token_pooling"])


@pytest.mark.parametrize("size", [Size(300, 200), Size(700, 420), Size(420, 1000), Size(641, 640)])
def test_deepseek_ocr_counts_and_cuts_as_its_own_processor(size: Size, tmp_path: Path) -> None:
    """Which has sizes in its code, and rounds colours to bfloat16."""
    from PIL import Image

    theirs = importlib.import_module("mlx_vlm.models.deepseekocr.processing_deepseekocr")

    class Named:
        image_token, image_token_id, image_transform = "<image>", 7, theirs.ImageTransform()

        def encode(self, text: str, **options: Any) -> list[int]:
            return []

    folder = saved("deepseekocr", tmp_path)
    (folder / "preprocessor_config.json").write_text("{}")
    tower: Any = load_vision_tower(folder, json.loads((folder / "config.json").read_text()), current_device())
    frame = drawn_frame(np.random.default_rng(3), *size)
    layout = read_processor(folder).image_layout(size, ImageLayoutOptions())
    tokens, (crops, wholes), _, shape, _ = theirs.DeepseekOCRProcessor.tokenize_with_images(
        Named(), "<image>", [Image.fromarray(frame)]
    )
    *tiles, whole = tiles_of(tower, item_at(0, "image", layout, [frame]))
    assert layout.features == tokens.count(7)
    assert tuple(shape.tolist()[0]) == (layout.arranged or (1, 1))
    for found, wanted in zip([*tiles, whole], [*(crops if tiles else ()), wholes[0]], strict=True):
        assert np.abs(found.transpose(2, 0, 1) - np.array(wanted.astype(mx.float32))).max() < 5e-3
