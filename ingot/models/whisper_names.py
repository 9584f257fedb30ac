"""OpenAI's names for what Whisper has, which MLX's converters keep, as Hugging Face's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RENAMED = (
    (r"\.blocks\.", ".layers."),
    (r"\.cross_attn_ln\.", ".encoder_attn_layer_norm."),
    (r"\.attn_ln\.", ".self_attn_layer_norm."),
    (r"\.mlp_ln\.", ".final_layer_norm."),
    (r"\.cross_attn\.", ".encoder_attn."),
    (r"\.attn\.", ".self_attn."),
    (r"\.query\.", ".q_proj."),
    (r"\.key\.", ".k_proj."),
    (r"\.value\.", ".v_proj."),
    (r"\.out\.", ".out_proj."),
    (r"\.mlp(\.0|1)\.", ".fc1."),
    (r"\.mlp(\.2|2)\.", ".fc2."),
    (r"\.(ln_post|ln)\.", ".layer_norm."),
    (r"\.token_embedding\.", ".embed_tokens."),
    (r"\.positional_embedding$", ".embed_positions.weight"),
)


def hugging_face_name(name: str) -> str:
    for pattern, now in RENAMED:
        name = re.sub(pattern, now, name)
    return name


def hugging_face_config(dims: Mapping[str, Any]) -> dict[str, Any]:
    """Raises KeyError for dimensions that are none of Whisper's."""
    return {
        "model_type": "whisper",
        "architectures": ["WhisperForConditionalGeneration"],
        "activation_function": "gelu",
        "num_mel_bins": dims["n_mels"],
        "max_source_positions": dims["n_audio_ctx"],
        "d_model": dims["n_audio_state"],
        "encoder_attention_heads": dims["n_audio_head"],
        "encoder_layers": dims["n_audio_layer"],
        "encoder_ffn_dim": 4 * dims["n_audio_state"],
        "vocab_size": dims["n_vocab"],
        "max_target_positions": dims["n_text_ctx"],
        "decoder_attention_heads": dims["n_text_head"],
        "decoder_layers": dims["n_text_layer"],
        "decoder_ffn_dim": 4 * dims["n_text_state"],
    }
