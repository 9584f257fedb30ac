"""One frozen settings object, to which flags, `INGOT_*` variables and a TOML file map.

The metadata of a field has its help text and limits; its flag is `--field-name`, its variable `INGOT_FIELD_NAME`, its
key in the file `field_name`. Precedence: flag, variable, file, default. Other servers' names of a setting are
translated to ours where they are read (`sources`, by the table of `foreign`).
"""

from ingot.config.checks import GIB, is_loopback, memory_bytes
from ingot.config.field import Setting
from ingot.config.keys import ApiKey, own_key_problem, read_keys
from ingot.config.model_entries import (
    KINDS,
    Kind,
    ModelEntry,
    model_entries,
    served_name,
    single_model_entries,
    with_name,
)
from ingot.config.settings import DEFAULT_MODEL, SETTINGS, Settings
from ingot.config.sources import Config, load_config

__all__ = [
    "DEFAULT_MODEL",
    "GIB",
    "KINDS",
    "SETTINGS",
    "ApiKey",
    "Config",
    "Kind",
    "ModelEntry",
    "Setting",
    "Settings",
    "is_loopback",
    "load_config",
    "memory_bytes",
    "model_entries",
    "own_key_problem",
    "read_keys",
    "served_name",
    "single_model_entries",
    "with_name",
]
