"""Access control: host names, origins, API keys, rates, and body sizes.

All of it is checked before a route is chosen, so that no route can forget it.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from typing import Final
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ingot.config import Settings
from ingot.errors import BadRequest, Forbidden, IngotError, RateLimited, RequestTooLarge, Stopping, Unauthorized
from ingot.http.connections import client_address
from ingot.http.edge import Reply, audit_refusal, reply_of
from ingot.http.endpoints.page import PAGE_PATHS
from ingot.http.shared_state import SharedState
from ingot.http.tenants import RATE_HEADERS, Tenants, tenant_name
from ingot.observe.logs import RareWarning
from ingot.protocol.operations import IMPORT_PATH, OPERATIONS, RECEIPT_HEADERS

log = logging.getLogger("ingot.http")

PROBE_PATHS: Final = frozenset(operation.path for operation in OPERATIONS if operation.public)
PUBLIC_PATHS: Final = PROBE_PATHS | {*PAGE_PATHS.values()}
ENGINE_PATHS: Final = frozenset(operation.path for operation in OPERATIONS if operation.runs)
HOST_PATTERN: Final = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{0,5})?")
UPLOAD_PATHS: Final = frozenset(operation.path for operation in OPERATIONS if operation.takes == "form")
PUBLIC_FOLDER: Final = "/static/"
SAFE_METHODS: Final = ("GET", "HEAD")
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
EXPOSED_HEADERS: Final = ("x-request-id", "retry-after", *RATE_HEADERS, *RECEIPT_HEADERS)
FLOOD_DELAY_S: Final = 1.0  # before a flood without a key is refused
PREFLIGHT_AGE_S: Final = 600
RESTART_RETRY_S: Final = 5.0  # the retry-after of a stopping server


class GuardMiddleware:
    def __init__(self, app: ASGIApp, shared_state: SharedState) -> None:
        self.app, self.shared_state = app, shared_state
        self._flood_notice = RareWarning(log)
        self._apply(shared_state.settings)

    def _apply(self, settings: Settings) -> None:
        self.settings = settings
        self.names = frozenset(host_name(name) for name in ("localhost", settings.host, *settings.allowed_hosts))
        self.any_address = is_wildcard_host(settings.host)
        self.origins = frozenset(origin.lower() for origin in settings.cors_origins)
        self.max_body_bytes = settings.max_body_bytes
        self.max_bytes = {IMPORT_PATH: settings.max_import_bytes} | dict.fromkeys(
            UPLOAD_PATHS, settings.max_audio_bytes
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, answer = Headers(scope=scope), reply_of(scope)
        if self.settings is not self.shared_state.settings:
            self._apply(self.shared_state.settings)
        self.tenants.refresh()
        try:
            is_preflight = self._check(scope, headers, answer)
        except IngotError as error:
            if not answer.known and isinstance(error, RateLimited):
                # There may be many: none is logged, and a client that waits for the answer asks less often.
                await anyio.sleep(FLOOD_DELAY_S)
            else:
                audit_refusal(answer, error, self._key_name(headers))
            raise
        connection = scope["state"].get("connection")
        if connection is not None and scope["path"] not in PROBE_PATHS:
            connection.claim(answer.tenant)
        if is_preflight:
            await send_preflight(headers, send)
            return
        most = self.max_bytes.get(scope["path"], self.max_body_bytes)
        check_content_length(headers, most)
        await self.app(scope, bound_receive(receive, most), send)

    @property
    def tenants(self) -> Tenants:
        return self.shared_state.tenants

    def _check(self, scope: Scope, headers: Headers, answer: Reply) -> bool:
        """Raises the refusal of a request for its key, origin or rate. Whether it is a CORS preflight."""
        keys = api_keys_in(headers)
        tenant = self.tenants.of(keys)
        answer.known = not self.tenants or tenant is not None
        if not answer.known:
            self._check_unknown(scope)
        self._check_host(headers)
        if self._check_origin(headers):
            answer.headers += [
                ("access-control-allow-origin", headers["origin"]),
                ("access-control-expose-headers", ", ".join(EXPOSED_HEADERS)),
                ("vary", "origin"),
            ]
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                return True
        if self.tenants and not is_public_path(scope):
            self._check_key(keys, tenant, answer)
        answer.admin = self.tenants.is_admin(answer.tenant)
        if scope["method"] == "POST" and scope["path"] in ENGINE_PATHS:
            if self.shared_state.live.draining:
                raise self.shared_state.live.refusal or shutting_down_error()
            self._check_rate(answer)
        return False

    def _check_unknown(self, scope: Scope) -> None:
        """Refuses requests of an address without a key beyond its share."""
        address = client_address(scope.get("client"))
        budget = self.shared_state.probes if scope["path"] in PROBE_PATHS else self.shared_state.unknown
        if not budget.take(address):
            self._flood_notice.warn("more than %d %s a second; most of them %s", budget.capacity, budget.name, address)
            raise RateLimited(f"Too many {budget.name} come from this address.", retry_after=1)

    def _check_rate(self, answer: Reply) -> None:
        key, rates = self.tenants.key_of(answer.tenant), self.shared_state.rates
        try:
            rates.admit(answer.tenant, key)
        finally:
            answer.headers += rates.headers(answer.tenant, key)

    def _key_name(self, headers: Headers) -> str:
        """The key of a request, as the audit log may show it."""
        keys = api_keys_in(headers)
        if not keys:
            return "none"
        return self.tenants.of(keys) or f"unknown, {tenant_name(keys[0])}"

    def _check_host(self, headers: Headers) -> None:
        hosts = headers.getlist("host")
        if len(hosts) != 1:
            raise BadRequest("A request must have exactly one Host header.")
        found = HOST_PATTERN.fullmatch(hosts[0].strip())
        if found is None:
            raise BadRequest("The Host header must be a name or an address, optionally with a port.")
        name = host_name(found[1])
        if name in self.names:
            return
        address = parse_address(name)
        if address is not None and (address.is_loopback or self.any_address):
            return
        raise Forbidden(
            f"This server does not answer to the name '{name[:100]}'. If it is right, start it with "
            "--allowed-hosts and that name."
        )

    def _check_origin(self, headers: Headers) -> bool:
        """Whether the request comes from another origin that is allowed; refuses other origins."""
        origins = headers.getlist("origin")
        if not origins:
            return False
        if len(origins) == 1 and origins[0].lower() in self.origins:
            return True
        if len(origins) == 1 and is_same_origin(origins[0], headers["host"]):
            return False
        raise Forbidden(
            f"Pages of the origin '{origins[0][:100]}' may not call this server. If they should, start it with "
            "--cors-origins and that origin."
        )

    def _check_key(self, keys: list[str], tenant: str | None, answer: Reply) -> None:
        if len(set(keys)) > 1:
            answer.headers.append(("www-authenticate", "Bearer"))
            raise Unauthorized("The request has different API keys. Send one of them.")
        if tenant is None:
            answer.headers.append(("www-authenticate", "Bearer"))
            raise Unauthorized("This server needs its API key, as 'Authorization: Bearer …' or 'x-api-key: …'.")
        answer.tenant = tenant


def api_keys_in(headers: Headers) -> list[str]:
    """All keys of a request, in either header."""
    keys = headers.getlist("x-api-key")
    for value in headers.getlist("authorization"):
        scheme, _, token = value.partition(" ")
        keys += [token] if scheme.lower() == "bearer" else []
    return [key for each in keys if (key := each.strip())]


def check_content_length(headers: Headers, most: int) -> None:
    length = headers.get("content-length", "0")
    if not (length.isascii() and length.isdigit()):
        raise BadRequest("Content-Length is not a number.")
    # Digits are counted first: converting a very long number takes long.
    if len(length) > 20 or int(length) > most:
        raise too_large_error(most)


def bound_receive(receive: Receive, most: int) -> Receive:
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > most:
            raise too_large_error(most)
        return message

    return bounded


def too_large_error(most: int) -> RequestTooLarge:
    return RequestTooLarge(f"The body is larger than {most} bytes, the limit of this server.")


def shutting_down_error() -> Stopping:
    return Stopping("The server is shutting down.", retry_after=RESTART_RETRY_S)


def is_public_path(scope: Scope) -> bool:
    path: str = scope["path"]
    return scope["method"] in SAFE_METHODS and (path in PUBLIC_PATHS or path.startswith(PUBLIC_FOLDER))


def host_name(host: str) -> str:
    """The name in a Host header, without its port: `[::1]:8000` is `::1`."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    if host.count(":") == 1:
        host = host.partition(":")[0]
    return host.rstrip(".")


def parse_address(name: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_wildcard_host(host: str) -> bool:
    """Whether `host` listens on every address. DNS rebinding needs a name, so all addresses are allowed."""
    address = parse_address(host_name(host))
    return address is not None and address.is_unspecified


def is_same_origin(origin: str, host: str) -> bool:
    try:
        from_page, to_server = urlsplit(origin.lower()), urlsplit(f"//{host.lower()}")
        default = DEFAULT_PORTS[from_page.scheme]
        here = (from_page.hostname, from_page.port or default)
        return here == (to_server.hostname, to_server.port or default)
    except (ValueError, KeyError):  # an invalid port, or another scheme
        return False


async def send_preflight(headers: Headers, send: Send) -> None:
    answer = [
        (b"access-control-allow-methods", b"GET, POST, DELETE"),
        (b"access-control-allow-headers", headers.get("access-control-request-headers", "").encode("latin-1")),
        (b"access-control-max-age", str(PREFLIGHT_AGE_S).encode()),
    ]
    await send({"type": "http.response.start", "status": 204, "headers": answer})
    await send({"type": "http.response.body", "body": b""})
