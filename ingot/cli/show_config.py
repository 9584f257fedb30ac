"""`--print-config`: every setting with its value, its origin and its help text.

The output is itself a valid settings file. Settings without a value, and secrets, are comments.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.config import SETTINGS, Config, Setting, Settings
from ingot.models.files import packaged
from ingot.models.files.locate import local_model_folder
from ingot.protocol.chat.sampling_defaults import sampling_body, sampling_defaults
from ingot.text.input_files import read_generation_config


def format_config(config: Config) -> str:
    lines = [f"# settings file: {config.file or 'none'}"]
    section = ""
    for option in SETTINGS.values():
        if option.section != section:
            section = option.section
            lines += ["", f"# -- {section} --"]
        value = getattr(config.settings, option.name)
        lines += ["", f"# {option.help}", f"# from: {config.origins[option.name]}", _setting_line(option, value)]
        if option.name == "override_generation_config":
            lines += _sampling_lines(config.settings)
    return "\n".join(lines)


def _sampling_lines(settings: Settings) -> list[str]:
    """The resulting sampling defaults, if the model is on this machine."""
    folder = local_model_folder(settings.model, settings)
    folder = folder if folder is not None and folder.is_dir() else None
    if folder is None and settings.generation_config == "auto":
        return []
    from_package = packaged.packaged_sampling(folder) if folder is not None else {}
    recommended = read_generation_config(settings.generation_config, folder or Path(), from_package)
    defaults = sampling_body(sampling_defaults(recommended, settings.override_generation_config))
    return [f"# default sampling parameters: {_as_toml(defaults) if defaults else 'none, plain sampling'}"]


def _setting_line(option: Setting, value: Any) -> str:
    if value is None:
        return f"# {option.name} is not set"
    if option.secret:
        return f"# {option.name} is set and not shown"
    return f"{option.name} = {_as_toml(value)}"


def _as_toml(value: Any) -> str:
    # JSON's strings, numbers, booleans and lists of strings are valid TOML.
    if isinstance(value, Path):
        return json.dumps(str(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_as_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)
