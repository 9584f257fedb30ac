"""Tiny models that see in tiles, with random weights, as mlx-vlm would save them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from ingot.models.vision.loading import mlx_vlm_package, unloaded_mlx_vlm_model
from tests.models.vision.tiny_configs import CONFIGS, OWN_SHAPE, UNLIKE

_COLOURS = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
_RANGE = {"patch_size": 8, "merge_size": 2, "size": {"shortest_edge": 2048, "longest_edge": 8192}, "resample": 3}
FILES: dict[str, dict[str, Any]] = {
    "gemma3": {"size": {"height": 64, "width": 64}, "resample": 2, "image_seq_length": 16},
    "llava": {"size": {"shortest_edge": 64}, "crop_size": {"height": 64, "width": 64}, "resample": 3},
    "llava_next": {
        "size": {"shortest_edge": 64},
        "crop_size": {"height": 64, "width": 64},
        "resample": 3,
        "image_grid_pinpoints": [[64, 128], [128, 64], [128, 128], [64, 192]],
    },
    "idefics3": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}, "resample": 1},
    "smolvlm": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}, "resample": 1},
    "pixtral": {"size": {"longest_edge": 96}, "patch_size": {"height": 8, "width": 8}, "resample": 3},
    "mistral3": {"size": {"longest_edge": 96}, "patch_size": {"height": 8, "width": 8}, "resample": 3},
    "internvl": {
        "size": {"height": 64, "width": 64},
        "max_patches": 4,
        "crop_to_patches": True,
        "resample": 3,
        **_COLOURS,
    },
    "internvl_chat": {"size": {"height": 64, "width": 64}, "max_patches": 4, "resample": 3},
    "gemma3n": {"size": {"height": 128, "width": 128}, "resample": 2, "do_normalize": False},
    "gemma4": {"patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 20, "do_normalize": False},
    "gemma4-per-layer": {"patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 20},
    "gemma4_unified": {"patch_size": 8, "pooling_kernel_size": 3, "max_soft_tokens": 20, "do_normalize": False},
    "minimax_m3_vl": {"patch_size": 8, "merge_size": 2, "min_pixels": 1024, "max_pixels": 4096, "resample": 3},
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm_ocr"), _RANGE),
    "kimi_vl": {"patch_size": 8, "in_token_limit": 64, "pad_input": True},
    "kimi_k25": {"media_proc_cfg": {"patch_size": 8, "in_patch_limit": 64, "merge_kernel_size": 2}},
    "lfm2_vl": {"encoder_patch_size": 8, "tile_size": 64, "min_image_tokens": 4, "max_image_tokens": 16},
    "phi4-siglip": {"patch_size": 8, "min_num_patches": 30, "max_num_patches": 80},
    "minicpmo": {"patch_size": 8, "scale_resolution": 64, "max_slice_nums": 4},
    "minicpmv4_6": {"patch_size": 8, "scale_resolution": 64, "max_slice_nums": 4},
    "molmo": {
        "base_image_input_size": [64, 64],
        "image_patch_size": 8,
        "max_crops": 4,
        "overlap_margins": [2, 2],
        "image_token_length_w": 4,
        "image_token_length_h": 4,
    },
    "molmo2": {"size": {"height": 56, "width": 56}, "patch_size": 8, "max_crops": 4, "overlap_margins": [1, 1]},
    "llama4": {"size": {"height": 64, "width": 64}, "max_patches": 4, "resample": 2},
    "deepseekocr": {"candidate_resolutions": [[128, 128]], "image_size": 64, "patch_size": 16, "downsample_ratio": 4},
    "paddleocr_vl": {
        "patch_size": 8,
        "merge_size": 2,
        "min_pixels": 1024,
        "max_pixels": 4096,
        "resample": 3,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    },
}


@contextmanager
def small_upstream() -> Iterator[None]:
    """Sizes that mlx-vlm states in its code, and in no config, are small while this is open."""
    from mlx_vlm.models.deepseekocr import deepseekocr
    from mlx_vlm.models.gemma3n import vision as mobilenet

    sam = deepseekocr.SAMEncoder
    sizes = {"img_size": 128, "embed_dim": 32, "depth": 3, "num_heads": 2, "window_size": 3, "final_out_chans": 32}

    narrow, kinds = 8, mobilenet
    blocks = [
        [kinds._er(3, narrow, 2), kinds._er(3, narrow, 1)],
        [kinds._uir(3, 5, 2 * narrow, 2, 2.0), kinds._uir(3, 0, 2 * narrow)],
        [kinds._uir(5, 5, 3 * narrow, 2, 2.0), kinds._mmqa(2, 8, 2), kinds._uir(0, 0, 3 * narrow, 1, 2.0)],
        [kinds._uir(5, 5, 4 * narrow, 2, 2.0), kinds._mmqa(2, 8, 1), kinds._uir(0, 0, 4 * narrow, 1, 2.0)],
    ]
    fusion = mobilenet.MobileNetV5MultiScaleFusionAdapter

    def small_fusion(in_chs: Any, out_chs: Any, output_resolution: Any) -> Any:
        return fusion(in_chs=[7 * narrow], out_chs=32, output_resolution=(4, 4))

    with (
        mock.patch.object(mobilenet, "gemma3n_mobilenet_def", lambda: blocks),
        mock.patch.object(deepseekocr, "SAMEncoder", lambda **stated: sam(**sizes, global_attn_indexes=(1,))),
        mock.patch.object(mobilenet, "MobileNetV5MultiScaleFusionAdapter", small_fusion),
    ):
        yield


def packed(family: str, folder: Path) -> Path:
    """The same in eight bits, the tower too, as mlx-vlm packs models."""
    saved(family, folder)
    config = (CONFIGS | OWN_SHAPE)[family]
    model = unloaded_mlx_vlm_model(mlx_vlm_package(config), config)
    weights = mx.load(str(folder / "model.safetensors"))
    model.load_weights(list(weights.items()), strict=False)
    nn.quantize(model, group_size=32, bits=8, class_predicate=_packable)
    stored = dict(tree_flatten(model.parameters()))
    if family == "gemma3":
        stored = {name: weight for name, weight in stored.items() if not name.startswith("language_model.lm_head")}
    mx.save_safetensors(str(folder / "model.safetensors"), stored, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**config, "quantization": {"group_size": 32, "bits": 8}}))
    return folder


def _packable(path: str, module: Any) -> bool:
    return hasattr(module, "to_quantized") and module.weight.shape[-1] % 32 == 0


def saved(family: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint of a family in `folder`."""
    config = (CONFIGS | UNLIKE | OWN_SHAPE)[family]
    model = unloaded_mlx_vlm_model(mlx_vlm_package(config), config)
    random = np.random.default_rng(seed)
    weights = {}
    for name, weight in tree_flatten(model.parameters()):
        if not weight.shape:  # bounds of what a layer takes and gives
            weights[name] = mx.array(1.5 if name.endswith("max") else -1.5)
            continue
        values = random.normal(0, 0.2 if weight.ndim > 1 else 0.05, weight.shape).astype(np.float32)
        weights[name] = mx.array(values + (1 if "norm" in name and name.endswith("weight") else 0))
    if family == "gemma3":
        del weights["language_model.lm_head.weight"]  # its embeddings are its head
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(FILES[family]))
    return folder
