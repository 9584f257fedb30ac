"""Settings that are read again while the server runs: which of them hold at once, and which wait for a restart."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from typing import Final

from ingot.config import Settings
from ingot.errors import ConfigError
from ingot.http.shared_state import HasHall
from ingot.http.tenants import Tenants, refuse_short_key

KEYS: Final = frozenset({"api_key", "api_key_file", "admin_api_key"})
LIVE: Final = KEYS | {
    *("allowed_hosts", "cors_origins", "keepalive_s", "idle_event_s", "idle_body_s", "drain_s", "log_level"),
}
"""What is looked at anew for each request, and so can change."""

log = logging.getLogger("ingot.http")


def reload(service: HasHall, settings_again: Callable[[], Settings]) -> None:
    """Take over what may change, and name what may not. Settings that are wrong change nothing."""
    hall = service.hall
    hall.tenants.refresh()
    try:
        wanted, before = settings_again(), hall.settings
        changed = [
            field.name for field in fields(Settings) if getattr(wanted, field.name) != getattr(before, field.name)
        ]
        taken = [name for name in changed if name in LIVE]
        settings = replace(before, **{name: getattr(wanted, name) for name in taken})
        refuse_short_key(settings)
        tenants = Tenants(settings) if KEYS & set(taken) else hall.tenants
    except ConfigError as error:
        log.error("the settings stay as they were: %s", error.message)
        return
    hall.settings, hall.tenants = settings, tenants
    log.warning("settings were read again; %s", _told(taken, [name for name in changed if name not in LIVE]))


def _told(taken: Iterable[str], left: Iterable[str]) -> str:
    now, later = ", ".join(taken), ", ".join(left)
    return f"changed: {now or 'nothing'}" + (f"; what changes with a restart: {later}" if later else "")
