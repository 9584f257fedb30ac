"""Who is asking: each API key is a tenant, whose requests, receipts and kept prompts no other one sees."""

from __future__ import annotations

import hmac
import logging
import stat
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from ingot.config import Settings, read_keys

log = logging.getLogger("ingot.http")


class Tenants:
    """The tenants of a server. Without any key there is one, nameless, and everybody is that one."""

    def __init__(self, settings: Settings) -> None:
        keys = [settings.api_key] if settings.api_key is not None else []
        if settings.api_key_file is not None:
            keys += read_keys(settings.api_key_file)
            warn_of_readers(settings.api_key_file)
        keys += [settings.admin_api_key] if settings.admin_api_key is not None else []
        self._names = {key.encode(): tenant_name(key) for key in keys}
        self._admin = None if settings.admin_api_key is None else tenant_name(settings.admin_api_key)

    def __bool__(self) -> bool:
        return bool(self._names)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names.values()) or ("",)

    def is_admin(self, tenant: str) -> bool:
        """Whether it has the administrator's rights. Without any key, whoever may reach the server has them."""
        return not self or tenant == self._admin

    def of(self, given: Sequence[str]) -> str | None:
        """The tenant whose key is among `given`, or None. Every key is compared with all of them, always, so that
        the time taken says nothing about the keys."""
        found = None
        for text in given:
            raw = text.encode("latin-1", "replace")
            for key, name in self._names.items():
                if hmac.compare_digest(raw, key):
                    found = name
        return found


def warn_of_readers(path: Path) -> None:
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s holds keys, and others on this machine may read it; `chmod 600` it", path)


def tenant_name(key: str) -> str:
    """A name that may be shown and logged, from which nobody gets back to the key."""
    return blake2b(key.encode(), digest_size=8, person=b"ingot-tenant").hexdigest()
