"""The head of a checkpoint that is wanted for its head alone: of the hub's, only the files that hold it are fetched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ingot.config import Settings
from ingot.errors import ModelError
from ingot.models.draft_heads.checkpoint import INDEX, HeadSource, find_head, head_in, indexed_head_files
from ingot.models.files import hub
from ingot.models.files.progress import Progress

_SMALL = ("config.json", INDEX, "mtp.safetensors", "mtp/*.safetensors", "model-mtp.safetensors")


def head_from(name: str, config: Mapping[str, Any], settings: Settings, progress: Progress) -> HeadSource:
    """The head in a folder, in a file or on the hub, for a model with this config. Raises ModelError if it has none."""
    place = Path(name).expanduser()
    if not place.exists():
        if not hub.is_hub_id(name):
            raise ModelError(f"there is no file or folder {name!r} to take a head from")
        place = _fetched(name, config, settings, progress)
    found = find_head(place, config) if place.is_dir() else None
    found = found or head_in(place, config)
    if found is None:
        raise ModelError(f"{name} holds no head that is known for models of type {config.get('model_type')}")
    return found


def _fetched(name: str, config: Mapping[str, Any], settings: Settings, progress: Progress) -> Path:
    folder = hub.fetch(name, settings, progress, _SMALL)
    files = indexed_head_files(folder, config)
    if files is None:
        return hub.fetch(name, settings, progress)
    return hub.fetch(name, settings, progress, [*_SMALL, *files])
