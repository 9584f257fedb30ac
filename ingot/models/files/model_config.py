"""config.json under the names that mlx-lm reads, and the name of the weights' format.

A family of mlx-lm's that does not find a key silently uses its own default, and computes with another model's
positions. So keys that newer transformers moved or renamed are added under their older names. The name of the weights'
format is the one that people know: Q4_K_M, 4-bit, BF16.
"""

from __future__ import annotations

from typing import Any, Final

from ingot.models.families.registry import multimodal_type_of

RENAMED_KEYS = {"num_local_experts": "num_experts", "_sliding_window_pattern": "sliding_window_pattern"}


def older_config_names(config: dict[str, Any]) -> dict[str, Any]:
    """The keys to add to `config`; nothing that it states is changed but the type of a text part saved alone."""
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
    """RoPE's parameters as they were: at the top level, with the scaling in a dictionary."""
    if "full_attention" in parameters:
        local = parameters.get("sliding_attention", {})
        named = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        return named | _older_rope_keys(parameters["full_attention"])
    kind = parameters.get("rope_type", "default")
    named = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    return named if kind == "default" else named | {"rope_scaling": {**parameters, "type": kind}}


FILE_TYPE_KEY: Final = "gguf_file_type"
"""The key of a GGUF file's type, such as Q4_K_M, in the config of the converted model."""
MOVED_KEY: Final = "gguf_moved"
"""The key of formats that MLX lacks, each with the bits of its replacement, and the percent by which values change."""
PLAIN_FORMATS: Final = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def weight_format(config: dict[str, Any], dtype: str) -> str:
    """The format of the weights in the model's files: Q4_K_M, 4-bit, BF16. `dtype` is for a config without one."""
    if isinstance(file_type := config.get(FILE_TYPE_KEY), str):
        return file_type
    form = config.get("quantization")
    if isinstance(form, dict) and "bits" in form:
        mode = form.get("mode", "affine")
        return f"{form['bits']}-bit" if mode == "affine" else str(mode)
    stated = str(config.get("dtype") or config.get("torch_dtype") or dtype).removeprefix("torch.")
    return PLAIN_FORMATS.get(stated, stated)


def moved_weight_notes(config: dict[str, Any]) -> list[str]:
    """Notes for users on weights in formats that MLX lacks."""
    formats = config.get(MOVED_KEY)
    if not isinstance(formats, dict):
        return []
    return [
        f"{kind} weights are held in {form['bits']} bits, which moves them by {form['percent']} % at most (root mean "
        "square)"
        for kind, form in formats.items()
        if isinstance(form, dict) and form.keys() >= {"bits", "percent"}
    ]
