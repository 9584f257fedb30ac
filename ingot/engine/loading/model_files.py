"""The files of a model, and of the models that help it (draft models, the scorer). Light to import."""

from __future__ import annotations

from typing import Final

from ingot.config import Settings
from ingot.engine.speculation.options import SpeculationOptions
from ingot.models.files.locate import CHAT_KIND, ModelFolder, locate_model
from ingot.models.files.progress import Progress, no_progress

READ_BY_ADAPTERS: Final = ("draft", "scorer")
"""Helper models that are loaded as the main one is: their weights may stay in a GGUF file."""


def find_model_files(
    settings: Settings, kind: str, progress: Progress = no_progress
) -> tuple[ModelFolder, dict[str, ModelFolder]]:
    """The files of a model, and of those that help it, by their role; fetched or converted where need be. Raises
    ModelError."""
    folder = locate_model(settings.model, settings, progress, in_place=kind == CHAT_KIND)
    if kind != CHAT_KIND:
        return folder, {}
    helpers: dict[str, str | None] = {
        **SpeculationOptions.parse(settings.speculate).models,
        "scorer": settings.specprefill_draft_model,
    }
    return folder, {
        role: locate_model(name, settings, progress, in_place=role in READ_BY_ADAPTERS)
        for role, name in helpers.items()
        if name is not None
    }
