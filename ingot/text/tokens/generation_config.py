"""`generation_config.json`: how a model's makers recommend to generate with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from ingot.text.json_file import read_object

FILE: Final = "generation_config.json"
NONE: Final = ("none", "vllm")
"""Settings that follow no such file. To vLLM, its own name means its own defaults, which change nothing either."""


def generation_config(setting: str, model: Path) -> dict[str, Any]:
    """What the file says that the setting names: the model's own for `auto`, none, or that of another folder."""
    if setting in NONE:
        return {}
    return read_object((model if setting == "auto" else Path(setting).expanduser()) / FILE)


def setting_problem(setting: str) -> str | None:
    if setting == "auto" or setting in NONE or (Path(setting).expanduser() / FILE).is_file():
        return None
    return f"{setting!r} is neither auto nor none, nor a folder that holds a {FILE}"
