"""`--print-config`: every setting with its value, where that came from, and what it means.

The output is itself a valid settings file. What has no value, or must not be shown, stands in a comment.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.config import SETTINGS, Config, Setting


def show(config: Config) -> str:
    lines = [f"# settings file: {config.file or 'none'}"]
    section = ""
    for known in SETTINGS.values():
        if known.section != section:
            section = known.section
            lines += ["", f"# -- {section} --"]
        value = getattr(config.settings, known.name)
        lines += ["", f"# {known.help}", f"# from: {config.origins[known.name]}", _line(known, value)]
    return "\n".join(lines)


def _line(known: Setting, value: Any) -> str:
    if value is None:
        return f"# {known.name} is not set"
    if known.secret:
        return f"# {known.name} is set and not shown"
    return f"{known.name} = {_toml(value)}"


def _toml(value: Any) -> str:
    # JSON's strings, numbers and booleans are TOML's too, as is a list of strings on one line.
    if isinstance(value, Path):
        return json.dumps(str(value))
    return json.dumps(list(value) if isinstance(value, tuple) else value)
