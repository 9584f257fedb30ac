"""What a model is for, told by its files. Imports nothing heavy: a lazy server asks before it is ready."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from ingot.config import Settings
from ingot.errors import ModelError
from ingot.models.files import hub, packaged
from ingot.models.files.model_store import begun, named

CHAT: Final = "chat"
TRUNKS: Final = ("Model", "ForMaskedLM")
"""How the names of architectures end that have no head to generate or to judge with."""


def kind_of(name: str, settings: Settings) -> str:
    """Of a model as the user names it (see `locate`); that of one which is still to be fetched is taken to be chat."""
    known = packaged.find(name)
    if known is not None:
        return known.kind
    folder = _at_hand(name, settings)
    return CHAT if folder is None else kind_in(folder)


def kind_in(folder: Path) -> str:
    """Of a model folder. One whose files do not tell is taken to be chat: whoever loads it says what is wrong."""
    config = _config(folder)
    if config.get("model_type") == "whisper":
        return "audio"
    if "istftnet" in config:  # of Kokoro
        return "speech"
    stated = config.get("architectures")
    architectures = [str(each) for each in stated] if isinstance(stated, list) else []
    if any(each.endswith("ForSequenceClassification") for each in architectures):
        return "rerank"
    if (folder / "modules.json").is_file():  # of sentence-transformers
        return "embedding"
    return "embedding" if architectures and all(each.endswith(TRUNKS) for each in architectures) else CHAT


def sees(name: str, settings: Settings) -> bool:
    """Whether a model that is at hand has a vision tower which would be loaded."""
    folder = None if settings.text_only or packaged.find(name) is not None else _at_hand(name, settings)
    config = {} if folder is None else _config(folder)
    if not any(isinstance(config.get(part), dict) for part in ("vision_config", "img_processor")):
        return False
    from ingot.media.families.registry import FAMILIES

    return config.get("model_type") in FAMILIES


def _at_hand(name: str, settings: Settings) -> Path | None:
    path = Path(name).expanduser()
    if path.exists():
        return path
    if hub.is_hub_id(name):
        return hub.cached(name)
    try:
        kept = named(name, settings.models_dir) or begun(name, settings.models_dir)
    except ModelError:  # several are called so, which whoever loads it says
        return None
    return None if kept is None else kept.path


def _config(folder: Path) -> dict[str, Any]:
    try:
        read = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return read if isinstance(read, dict) else {}
