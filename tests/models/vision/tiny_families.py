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

VOCAB, IMAGE = 128, 120
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_channels": 3,
    "patch_size": 8,
    "image_size": 64,
    "layer_norm_eps": 1e-6,
}
_MARKS = {
    "image_token_id": IMAGE,
    "image_token_index": IMAGE,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "pad_token_id": 0,
}
_ROTARY = {"head_dim": 16, "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "image_size": 128}

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3",
        **_MARKS,
        "mm_tokens_per_image": 16,
        "text_config": {
            "model_type": "gemma3_text",
            **{name: value for name, value in _TEXT.items() if name != "rope_theta"},
            "num_hidden_layers": 6,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
            "sliding_window_pattern": 3,
            "mm_tokens_per_image": 16,
        },
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
    },
    "llava": {
        "model_type": "llava",
        **_MARKS,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "clip_vision_model", **_VISION},
    },
    "idefics3": {
        "model_type": "idefics3",
        **_MARKS,
        "scale_factor": 2,
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "idefics3", **_VISION},
    },
    "smolvlm": {
        "model_type": "smolvlm",
        **_MARKS,
        "scale_factor": 4,
        "text_config": {"model_type": "llama", **_TEXT},
        "vision_config": {"model_type": "smolvlm_vision", **_VISION},
    },
    "pixtral": {
        "model_type": "pixtral",
        **_MARKS,
        "vision_feature_layer": -1,
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8},
        "vision_config": {"model_type": "pixtral", **_VISION, **_ROTARY},
    },
    "mistral3": {
        "model_type": "mistral3",
        **_MARKS,
        "vision_feature_layer": -1,
        "spatial_merge_size": 2,
        "text_config": {"model_type": "mistral", **_TEXT, "head_dim": 8},
        "vision_config": {"model_type": "pixtral", **_VISION, **_ROTARY},
    },
    "internvl": {
        "model_type": "internvl",
        **_MARKS,
        "downsample_ratio": 0.5,
        "text_config": {"model_type": "qwen3", **_TEXT, "head_dim": 8},
        "vision_config": {"model_type": "internvl_vision", **_VISION, "layer_scale_init_value": 0.5},
    },
    "internvl_chat": {
        "model_type": "internvl_chat",
        **_MARKS,
        "downsample_ratio": 0.5,
        "llm_config": {"model_type": "qwen2", **_TEXT},
        "vision_config": {"model_type": "intern_vit_6b", **_VISION, "qk_normalization": True},
    },
}
_GLM_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 8,
    "image_size": 64,
    "out_hidden_size": 32,
    "rms_norm_eps": 1e-5,
}
_SECTIONS = {"rope_type": "default", "type": "default", "mrope_section": [2, 1, 1]}
_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
_LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "rope_scaling": None,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
_MOONVIT = {
    "model_type": "moonvit",
    "depth": 2,
    "embed_dim": 32,
    "hidden_size": 32,
    "num_heads": 2,
    "patch_size": 8,
    "intermediate_size": 48,
    "init_pos_emb_height": 6,
    "init_pos_emb_width": 6,
    "merge_kernel_size": [2, 2],
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    **_TEXT,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 16,
    "num_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 0,
    "sliding_window": 48,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
_GEMMA4_VISION = {
    "model_type": "gemma4_vision",
    **_VISION,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pooling_kernel_size": 3,
    "default_output_length": 20,
    "position_embedding_size": 64,
    "standardize": True,
}
OWN_SHAPE: dict[str, dict[str, Any]] = {
    "gemma3n": {
        "model_type": "gemma3n",
        **_MARKS,
        "eoi_token_id": 119,
        "vision_soft_tokens_per_image": 16,
        "text_config": {
            **_GEMMA4,
            "model_type": "gemma3n_text",
            "num_key_value_heads": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 119,
            "rope_local_base_freq": 10000.0,
            "intermediate_size": [48] * 4,
            "activation_sparsity_pattern": [0.9, 0, 0, 0],
            "altup_num_inputs": 2,
            "altup_coef_clip": 120.0,
            "altup_correct_scale": True,
            "altup_active_idx": 0,
            "laurel_rank": 4,
            "query_pre_attn_scalar": 16,
            "final_logit_softcapping": 30.0,
        },
        "vision_config": {"model_type": "gemma3n_vision", "hidden_size": 32, "vocab_size": 4, "vocab_offset": 119},
        "audio_config": {
            "hidden_size": 32,
            "conf_num_attention_heads": 2,
            "conf_num_hidden_layers": 1,
            "vocab_size": 4,
            "vocab_offset": 123,
            "sscp_conv_channel_size": [4, 4],
        },
    },
    "gemma4": {
        "model_type": "gemma4",
        **_MARKS,
        "audio_config": None,
        "text_config": {**_GEMMA4, "use_bidirectional_attention": "vision"},
        "vision_config": {**_GEMMA4_VISION, "use_clipped_linears": True},
    },
    "deepseekocr": {
        "model_type": "deepseekocr",
        **_MARKS,
        "language_config": {
            "model_type": "deepseek_v2",
            **_TEXT,
            **_EXPERTS,
            "num_key_value_heads": 4,
            "kv_lora_rank": None,
            "q_lora_rank": None,
            "qk_nope_head_dim": 0,
            "qk_rope_head_dim": 0,
            "topk_method": "greedy",
        },
        "vision_config": {
            "model_type": "vision",
            "layers": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 2,
            "patch_size": 28,
        },
        "projector_config": {"projector_type": "linear", "input_dim": 64, "n_embed": 32},
    },
    "gemma4-per-layer": {
        "model_type": "gemma4",
        **_MARKS,
        "audio_config": None,
        "text_config": {**_GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
        "vision_config": {**_GEMMA4_VISION, "standardize": False},
    },
    "gemma4_unified": {
        "model_type": "gemma4_unified",
        **_MARKS,
        "text_config": {
            **_GEMMA4,
            "model_type": "gemma4_unified_text",
            "use_bidirectional_attention": "vision",
            "attention_k_eq_v": False,
        },
        "vision_config": {
            "model_type": "gemma4_unified_vision",
            "patch_size": 8,
            "pooling_kernel_size": 3,
            "model_patch_size": 24,
            "mm_embed_dim": 32,
            "mm_posemb_size": 64,
            "output_proj_dims": 32,
        },
        "audio_config": None,
    },
    "minimax_m3_vl": {
        "model_type": "minimax_m3_vl",
        **_MARKS,
        "projector_hidden_size": 32,
        "text_config": {
            "model_type": "minimax_m3",
            **_TEXT,
            "head_dim": 8,
            "rotary_dim": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_layer_freq": [0, 0, 0],
            "dense_intermediate_size": 48,
            "shared_intermediate_size": 16,
            "sparse_attention_config": {"use_sparse_attention": False, "sparse_attention_freq": [0, 0, 0]},
        },
        "vision_config": {
            "model_type": "clip_vision_model",
            **_VISION,
            "hidden_size": 40,
            "img_token_compression_config": {"spatial_merge_size": 2, "temporal_patch_size": 2},
        },
    },
    "glm4v": {
        "model_type": "glm4v",
        **_MARKS,
        "text_config": {
            "model_type": "glm4v_text",
            **_TEXT,
            "eos_token_id": [1],
            "num_attention_heads": 2,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "rope_scaling": _SECTIONS,
        },
        "vision_config": {"model_type": "glm4v", **_GLM_VISION},
    },
    "glm4v_moe": {
        "model_type": "glm4v_moe",
        **_MARKS,
        "text_config": {
            "model_type": "glm4v_moe_text",
            **_TEXT,
            **_EXPERTS,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": False,
            "rope_scaling": _SECTIONS,
        },
        "vision_config": {"model_type": "glm4v_moe", **_GLM_VISION},
    },
    "glm_ocr": {
        "model_type": "glm_ocr",
        **_MARKS,
        "text_config": {
            "model_type": "glm_ocr_text",
            **{name: value for name, value in _TEXT.items() if name != "rope_theta"},
            "head_dim": 8,
            "attention_bias": False,
            "rope_parameters": {**_SECTIONS, "partial_rotary_factor": 1.0, "rope_theta": 10000.0},
        },
        "vision_config": {"model_type": "glm_ocr_vision", **_GLM_VISION},
    },
    "kimi_vl": {
        "model_type": "kimi_vl",
        **_MARKS,
        "text_config": {"model_type": "deepseek_v3", **_TEXT, **_EXPERTS, **_LATENT},
        "vision_config": _MOONVIT,
    },
    "kimi_k25": {
        "model_type": "kimi_k25",
        **_MARKS,
        "text_config": {"model_type": "deepseek_v3", **_TEXT, **_EXPERTS, **_LATENT},
        "vision_config": _MOONVIT,
    },
    "lfm2_vl": {
        "model_type": "lfm2_vl",
        **_MARKS,
        "downsample_factor": 2,
        "encoder_patch_size": 8,
        "projector_hidden_size": 32,
        "text_config": {
            "model_type": "lfm2",
            **{name: value for name, value in _TEXT.items() if name not in ("rms_norm_eps", "tie_word_embeddings")},
            "norm_eps": 1e-6,
            "conv_bias": False,
            "conv_L_cache": 3,
            "block_dim": 32,
            "block_ff_dim": 48,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.0,
            "block_auto_adjust_ff_dim": False,
            "layer_types": ["conv", "full_attention", "conv"],
        },
        "vision_config": {"model_type": "lfm2_vl", **_VISION, "num_patches": 36},
    },
    "minicpmv4_6": {
        "model_type": "minicpmv4_6",
        **_MARKS,
        "insert_layer_id": 0,
        "text_config": {
            "model_type": "qwen3_5_text",
            **_TEXT,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "full_attention_interval": 2,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
        "vision_config": {"model_type": "minicpmv4_6_vision", **_VISION, "num_attention_heads": 2},
    },
    "phi4-siglip": {
        "model_type": "phi4-siglip",
        **_MARKS,
        **_TEXT,
        "mm_hidden_size": 32,
        "text_config": {
            name: value
            for name, value in _TEXT.items()
            if name not in ("max_position_embeddings", "tie_word_embeddings")
        },
        "vision_config": {"model_type": "siglip2_vision_model", **_VISION, "num_patches": 36},
    },
    "minicpmo": {
        "model_type": "minicpmo",
        **_MARKS,
        **_TEXT,
        "version": "4.5",
        "hidden_size": 256,
        "head_dim": 16,
        "query_num": 9,
        "init_audio": False,
        "init_tts": False,
        "vision_config": {"model_type": "siglip_vision_model", **_VISION},
    },
    "molmo": {
        "model_type": "molmo",
        "text_config": {
            "model_type": "molmo",
            "d_model": 32,
            "n_heads": 4,
            "n_kv_heads": 2,
            "n_layers": 3,
            "mlp_hidden_size": 96,
            "vocab_size": 112,
            "embedding_size": 112,
            "additional_vocab_size": 16,
            "layer_norm_eps": 1e-6,
            "rope_theta": 10000.0,
        },
        "vision_config": {
            "model_type": "molmo",
            "image_default_input_size": [64, 64],
            "image_patch_size": 8,
            "image_pos_patch_size": 8,
            "image_emb_dim": 32,
            "image_num_heads": 2,
            "image_num_key_value_heads": 2,
            "image_head_dim": 16,
            "image_num_layers": 4,
            "image_mlp_dim": 48,
            "image_num_pos": 65,
            "d_model": 32,
            "hidden_size": 48,
            "vit_layers": [-2, -3],
        },
    },
    "llama4": {
        "model_type": "llama4",
        **_MARKS,
        "text_config": {
            "model_type": "llama4_text",
            **_TEXT,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 4,
            "attention_chunk_size": 4096,
            "interleave_moe_layer_step": 2,
            "attention_bias": False,
            "floor_scale": 8192,
            "attn_scale": 0.1,
            "rope_scaling": None,
            "use_qk_norm": True,
        },
        "vision_config": {
            "model_type": "llama4_vision_model",
            **{name: value for name, value in _VISION.items() if name != "layer_norm_eps"},
            "intermediate_size": 128,
            "initializer_range": 0.02,
            "norm_eps": 1e-5,
            "pixel_shuffle_ratio": 0.5,
            "projector_dropout": 0.0,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
            "rope_theta": 10000.0,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 24,
        },
    },
    "paddleocr_vl": {
        "model_type": "paddleocr_vl",
        **_MARKS,
        **_TEXT,
        "hidden_size": 1024,
        "num_hidden_layers": 2,
        "head_dim": 8,
        "use_bias": False,
        "rope_scaling": _SECTIONS,
        "vision_config": {"model_type": "paddleocr_vl", **_VISION},
    },
}
"""Whose towers see an image in its own shape, or a canvas of tiles."""
UNLIKE: dict[str, dict[str, Any]] = {
    "llava_next": {
        **CONFIGS["llava"],
        "model_type": "llava_next",
        "image_grid_pinpoints": [[64, 128], [128, 64], [128, 128], [64, 192]],
    }
}
"""Whose features mlx-vlm arranges otherwise than their makers."""
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
