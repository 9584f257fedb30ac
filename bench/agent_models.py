"""Models for agents' sessions that are longer than the packaged model's context: small, random, of every layer kind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from bench import model_folders, random_models
from ingot.models.files.progress import Progress

SPELLING = Path(__file__).parent.parent / "foundry" / "models" / "hybrid"
"""Whose tokenizer and chat template they have."""
VOCAB = 4096
CONTEXT = 32_768

_SHARED = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}
_RECURRENT = {
    "full_attention_interval": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {"type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "append": {"model_type": "qwen3", **_SHARED},
    "hybrid": {"model_type": "qwen3_5", "text_config": {"model_type": "qwen3_5_text", **_SHARED, **_RECURRENT}},
    "window": {
        "model_type": "gemma3_text",
        **_SHARED,
        "rope_local_base_freq": 10000.0,
        "query_pre_attn_scalar": 32,
        "sliding_window": 512,
        "sliding_window_pattern": 4,
    },
}


def write(name: str, folder: Path, progress: Progress) -> None:
    """`default`, the packaged model, or one of `CONFIGS`."""
    if name not in CONFIGS:
        model_folders.write(name, folder, progress)
        return
    import mlx.core as mx
    from mlx.utils import tree_flatten

    folder.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(SPELLING / file, folder / file)
    model = random_models.build(CONFIGS[name])
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
