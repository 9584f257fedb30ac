"""The models of a server: each with its names, when it is there, and the settings that hold for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from ingot.config.model_tables import ModelTable, read_model_tables, read_registry
from ingot.config.settings import SETTINGS, Settings
from ingot.errors import ConfigError, nearest_name

PER_MODEL_SETTINGS: Final = frozenset(
    {
        *("context", "dtype", "text_only", "chat_template", "template_history", "trust_special_tokens"),
        *("tool_format", "thinking_format", "generation_config", "override_generation_config"),
        *("default_chat_template_kwargs", "thinking", "thinking_budget", "max_tokens", "hold_calls", "loop_guard"),
        *("memory", "expert_memory"),
        *("prefix_cache", "cache_memory"),
        *("cache_codec", "kv_codec", "max_sequences", "max_queue", "prefill_chunk", "speculate", "speculate_tokens"),
        *("moe_top_k",),
        *("lora_modules", "adapter_path", "max_loras", "max_lora_rank"),
        *("warm_prompts", "kv_events", "kv_events_replay", "kv_events_topic"),
        *(
            "specprefill",
            "specprefill_scorer",
            "specprefill_draft_model",
            "specprefill_threshold",
            "specprefill_keep_pct",
            "specprefill_quality",
        ),
    }
)
"""Settings that may differ from model to model."""
LONE_MODEL_SETTINGS: Final = {
    "served_model_name": "",
    **dict.fromkeys(
        ("embedding_model", "rerank_model", "audio_model", "speech_model"), "give that model a table of its own"
    ),
    "warm_prompts": "warm prompts are of one model, so say them in that one's table",
    "kv_events": "an endpoint is for one model, so say one in that one's table",
}
"""Settings that say what a table says of a model, and what to do instead."""
ENDPOINT_SETTINGS: Final = ("kv_events", "kv_events_replay")
_SETTINGS_OF_EVERY_KIND: Final = frozenset({"memory", "max_sequences", "max_queue"})


@dataclass(frozen=True, slots=True)
class Kind:
    """All that tells one kind of model from another before one is loaded. `module:name` are functions that are
    imported when they are needed."""

    does: str  # what they do, in words
    missing: str  # what to say where none is served
    settings: frozenset[str]  # those of a model that mean something to one of these
    setting: str = ""  # which names one to serve alongside the main model
    needs: str = ""  # `module:name` in `ingot.models`: the memory that one takes, by its files
    start: str = ""  # `module:name` in `ingot.engine.loading`: loads one and starts its engine


KINDS: Final = {
    "chat": Kind(
        "answers conversations",
        "No chat model is served here.",
        PER_MODEL_SETTINGS,
    ),
    "embedding": Kind(
        "makes vectors of texts (/v1/embeddings)",
        "No embedding model is served here. Start ingot with --embedding-model MODEL, such as "
        "--embedding-model all-minilm-l6-v2, a folder or a hub id.",
        _SETTINGS_OF_EVERY_KIND | {"dtype"},
        "embedding_model",
        "memory_needs:pooling_model_needs",
        "pooling_and_speech:start_embedding_engine",
    ),
    "rerank": Kind(
        "ranks documents (/v1/rerank)",
        "No reranking model is served here. Start ingot with --rerank-model MODEL: a folder or a hub id of a "
        "cross-encoder or a Qwen3-Reranker.",
        _SETTINGS_OF_EVERY_KIND | {"dtype"},
        "rerank_model",
        "memory_needs:pooling_model_needs",
        "pooling_and_speech:start_rerank_engine",
    ),
    "audio": Kind(
        "transcribes speech (/v1/audio/transcriptions)",
        "No speech-to-text model is served here. Start ingot with --audio-model MODEL, such as --audio-model "
        "whisper-tiny.en, a folder or a hub id of a Whisper model.",
        _SETTINGS_OF_EVERY_KIND | {"dtype"},
        "audio_model",
        "memory_needs:speech_to_text_needs",
        "pooling_and_speech:start_speech_to_text_engine",
    ),
    "speech": Kind(
        "speaks texts (/v1/audio/speech)",
        "No text-to-speech model is served here. Start ingot with --speech-model MODEL, a folder or a hub id of a "
        "Kokoro model, such as --speech-model mlx-community/Kokoro-82M-bf16.",
        _SETTINGS_OF_EVERY_KIND,
        "speech_model",
        "memory_needs:text_to_speech_needs",
        "pooling_and_speech:start_text_to_speech_engine",
    ),
}
"""By name. A kind is its record here, how its files tell it (`models.files.locate`), and its operations."""
KindOf = Callable[[str, Settings], str]
"""The kind of a model, by what the user calls it."""


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model that may be served. `settings` are the server's, with what is the model's own."""

    name: str
    settings: Settings
    kind: str = "chat"
    aliases: tuple[str, ...] = ()
    preload: bool = False  # loaded at the start
    pin: bool = False  # never unloaded to make room, nor for being idle
    idle_s: float | None = None  # after how long without a request it is unloaded; None: never
    resident: bool = False  # loaded before the server is ready and never unloaded
    alongside: bool = False  # named by a flag such as --embedding-model; memory for it is set aside

    @property
    def path(self) -> str:
        return self.settings.model

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


def assume_chat_model(model: str, settings: Settings) -> str:
    """The kind of a model of which nothing else is known."""
    return "chat"


