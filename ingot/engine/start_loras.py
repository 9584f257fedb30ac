"""Adapters that a server begins with, and what is set aside for those that come later."""

from __future__ import annotations

from ingot.config import Settings
from ingot.engine.loras import NamedLoras
from ingot.errors import AdapterError, ConfigError, ModelError
from ingot.models.adapter import Adapter


def begin_loras(settings: Settings, model: Adapter, name: str) -> tuple[NamedLoras | None, int]:
    """The adapters beside a model that is called `name`, if there may be any, and the bytes that they take at most.
    Runs on the engine thread. Raises ConfigError or ModelError that names the adapter."""
    if not settings.loras and not settings.allow_runtime_lora_updating:
        return None, 0
    later = settings.allow_runtime_lora_updating
    room = model.loras.most_bytes(settings.max_loras, settings.max_lora_rank) if later else None
    made = NamedLoras(model, most=settings.max_loras, most_rank=settings.max_lora_rank, room=room)
    names = (name, *settings.served_model_name)
    for lora in settings.loras:
        if lora.name in names or (lora.base is not None and lora.base not in names):
            wrong = f"its name is a model's: {lora.name}" if lora.name in names else f"there is no model {lora.base!r}"
            raise ConfigError(f"adapter {lora.name}: {wrong}", param="lora_modules")
        try:
            made.load(lora.name, lora.path)
        except AdapterError as error:
            raise ModelError(f"The adapter {lora.name} cannot be served: {error.message}") from error
    return made, made.nbytes if room is None else room
