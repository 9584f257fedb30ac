"""What newer transformers write into a config.json, under the names that mlx-lm's families read.

A family that does not find a key takes its own default without a word, and answers with another model's positions. So
what was moved or renamed is given under both names.
"""

from __future__ import annotations

from typing import Any

from ingot.models.families.registry import whole_type

RENAMED = {"num_local_experts": "num_experts", "_sliding_window_pattern": "sliding_window_pattern"}


def older_names(config: dict[str, Any]) -> dict[str, Any]:
    """The keys to add to `config`; nothing that it states is changed but the type of a part saved alone."""
    added = {old: config[new] for new, old in RENAMED.items() if new in config}
    added |= _rope(config.get("rope_parameters") or {})
    missing = {key: value for key, value in added.items() if config.get(key) is None}
    whole = whole_type(str(config.get("model_type")))
    if whole is not None and "text_config" not in config:
        missing["model_type"] = whole
    text = config.get("text_config")
    if isinstance(text, dict) and (inside := older_names(text)):
        missing["text_config"] = {**text, **inside}
    return missing


def _rope(parameters: dict[str, Any]) -> dict[str, Any]:
    """RoPE's parameters as they were: by themselves, with what scales them in a dictionary of its own."""
    if "full_attention" in parameters:
        local = parameters.get("sliding_attention", {})
        named = {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
        return named | _rope(parameters["full_attention"])
    kind = parameters.get("rope_type", "default")
    named = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor") if key in parameters}
    return named if kind == "default" else named | {"rope_scaling": {**parameters, "type": kind}}
