"""What a checkpoint's files say of how it sees. Newer ones say everything in processor_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ingot.errors import ModelError

Stated = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProcessorFiles:
    config: Stated = field(default_factory=dict)
    pictures: Stated = field(default_factory=dict)
    clips: Stated = field(default_factory=dict)
    processor: Stated = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> ProcessorFiles:
        processor = _json(folder / "processor_config.json")
        return cls(
            _json(folder / "config.json"),
            processor.get("image_processor") or _json(folder / "preprocessor_config.json"),
            processor.get("video_processor") or _json(folder / "video_preprocessor_config.json"),
            processor,
        )

    @property
    def family(self) -> str:
        return str(self.config.get("model_type", ""))

    @property
    def vision(self) -> Stated:
        found = self.config.get("vision_config")
        return found if isinstance(found, Mapping) else {}


def edge(stated: Stated, name: str, fallback: int) -> int:
    """A side that is said as a number, or as an object that names its sides."""
    found = stated.get(name, fallback)
    if isinstance(found, Mapping):
        found = found.get("longest_edge") or found.get("height") or found.get("shortest_edge") or fallback
    return int(found)


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path.name} is no JSON.") from error
    if not isinstance(found, dict):
        raise ModelError(f"{path.name} is no JSON object.")
    return found
