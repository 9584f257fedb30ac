"""One frozen settings object. Flags, `INGOT_*` variables and a TOML file all map to it, and nowhere else.

A field's metadata holds its help text and its limits; its flag is `--field-name`, its variable `INGOT_FIELD_NAME`, its
key in the file `field_name`. Precedence: flag, then variable, then file, then the default of the field. What other
servers call a setting is known too, and becomes ours where it is read (`sources`).
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
from ingot.config.sources import FOREIGN_SETTINGS, Config, load_config

__all__ = [
    "DEFAULT_MODEL",
    "FOREIGN_SETTINGS",
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
