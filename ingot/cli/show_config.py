"""`--print-config`: every setting with its value, where that came from, and what it means.

The output is itself a valid settings file. What has no value, or must not be shown, stands in a comment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.config import SETTINGS, Config, Setting, Settings
from ingot.errors import ModelError
from ingot.models.files import packaged
from ingot.models.files.model_store import find_stored_model
from ingot.protocol.chat.sampling_defaults import sampling_body, sampling_defaults
from ingot.text.input_files import read_generation_config


def format_config(config: Config) -> str:
    lines = [f"# settings file: {config.file or 'none'}"]
    section = ""
    for known in SETTINGS.values():
        if known.section != section:
            section = known.section
            lines += ["", f"# -- {section} --"]
        value = getattr(config.settings, known.name)
        lines += ["", f"# {known.help}", f"# from: {config.origins[known.name]}", _setting_line(known, value)]
        if known.name == "override_generation_config":
            lines += _sampling_lines(config.settings)
    return "\n".join(lines)


def _sampling_lines(settings: Settings) -> list[str]:
    """What comes of the two settings for the model, where that is already here to be looked at."""
    folder = _model_folder(settings)
    if folder is None and settings.generation_config == "auto":
        return []
    elsewhere = packaged.packaged_sampling(folder) if folder is not None else {}
    recommended = read_generation_config(settings.generation_config, folder or Path(), elsewhere)
    found = sampling_body(sampling_defaults(recommended, settings.override_generation_config))
    return [
        f"# where a request does not say: {_as_toml(found) if found else 'every token may come, as likely as it is'}"
    ]


def _model_folder(settings: Settings) -> Path | None:
    """Where the model lies, if it is here and there is only one of that name."""
    given = Path(settings.model).expanduser()
    if given.is_dir():
        return given
    try:
        kept = find_stored_model(settings.model, settings.models_dir)
    except ModelError:
        return None
    return kept.path if kept else None


def _setting_line(known: Setting, value: Any) -> str:
    if value is None:
        return f"# {known.name} is not set"
    if known.secret:
        return f"# {known.name} is set and not shown"
    return f"{known.name} = {_as_toml(value)}"


def _as_toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's too, as is a list of strings on one line.
    if isinstance(value, Path):
        return json.dumps(str(value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {_as_toml(each)}" for name, each in value.items()) + "}"
    return json.dumps(list(value) if isinstance(value, tuple) else value)
