"""API keys and rate limits. Each key is a tenant, whose requests, receipts and cached prompts no other one sees.

Rates are token buckets of one minute. The tokens of a request are known only when it is over, so that one may use more
than is left: the next then waits until the bucket has refilled. For one thread.
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
"""Everyone, where there are no keys."""


class Tenants:
    """The tenants of a server. Without any key there is one without a name.

    A file of keys is read again when it has changed. An invalid one changes nothing and is logged.
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
        """A tenant's key and limits; one whose key was withdrawn meanwhile has none."""
        return self._keys.get(tenant, NO_TENANT)

    def is_admin(self, tenant: str) -> bool:
        """Whether it has the administrator's rights, as everyone has on a server without keys."""
        return not self or tenant == self._admin

    def of(self, keys: Sequence[str]) -> str | None:
        """The tenant of one of `keys`, or None. Every key is always compared with all of them, so that the time reveals
        nothing about the keys."""
        found = None
        for text in keys:
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
    """Raises ConfigError where the server's key is easy to guess."""
    if settings.api_key is not None and (problem := own_key_problem(settings.api_key)) is not None:
        raise ConfigError(f"api_key: {problem}", param="api_key")


def file_stamp(path: Path) -> tuple[int, ...] | None:
    """Changes when the file changes; None where it does not exist."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def warn_if_others_can_read(path: Path) -> None:
    if path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        log.warning("%s has keys, and other users of this machine may read it; `chmod 600` it", path)


def tenant_name(key: str) -> str:
    """A digest of the key, which may be shown and logged."""
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
    """A token bucket: what is left of `limit` a minute."""

    limit: int
    since: float
    left: float = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.limit

    def refill(self, now: float) -> None:
        self.left = min(self.limit, self.left + (now - self.since) * self.limit / MINUTE_S)
        self.since = now

    def missing_s(self, wanted: float) -> float:
        """How long it takes until `wanted` are available."""
        return max(0.0, (wanted - self.left) * MINUTE_S / self.limit)


class RateLimits:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: dict[tuple[str, RateKind], RateAllowance] = {}

    def admit(self, tenant: str, key: ApiKey) -> None:
        """Count a request. Raises RateLimited where the minute's requests or tokens are used up."""
        allowances = dict(self._allowances(tenant, key))
        for what, allowance in allowances.items():
            if (seconds := allowance.missing_s(1.0)) > 0:
                raise RateLimited(f"Rate limit: {allowance.limit} {what} per minute.", retry_after=max(1.0, seconds))
        if "requests" in allowances:
            allowances["requests"].left -= 1

    def charge(self, tenant: str, key: ApiKey, tokens: int) -> None:
        for what, allowance in self._allowances(tenant, key):
            if what == "tokens":
                allowance.left -= tokens

    def headers(self, tenant: str, key: ApiKey) -> list[tuple[str, str]]:
        """What is left, in the headers that OpenAI's clients read."""
        return [
            (f"x-ratelimit-{name}-{what}", str(value))
            for what, allowance in self._allowances(tenant, key)
            for name, value in (("limit", allowance.limit), ("remaining", max(0, int(allowance.left))))
        ]

    def _allowances(self, tenant: str, key: ApiKey) -> Iterator[tuple[RateKind, RateAllowance]]:
        """The key's allowances, refilled. One whose limit has changed is reset."""
        now = self._clock()
        limits: dict[RateKind, int | None] = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        for what, limit in limits.items():
            if limit is None:
                self._buckets.pop((tenant, what), None)
                continue
            allowance = self._buckets.get((tenant, what))
            if allowance is None or allowance.limit != limit:
                allowance = self._buckets[tenant, what] = RateAllowance(limit, now)
            allowance.refill(now)
            yield what, allowance
