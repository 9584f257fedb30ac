"""Who is asking: each API key is a tenant, whose requests, receipts and kept prompts no other one sees."""

from __future__ import annotations

import hmac
import logging
import stat
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from pathlib import Path

from ingot.config import ApiKey, Settings, own_key_problem, read_keys
from ingot.errors import ConfigError

log = logging.getLogger("ingot.http")

NOBODY = ApiKey(())
"""Who asks where there are no keys: everybody, for whatever there is."""


class Tenants:
    """The tenants of a server. Without any key there is one, nameless, and everybody is that one.

    A file of keys is read again when it has changed. One that is wrong by then changes nothing, and the log says so.
    """

    def __init__(self, settings: Settings) -> None:
        self._file = settings.api_key_file
        self._own = [ApiKey((key,)) for key in (settings.api_key, settings.admin_api_key) if key is not None]
        self._admin = None if settings.admin_api_key is None else tenant_name(settings.admin_api_key)
        self._keys: dict[str, ApiKey] = {}
        self._names: dict[bytes, str] = {}
        self._stamp = None if self._file is None else stamp_of(self._file)
        if self._file is not None:
            warn_of_readers(self._file)
        self._take([] if self._file is None else read_keys(self._file))

    def __bool__(self) -> bool:
        return bool(self._own) or self._file is not None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._keys) or ("",)

    def key_of(self, tenant: str) -> ApiKey:
        """What a tenant may ask for. One whose key was withdrawn meanwhile has no limits left to tell."""
        return self._keys.get(tenant, NOBODY)

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

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        if self._file is None or (stamp := stamp_of(self._file)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(read_keys(self._file))
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error.message)
            return
        log.warning("%s was read again: %d keys", self._file, len(self._keys))
        warn_of_readers(self._file)

    def _take(self, listed: Iterable[ApiKey]) -> None:
        everyone = [*listed, *self._own]
        self._keys = {key.name or tenant_name(key.secrets[0]): key for key in everyone}
        self._names = {secret.encode(): name for name, key in self._keys.items() for secret in key.secrets}


def refuse_short_key(settings: Settings) -> None:
    """Raises ConfigError where the key that this server asks for is soon guessed."""
    if settings.api_key is not None and (problem := own_key_problem(settings.api_key)) is not None:
        raise ConfigError(f"api_key: {problem}", param="api_key")


def stamp_of(path: Path) -> tuple[int, ...] | None:
    """What differs once a file was changed; None where it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def warn_of_readers(path: Path) -> None:
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s holds keys, and others on this machine may read it; `chmod 600` it", path)


def tenant_name(key: str) -> str:
    """A name that may be shown and logged, from which nobody gets back to the key."""
    return blake2b(key.encode(), digest_size=8, person=b"ingot-tenant").hexdigest()
