"""The tables that name a server's models: `[models.NAME]` in the TOML file, or the YAML file of `--models-config`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from ingot.config.checks import memory_problem
from ingot.errors import ConfigError

MODEL_KINDS: Final = ("chat", "embedding", "rerank", "audio", "speech")
"""What a model of a table may be for."""
Seconds = Annotated[float, Meta(ge=0, le=30 * 86_400)]


class ModelTable(Struct, kw_only=True):
    """What a table says of a model, besides the settings that are its own."""

    path: str  # as MODEL is given
    kind: str | None = None  # what it is for; None: as its files say
    aliases: list[str] = []
    preload: bool | None = None  # loaded at the start; None: unless the server is lazy
    pin: bool = False  # never unloaded to make room, nor for being idle
    idle_unload_s: Seconds | None = None
    settings: dict[str, Any] = {}

    @property
    def problem(self) -> str | None:
        if not self.path:
            return "path must not be empty"
        if self.kind is not None and self.kind not in MODEL_KINDS:
            return f"kind is {self.kind!r}; known are {', '.join(MODEL_KINDS)}"
        wrong = next((name for name in self.aliases if not _is_model_name(name)), None)
        return None if wrong is None else f"{wrong[:100]!r} is no name for a model"


TABLE_KEYS: Final = frozenset(ModelTable.__struct_fields__) - {"settings"}


class ContentionPolicy(Struct, forbid_unknown_fields=True):
    strategy: str = "wait"
    wait_timeout_s: float | None = None


class ManagerTable(Struct, forbid_unknown_fields=True):
    memory_budget_gb: float | None = None
    contention_policy: ContentionPolicy | None = None


class NamedModelTable(Struct):
    name: str


class RegistryFile(Struct, forbid_unknown_fields=True):
    """A YAML file as vllm-mlx has it."""

    models: list[dict[str, Any]]
    manager: ManagerTable | None = None


def read_model_tables(tables: Mapping[str, Any]) -> dict[str, ModelTable]:
    """What `[models]` of the TOML file holds, by name. Raises ConfigError that names the table at fault."""
    return {name: _read_table(name, table) for name, table in tables.items()}


def read_registry(path: Path) -> tuple[dict[str, ModelTable], str | None]:
    """The tables of a YAML file, and the memory that it states for all of them. Raises ConfigError."""
    import yaml

    try:
        registry = msgspec.convert(yaml.safe_load(path.expanduser().read_text(encoding="utf-8")), RegistryFile)
        names = [msgspec.convert(table, NamedModelTable).name for table in registry.models]
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{path}: there are two models {twice!r}")
    manager = registry.manager or ManagerTable()
    _refuse_policy(path, manager.contention_policy or ContentionPolicy())
    tables = {
        name: _read_table(name, _translate_table(table)) for name, table in zip(names, registry.models, strict=True)
    }
    memory = None if manager.memory_budget_gb is None else f"{manager.memory_budget_gb:g}GB"
    if memory is not None and (problem := memory_problem(memory)) is not None:
        raise ConfigError(f"{path}: memory_budget_gb: {problem}")
    return tables, memory


def _refuse_policy(path: Path, policy: ContentionPolicy) -> None:
    if policy.strategy != "wait" or policy.wait_timeout_s is not None:
        raise ConfigError(
            f"{path}: contention_policy: requests wait until there is room, as long as they may take at all "
            "(--request-timeout-s); the only strategy is wait"
        )


def _translate_table(table: Mapping[str, Any]) -> dict[str, Any]:
    translated = {key: value for key, value in table.items() if key != "name"}
    if "estimated_memory_gb" in translated:
        translated["memory"] = f"{translated.pop('estimated_memory_gb')}GB"
    return translated


def _read_table(name: str, fields: Any) -> ModelTable:
    if not _is_model_name(name):
        raise ConfigError(f"models: {name[:100]!r} is no name for a model")
    if not isinstance(fields, dict):
        raise ConfigError(f"[models.{name}]: it must be a table with a path")
    own = {key: value for key, value in fields.items() if key in TABLE_KEYS}
    rest = {key: value for key, value in fields.items() if key not in TABLE_KEYS}
    try:
        table = msgspec.convert({**own, "settings": rest}, ModelTable)
    except msgspec.ValidationError as error:
        raise ConfigError(f"[models.{name}]: {error}") from None
    if table.problem is not None:
        raise ConfigError(f"[models.{name}]: {table.problem}")
    return table


def _is_model_name(name: str) -> bool:
    return bool(name) and name.isprintable() and len(name) <= 256 and not set(name) & set("*=:,")
