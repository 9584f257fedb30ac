"""One frozen settings object. Flags, `INGOT_*` variables and a TOML file all map to it, and nowhere else.

A field's metadata holds its help text and its limits; its flag is `--field-name`, its variable `INGOT_FIELD_NAME`, its
key in the file `field_name`. Precedence: flag, then variable, then file, then the default of the field. What other
servers call a setting (`foreign`) is known too, and becomes ours where it is read.
"""

from ingot.config.checks import is_loopback
from ingot.config.field import Setting
from ingot.config.foreign import FOREIGN
from ingot.config.keys import ApiKey, own_key_problem, read_keys
from ingot.config.memory import GIB, memory_bytes
from ingot.config.model_entries import ModelEntry, lone_entry, model_entries
from ingot.config.settings import SETTINGS, Settings
from ingot.config.sources import Config, load
from ingot.config.table import DEFAULT_MODEL

__all__ = [
    "DEFAULT_MODEL",
    "FOREIGN",
    "GIB",
    "SETTINGS",
    "ApiKey",
    "Config",
    "ModelEntry",
    "Setting",
    "Settings",
    "is_loopback",
    "load",
    "lone_entry",
    "memory_bytes",
    "model_entries",
    "own_key_problem",
    "read_keys",
]