def model_entries(settings: Settings, kind_of: KindOf = assume_chat_model) -> tuple[ModelEntry, ...]:
    """The models that the tables name, in their order; none where there are no tables. `kind_of` is asked where a table
    does not say. Raises ConfigError."""
    tables = read_model_tables(settings.models or {})
    if settings.models_config is not None:
        if tables:
            raise ConfigError("models_config and [models] name models, both: choose one", param="models_config")
        tables, memory = read_registry(settings.models_config)
        settings = settings if memory is None else replace(settings, memory=memory)
    if not tables:
        return ()
    for name, instead in LONE_MODEL_SETTINGS.items():
        if getattr(settings, name) != SETTINGS[name].default:
            hint = f"; {instead}" if instead else ""
            raise ConfigError(f"{name} is about a single model: there are tables for several{hint}", param=name)
    entries = tuple(_model_entry(name, table, settings, kind_of) for name, table in tables.items())
    _refuse_shared_names(entries)
    _refuse_shared_endpoints(entries)
    return entries


def single_model_entries(settings: Settings, kind: str = "chat") -> tuple[ModelEntry, ...]:
    """The models of a server without tables: the main one, of that kind, and those that flags name alongside it. Their
    names are those that they are known by before they are located."""
    resident, preload, idle = kind == "chat" and not settings.lazy, not settings.lazy, settings.idle_unload_seconds
    main = ModelEntry("", settings, kind, preload=preload, idle_s=idle, resident=resident)
    entries = [with_name(main, served_name(settings, Path(settings.model).name))]
    for each, known in KINDS.items():
        model = getattr(settings, known.setting) if known.setting else None
        if model is not None:
            own = replace(settings, model=model, served_model_name=(), memory=None)
            entry = replace(main, settings=own, kind=each, alongside=True)
            entries.append(with_name(entry, Path(model).name, entries))
    return tuple(entries)


def with_name(entry: ModelEntry, name: str, others: Iterable[ModelEntry] = ()) -> ModelEntry:
    """A model of a server without tables under `name`, or under one that tells its kind where another is called so;
    with the further names that the settings give it."""
    settings = entry.settings
    if any(other.name == name for other in others):
        name, settings = f"{name}-{entry.kind}", replace(settings, served_model_name=(f"{name}-{entry.kind}", name))
    further = settings.served_model_name[1:]
    aliases = (*further, *_aliases_for((name, *further, "default"), settings.alias))
    return replace(entry, name=name, aliases=aliases, settings=settings)


def served_name(settings: Settings, own: str) -> str:
    """The name that the main model is served under."""
    return settings.served_model_name[0] if settings.served_model_name else own


def _model_entry(name: str, table: ModelTable, settings: Settings, kind_of: KindOf) -> ModelEntry:
    own_settings = _model_settings(name, table.settings)
    aliases = (*table.aliases, *_aliases_for((name, *table.aliases), settings.alias))
    try:
        own = replace(
            settings,
            model=table.path,
            models=None,
            models_config=None,
            served_model_name=(name, *table.aliases),
            alias=tuple(alias for alias in settings.alias if alias.partition("=")[2] in (name, *table.aliases)),
            **{"memory": None, **own_settings},
        )
    except ConfigError as error:
        raise ConfigError(f"[models.{name}]: {error.message}") from None
    preload = not settings.lazy if table.preload is None else table.preload
    idle = settings.idle_unload_seconds if table.idle_unload_s is None else table.idle_unload_s
    kind = kind_of(table.path, settings) if table.kind is None else table.kind
    for key in own_settings:
        if key not in KINDS[kind].settings:
            raise ConfigError(f"[models.{name}]: {key} means nothing to a model of kind {kind}")
    return ModelEntry(name, own, kind, aliases, preload, table.pin, None if table.pin else idle)


def _model_settings(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        if key not in PER_MODEL_SETTINGS:
            near = nearest_name(key, PER_MODEL_SETTINGS)
            hint = f"; did you mean {near}?" if near else ""
            what = "holds for the whole server" if key in SETTINGS else "is not known"
            raise ConfigError(f"[models.{name}]: {key[:100]} {what}{hint}")
        found[key] = SETTINGS[key].from_toml(value, f"[models.{name}]: {key}")
    return found


def _aliases_for(names: Iterable[str], aliases: Iterable[str]) -> list[str]:
    pairs = [alias.partition("=") for alias in aliases]
    return [alias for alias, _, target in pairs if target in tuple(names)]


def _refuse_shared_names(entries: Iterable[ModelEntry]) -> None:
    owners: dict[str, str] = {}
    for entry in entries:
        for name in entry.names:
            if owners.setdefault(name, entry.name) != entry.name:
                raise ConfigError(f"models: {name!r} is a name of {owners[name]} and of {entry.name}")


def _refuse_shared_endpoints(entries: Iterable[ModelEntry]) -> None:
    owners: dict[str, str] = {}
    for entry in entries:
        for endpoint in filter(None, (getattr(entry.settings, name) for name in ENDPOINT_SETTINGS)):
            if not endpoint.endswith(":*") and owners.setdefault(endpoint, entry.name) != entry.name:
                raise ConfigError(
                    f"models: {owners[endpoint]} and {entry.name} would both publish events at {endpoint}"
                )
