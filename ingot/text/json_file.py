"""The JSON files that lie beside a model's weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ingot.errors import ModelError


def read_object(path: Path) -> dict[str, Any]:
    """The object that a file holds; an empty one where there is no file. Raises ModelError."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} does not hold a JSON object.")
    return value
