"""Who is asking: each API key is a tenant, whose requests, receipts and cached prompts no other one sees; which models
a key is for, and how much it may ask for in a minute.

A minute's worth of requests and tokens is there at the beginning, and flows back evenly. What a request costs in tokens
is known only when it is over, so that one may take more than is left: the next then waits until that has flowed back.
For one thread.
"""

from __future__ import annotations

import hmac
import logging
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from hashlib import blake2b
from pathlib import Path
from typing import Final, Literal

from ingot.config import ApiKey, Settings, own_key_problem, read_keys
from ingot.errors import ConfigError, Forbidden, RateLimited
from ingot.http.edge import Reply, audit_refusal

log = logging.getLogger("ingot.http")

NO_TENANT = ApiKey(())
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
        self._stamp = None if self._file is None else file_stamp(self._file)
        if self._file is not None:
            warn_if_others_can_read(self._file)
        self._take([] if self._file is None else read_keys(self._file))

    def __bool__(self) -> bool:
        return bool(self._own) or self._file is not None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._keys) or ("",)

    def key_of(self, tenant: str) -> ApiKey:
        """What a tenant may ask for. One whose key was withdrawn meanwhile has no limits left to tell."""
        return self._keys.get(tenant, NO_TENANT)

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
        if self._file is None or (stamp := file_stamp(self._file)) == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(read_keys(self._file))
        except ConfigError as error:
            log.error("the keys stay as they were: %s", error.message)
            return
        log.warning("%s was read again: %d keys", self._file, len(self._keys))
        warn_if_others_can_read(self._file)

    def _take(self, listed: Iterable[ApiKey]) -> None:
        everyone = [*listed, *self._own]
        self._keys = {key.name or tenant_name(key.secrets[0]): key for key in everyone}
        self._names = {secret.encode(): name for name, key in self._keys.items() for secret in key.secrets}


def refuse_short_key(settings: Settings) -> None:
    """Raises ConfigError where the key that this server asks for is soon guessed."""
    if settings.api_key is not None and (problem := own_key_problem(settings.api_key)) is not None:
        raise ConfigError(f"api_key: {problem}", param="api_key")


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """What differs once a file was changed; None where it is gone."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def warn_if_others_can_read(path: Path) -> None:
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s holds keys, and others on this machine may read it; `chmod 600` it", path)


def tenant_name(key: str) -> str:
    """A name that may be shown and logged, from which nobody gets back to the key."""
    return blake2b(key.encode(), digest_size=8, person=b"ingot-tenant").hexdigest()


def is_model_allowed(model: str, key: ApiKey) -> bool:
    return not key.models or any(fnmatchcase(model, pattern) for pattern in key.models)


def check_model_allowed(model: str, key: ApiKey, answer: Reply) -> None:
    """Raises Forbidden where a key is for other models."""
    if not is_model_allowed(model, key):
        error = Forbidden(f"This key is not for {model}, but for {', '.join(key.models)}.", param="model")
        audit_refusal(answer, error, answer.tenant)
        raise error


MINUTE_S: Final = 60.0
RateKind = Literal["requests", "tokens"]
RATE_HEADERS: Final = tuple(
    f"x-ratelimit-{name}-{what}" for what in ("requests", "tokens") for name in ("limit", "remaining")
)


@dataclass(slots=True)
class RateAllowance:
    """What is left of so many a minute."""

    limit: int
    since: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.limit

    def flow(self, now: float) -> None:
        self.left = min(self.limit, self.left + (now - self.since) * self.limit / MINUTE_S)
        self.since = now

    def missing_s(self, wanted: float) -> float:
        """How long it takes until `wanted` are there."""
        return max(0.0, (wanted - self.left) * MINUTE_S / self.limit)


class RateLimits:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[tuple[str, RateKind], RateAllowance] = {}

    def admit(self, tenant: str, key: ApiKey) -> None:
        """Take a request in. Raises RateLimited where the minute's requests or tokens are used up."""
        allowances = dict(self._allowances(tenant, key))
        for what, allowance in allowances.items():
            if (seconds := allowance.missing_s(1.0)) > 0:
                raise RateLimited(
                    f"This key may use {allowance.limit} {what} a minute, and has.", retry_after=max(1.0, seconds)
                )
        if "requests" in allowances:
            allowances["requests"].left -= 1

    def charge(self, tenant: str, key: ApiKey, tokens: int) -> None:
        for what, allowance in self._allowances(tenant, key):
            if what == "tokens":
                allowance.left -= tokens

    def headers(self, tenant: str, key: ApiKey) -> list[tuple[str, str]]:
        """What is left, where OpenAI's clients look for it."""
        return [
            (f"x-ratelimit-{name}-{what}", str(value))
            for what, allowance in self._allowances(tenant, key)
            for name, value in (("limit", allowance.limit), ("remaining", max(0, int(allowance.left))))
        ]

    def _allowances(self, tenant: str, key: ApiKey) -> Iterator[tuple[RateKind, RateAllowance]]:
        """Those that the key has, as they stand now. One whose limit was changed begins anew."""
        now = self._clock()
        limits: dict[RateKind, int | None] = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        for what, limit in limits.items():
            if limit is None:
                self._kept.pop((tenant, what), None)
                continue
            kept = self._kept.get((tenant, what))
            if kept is None or kept.limit != limit:
                kept = self._kept[tenant, what] = RateAllowance(limit, now)
            kept.flow(now)
            yield what, kept
