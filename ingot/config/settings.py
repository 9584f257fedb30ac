"""The settings, as the rest of the program has them.

A `Settings` that exists is valid: every limit is checked when one is made, whoever makes it, and so is what settings
say together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ingot.config.checks import is_loopback
from ingot.config.field import Setting, settings_of
from ingot.config.loras import LoraModule, is_lora_name, lora_modules
from ingot.config.memory import MIB
from ingot.config.ranks import ranks_problem
from ingot.config.table import SettingsTable
from ingot.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Settings(SettingsTable):
    def __post_init__(self) -> None:
        for known in SETTINGS.values():
            value = known.checked(getattr(self, known.name), known.name)
            object.__setattr__(self, known.name, value)
        if self.warm_prompts is not None and not self.prefix_cache:
            raise ConfigError("warm_prompts keeps what it computes, which prefix_cache = false forbids: choose one")
        if self.cache_dir is not None and not self.prefix_cache:
            raise ConfigError("cache_dir keeps prefixes on disk, which prefix_cache = false forbids: choose one")
        if self.cache_codec != "raw" and not self.prefix_cache:
            raise ConfigError("cache_codec is about kept prefixes, which prefix_cache = false forbids: choose one")
        if self.kv_events is not None and not self.prefix_cache:
            raise ConfigError("kv_events tells of kept prefixes, which prefix_cache = false forbids: choose one")
        for name in ("kv_events_replay", "kv_events_topic"):
            if self.kv_events is None and getattr(self, name) != SETTINGS[name].default:
                raise ConfigError(f"{name} is about kv_events, which says no endpoint: give one", param=name)
        self._refuse_what_needs_a_folder()
        self._check_loras()
        self._refuse_what_nobody_scores()
        if (problem := ranks_problem(self)) is not None:
            raise ConfigError(problem)
        if self.held_bytes < self.largest_body:
            raise ConfigError(f"max_held_bytes is less than one body may have: {self.largest_body} bytes")
        if not self.keyed and not is_loopback(self.host):
            raise ConfigError(
                f"host {self.host} can be reached from other machines, so an API key is needed: "
                "set INGOT_API_KEY or --api-key, or listen on 127.0.0.1"
            )

    def _refuse_what_needs_a_folder(self) -> None:
        """Settings of the cache's folder mean nothing without one."""
        for name in ("cache_disk_gb", "cache_disk_free_gb", "cache_disk_sync"):
            if self.cache_dir is None and getattr(self, name) != SETTINGS[name].default:
                raise ConfigError(f"{name} is about the folder that cache_dir names: name one", param=name)

    def _check_loras(self) -> None:
        loras = self.loras
        if len(loras) > self.max_loras:
            raise ConfigError(f"{len(loras)} adapters are named, and max_loras is {self.max_loras}", param="max_loras")
        if self.adapter_path is not None and not is_lora_name(loras[-1].name):
            raise ConfigError(f"adapter_path: its folder's name, {loras[-1].name!r}, is none for an adapter")
        if len({lora.name for lora in loras}) < len(loras):
            raise ConfigError(f"two adapters are called {loras[-1].name!r}", param="adapter_path")

    @property
    def loras(self) -> tuple[LoraModule, ...]:
        """All adapters to begin with; that of `adapter_path` is the last."""
        named = lora_modules(self.lora_modules)
        own = self.adapter_path
        return named if own is None else (*named, LoraModule(own.resolve().name, own))

    @property
    def default_lora(self) -> str | None:
        """The adapter of requests that name none."""
        return None if self.adapter_path is None else self.loras[-1].name

    def _refuse_what_nobody_scores(self) -> None:
        """Settings of sparse prefill mean nothing without it, nor does a draft where none is asked."""
        for name in ("scorer", "draft_model", "threshold", "keep_pct"):
            name = f"specprefill_{name}"
            if not self.specprefill and getattr(self, name) != SETTINGS[name].default:
                raise ConfigError(f"{name} is about specprefill, which is off: switch it on", param=name)
        if self.specprefill_draft_model is not None and self.specprefill_scorer != "draft":
            raise ConfigError(
                f"specprefill_draft_model names a model that specprefill_scorer {self.specprefill_scorer} does not "
                "ask: choose one",
                param="specprefill_draft_model",
            )

    @property
    def ranks(self) -> int:
        """Processes that run the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def responses_path(self) -> Path | None:
        """Where responses are stored; None where none are."""
        return None if self.responses_store == "off" else Path(self.responses_store).expanduser()

    @property
    def held_bytes(self) -> int:
        """The most bytes of request bodies held at once."""
        return 16 * self.largest_body if self.max_held_bytes is None else self.max_held_bytes

    @property
    def largest_body(self) -> int:
        """The most bytes of a request body that is held whole."""
        return self.max_body_bytes if self.audio_model is None else max(self.max_body_bytes, self.max_audio_bytes)

    @property
    def max_audio_bytes(self) -> int:
        """The most bytes of a request with a sound."""
        return self.max_audio_upload_mb * MIB

    @property
    def keyed(self) -> bool:
        """Whether clients must send a key."""
        return any(given is not None for given in (self.api_key, self.api_key_file, self.admin_api_key))


SETTINGS: Mapping[str, Setting] = {known.name: known for known in settings_of(Settings)}
