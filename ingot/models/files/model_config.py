"""config.json under the names that mlx-lm reads, and what the weights are called.

A family of mlx-lm's that does not find a key takes its own default without a word, and answers with another model's
positions. So what newer transformers moved or renamed is given under both names. The name of the weights' format is the
one that people know: Q4_K_M, 4-bit, BF16.
"""

from __future__ import annotations

from typing import Any, Final

from ingot.models.families.registry import multimodal_type_of

RENAMED_KEYS = {"num_local_experts": "num_experts", "_sliding_window_pattern": "sliding_window_pattern"}


def older_config_names(config: dict[str, Any]) -> dict[str, Any]:
    """The keys to add to `config`; nothing that it states is changed but the type of a part saved alone."""
    added = {old: config[new] for new, old in RENAMED_KEYS.items() if new in config}
    added |= _older_rope_keys(config.get("rope_parameters") or {})
    missing = {key: value for key, value in added.items() if config.get(key) is None}
    whole = multimodal_type_of(str(config.get("model_type")))
    if whole is not None and "text_config" not in config:
        missing["model_type"] = whole
    text = config.get("text_config")
    if isinstance(text, dict) and (inside := older_config_names(text)):
        missing["text_config"] = {**text, **inside}
    return missing


def _older_rope_keys(parameters: dict[str, Any]) -> dict[str, Any]:
    """RoPE's parameters as they were: by themselves, with what scales them in a dictionary of its own."""
    if "full_attention" in parameters:
        local = parameters.get("sliding_attention", {})
        named = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        return named | _older_rope_keys(parameters["full_attention"])
    kind = parameters.get("rope_type", "default")
    named = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    return named if kind == "default" else named | {"rope_scaling": {**parameters, "type": kind}}


FILE_TYPE_KEY: Final = "gguf_file_type"
"""Where the config of a converted GGUF file says what its makers call its mixture of formats."""
MOVED_KEY: Final = "gguf_moved"
"""Where it says which formats MLX lacks, each with the bits that it is held in, and the percent that values move by."""
PLAIN_FORMATS: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def weight_format(config: dict[str, Any], dtype: str) -> str:
    """What the weights are in the model's files, by the names that people know: Q4_K_M, 4-bit, BF16.

    `dtype` is for a config that does not say.
    """
    if isinstance(told := config.get(FILE_TYPE_KEY), str):
        return told
    packed = config.get("quantization")
    if isinstance(packed, dict) and "bits" in packed:
        mode = packed.get("mode", "affine")
        return f"{packed['bits']}-bit" if mode == "affine" else str(mode)
    stated = str(config.get("dtype") or config.get("torch_dtype") or dtype).removeprefix("torch.")
    return PLAIN_FORMATS.get(stated, stated)


def moved_weight_notes(config: dict[str, Any]) -> list[str]:
    """What a user should know of weights that are not held as their file has them."""
    said = config.get(MOVED_KEY)
    if not isinstance(said, dict):
        return []
    return [
        f"{kind} weights are held in {told['bits']} bits, which moves them by {told['percent']} % at most (as root "
        "mean squares)"
        for kind, told in said.items()
        if isinstance(told, dict) and told.keys() >= {"bits", "percent"}
    ]
