"""`generation_config.json`: how a model's makers recommend to generate with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ingot.text.json_file import read_object

FILE: Final = "generation_config.json"
NONE: Final = ("none", "vllm")
"""Settings that follow no such file. To vLLM, its own name means its own defaults, which change nothing either."""


def generation_config(setting: str, model: Path, elsewhere: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the file says that the setting names: the model's own for `auto`, none, or that of another folder. What the
    model's makers say `elsewhere` completes its own."""
    if setting in NONE:
        return {}
    if setting == "auto":
        return {**(elsewhere or {}), **read_object(model / FILE)}
    return read_object(Path(setting).expanduser() / FILE)


def setting_problem(setting: str) -> str | None:
    if setting == "auto" or setting in NONE or (Path(setting).expanduser() / FILE).is_file():
        return None
    return f"{setting!r} is neither auto nor none, nor a folder that holds a {FILE}"
