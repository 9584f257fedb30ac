"""The HTTP server: listens, serves an application, and shuts down on a signal.

Settings are read again on SIGHUP: some apply at once, others need a restart. While no model can be served (a rank has
died, a device was lost), `UnavailableServer` answers on the port that clients should retry soon.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.types import Receive, Scope, Send

from ingot.config import Settings
from ingot.errors import ConfigError, IngotError, Unavailable
from ingot.http.edge import EdgeMiddleware, JsonResponse, reply_of
from ingot.http.guard import parse_address, shutting_down_error
from ingot.http.http11 import BoundedHttp, server_config
from ingot.http.shared_state import SharedState
from ingot.http.tenants import Tenants, refuse_short_key
from ingot.observe.logs import RareWarning
from ingot.process import ControllingTerminal, find_malloc_trim, signals_not_ignored, trim_heap
from ingot.protocol.ingot_api.health import HealthBody

if TYPE_CHECKING:
    from ingot.http.model_registry import ModelRegistry

FORCED_EXIT_S: Final = 0.3  # the same, after a second signal
GRACEFUL_SHUTDOWN_S: Final = 2.0  # for requests to report why they did not finish
KEEP_ALIVE_CONNECTION_S: Final = 75
LISTEN_BACKLOG: Final = 1024
OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("ingot.http")
no_file_notice = RareWarning(log)


@dataclass(frozen=True, slots=True)
class Listener:
    """Sockets that listen, all on one port."""

    sockets: tuple[socket.socket, ...]
    host: str
    port: int

    @property
    def url(self) -> str:
        address = parse_address(self.host)
        return (
            f"http://[{self.host}]:{self.port}"
            if address and address.version == 6
            else f"http://{self.host}:{self.port}"
        )

    def close(self) -> None:
        for one in self.sockets:
            one.close()


def open_listener(settings: Settings) -> Listener:
    """Bind the port. Raises ConfigError where that fails, or where it would be open to a network without a key or with
    a short one."""
    refuse_short_key(settings)
    addresses = resolve_host(settings.host, settings.port)
    if not settings.keyed and not all(is_loopback_address(address) for _, address in addresses):
        raise ConfigError(
            f"Listening on {settings.host} would allow anyone on the network. Set --api-key, or listen on 127.0.0.1.",
            param="api_key",
        )
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        for family, address in addresses:
            sockets.append(bind_socket(family, address, port))
            port = sockets[0].getsockname()[1]
    except OSError as error:
        for one in sockets:
            one.close()
        raise ConfigError(why_port_is_refused(settings.host, port, error), param="port") from error
    return Listener(tuple(sockets), settings.host, port)


def make_app_server(
    app: Starlette,
    settings: Settings,
    on_ready: Callable[[str], None],
    listener: Listener,
    settings_again: Callable[[], Settings] | None = None,
) -> HttpServer:
    """A server of an application. `run` serves until SIGINT (unless it is ignored) or SIGTERM, lets requests finish for
    a few seconds, and returns. `on_ready` gets the URL once connections are accepted; `settings_again` reads the
    settings again, for SIGHUP."""
    config = server_config(app, settings, keep_alive_s=KEEP_ALIVE_CONNECTION_S, shutdown_s=int(GRACEFUL_SHUTDOWN_S))
    return HttpServer(config, listener, app.state.service, on_ready, settings_again)


class HttpServer(uvicorn.Server):
    """uvicorn's server, with four changes: it reports when it is ready, it answers probes while requests finish, it
    ends those that take too long with an error, and a signal makes it return instead of ending the process."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: Listener,
        models: ModelRegistry,
        on_ready: Callable[[str], None],
        settings_again: Callable[[], Settings] | None = None,
    ) -> None:
        super().__init__(config)
        self._settings_again = settings_again
        self.listener, self._models, self._on_ready = listener, models, on_ready
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._terminal = ControllingTerminal()
        self.fatal_error: IngotError | None = None
        self.stopped = False  # by a signal
        self.leave: Callable[[], object] = _stay_in_process
        """Ends the process at once, on a second interrupt."""
        self.show: Callable[[str], object] | None = None
        """Shows what a server that stops waits for, where somebody looks on; called again and again."""
        self._stopping_at = 0.0

    @property
    def shared_state(self) -> SharedState:
        return self._models.shared_state

    def give_up(self, error: IngotError) -> None:
        """End all requests with `error`, and return soon. Any thread may call it, as the engine may hang."""
        self.fatal_error = error
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._abandon, error)

    def _abandon(self, error: IngotError) -> None:
        self.shared_state.live.draining = self.should_exit = True
        self.shared_state.live.refusal = error
        self.shared_state.live.abandon_all(error)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets or list(self.listener.sockets))
        finally:
            self.listener.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await self._models.start()
        await super().startup(sockets)
        for one in self.listener.sockets:
            one.listen(LISTEN_BACKLOG)
        asyncio.get_running_loop().set_exception_handler(handle_loop_exception)
        if (trim := find_malloc_trim()) is not None:
            # Memory that loading left is freed before anybody looks at the server's size.
            await asyncio.to_thread(trim)
            self._tasks.append(asyncio.create_task(trim_heap(trim)))
        self._on_ready(self.listener.url)
        self._models.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        live = self.shared_state.live
        await live.drain(self.shared_state.settings.drain_s, self._is_hurried)
        live.abandon_all(shutting_down_error())
        self._refuse_unsent(live.refusal or shutting_down_error())
        try:
            await super().shutdown(sockets)
        finally:
            await self._models.stop()

    def _refuse_unsent(self, error: IngotError) -> None:
        """Refuse requests whose bodies are incomplete."""
        sending = [one for one in self.server_state.connections if isinstance(one, BoundedHttp) and one.is_sending]
        for one in sending:
            one.evict(error)
        if sending:
            log.warning("%d requests were refused whose bodies had not come", len(sending))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops the server, the second one ends it without waiting."""
        self.stopped = True
        super().handle_exit(sig, frame)
        if self._loop is None or self._loop.is_closed():
            return
        if self.force_exit:
            self._loop.call_soon_threadsafe(self._loop.call_later, FORCED_EXIT_S, self.leave)
        else:
            self._loop.call_soon_threadsafe(self._log_stopping)

    def _log_stopping(self) -> None:
        self._stopping_at = time.monotonic()
        if self.show is None:
            log.warning("%s", self._describe_stopping())

    def _is_hurried(self) -> bool:
        """Whether a second signal came. Shows what is waited for meanwhile."""
        if self.show is not None and self.stopped:
            self.show(self._describe_stopping())
        return self.force_exit

    def _describe_stopping(self) -> str:
        live, waited_s = self.shared_state.live, time.monotonic() - self._stopping_at
        count = f"{len(live)} request{'' if len(live) == 1 else 's'} running"
        left = max(0, math.ceil(self.shared_state.settings.drain_s - waited_s))
        waiting = f"{count}, waiting up to {left} s; press Ctrl-C again to stop now" if live else "no requests running"
        return f"stopping: {waiting}"

    def reload_soon(self, number: int, frame: FrameType | None) -> None:
        """SIGHUP: read the settings again, or stop where the terminal was closed."""
        if self._terminal.is_gone:
            self.handle_exit(signal.SIGTERM, frame)
            return
        assert self._settings_again is not None
        asyncio.get_running_loop().call_soon_threadsafe(reload_settings, self.shared_state, self._settings_again)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals only stop the server, so that the caller can close the engine; SIGHUP reads the settings again."""
        handlers: dict[int, Callable[[int, FrameType | None], None]] = dict.fromkeys(
            (signal.SIGTERM, *signals_not_ignored(signal.SIGINT)), self.handle_exit
        )
        if self._settings_again is not None:
            handlers[signal.SIGHUP] = self.reload_soon
        try:
            before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        except ValueError:  # not the main thread: its owner stops it
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if signal.SIGINT in before and self.should_exit and self.leave is not _stay_in_process:
                signal.signal(signal.SIGINT, lambda number, frame: self.leave())  # threads may take a while to end


def _stay_in_process() -> None:
    """The default of `HttpServer.leave`: the caller owns the process."""


def handle_loop_exception(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Logs a lack of file descriptors rarely, as it recurs at each try."""
    error = context.get("exception")
    if isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES:
        no_file_notice.warn("cannot accept a connection: %s", error.strerror)
    else:
        loop.default_exception_handler(context)


def resolve_host(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise ConfigError(f"'{host}' is not an address of this machine: {error}", param="host") from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def is_loopback_address(address: str) -> bool:
    known = parse_address(address)
    return known is not None and known.is_loopback


def bind_socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    # asyncio disables Nagle's algorithm only where the protocol is named: otherwise a token takes 40 ms.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        made.listen(LISTEN_BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def why_port_is_refused(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"Port {port} on {host} is in use. Choose another with --port, or 0 for any free one."
        case errno.EACCES:
            return f"Port {port} needs rights that this user does not have. Choose one above 1023 with --port."
        case errno.EADDRNOTAVAIL:
            return f"{host} is not an address of this machine."
    return f"Cannot listen on {host}, port {port}: {error.strerror}"


KEY_SETTINGS: Final = frozenset({"api_key", "api_key_file", "admin_api_key"})
RELOADABLE_SETTINGS: Final = KEY_SETTINGS | {
    *("allowed_hosts", "cors_origins", "keepalive_s", "idle_event_s", "idle_body_s", "drain_s", "log_level"),
}
"""Settings that are read for each request, and so can change."""


def reload_settings(shared_state: SharedState, settings_again: Callable[[], Settings]) -> None:
    """Apply what may change, and log what may not. Invalid settings change nothing."""
    shared_state.tenants.refresh()
    try:
        wanted, before = settings_again(), shared_state.settings
        changed = [
            field.name for field in fields(Settings) if getattr(wanted, field.name) != getattr(before, field.name)
        ]
        applied = [name for name in changed if name in RELOADABLE_SETTINGS]
        settings = replace(before, **{name: getattr(wanted, name) for name in applied})
        refuse_short_key(settings)
        tenants = Tenants(settings) if KEY_SETTINGS & set(applied) else shared_state.tenants
    except ConfigError as error:
        log.error("the settings stay as they were: %s", error.message)
        return
    shared_state.settings, shared_state.tenants = settings, tenants
    later = ", ".join(name for name in changed if name not in RELOADABLE_SETTINGS)
    restart = f"; after a restart: {later}" if later else ""
    log.warning("settings were read again; changed: %s%s", ", ".join(applied) or "nothing", restart)


UNAVAILABLE_RETRY_S: Final = 2
UNAVAILABLE_KEEP_ALIVE_S: Final = 5  # longer than UNAVAILABLE_RETRY_S
UNAVAILABLE_SHUTDOWN_S: Final = 1
UNAVAILABLE_BODY_S: Final = 2.0  # for a client to send the rest of a body, which is ignored


class UnavailableServer:
    """A server on a thread of its own, on shared sockets. Any thread may call it, one at a time."""

    def __init__(self, sockets: Sequence[socket.socket], settings: Settings) -> None:
        self._sockets, self._settings = sockets, settings
        self._reason = ""
        self._running: tuple[uvicorn.Server, threading.Thread] | None = None

    def open(self, reason: str) -> None:
        """Answer from now on, with this reason."""
        self._reason = reason
        if self._running is not None:
            return
        app = EdgeMiddleware(self._answer, Counter())
        config = server_config(
            app, self._settings, keep_alive_s=UNAVAILABLE_KEEP_ALIVE_S, shutdown_s=UNAVAILABLE_SHUTDOWN_S
        )
        server = uvicorn.Server(config)
        own = [one.dup() for one in self._sockets]
        thread = threading.Thread(target=server.run, args=(own,), name="ingot-unavailable", daemon=True)
        thread.start()
        self._running = server, thread

    def close(self) -> None:
        """Leave the sockets to the other server; answers in progress are finished."""
        if self._running is not None:
            server, thread = self._running
            server.should_exit = True
            thread.join()
            self._running = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The client's next request should reach the other server.
        reply_of(scope).headers.append(("connection", "close"))
        with anyio.move_on_after(UNAVAILABLE_BODY_S):
            while (await receive()).get("more_body"):
                pass
        if scope["path"].startswith("/health"):
            alive = scope["path"] == "/health/live"
            await JsonResponse(HealthBody(alive, self._reason), 200 if alive else 503)(scope, receive, send)
            return
        raise Unavailable(f"The model is not available now: {self._reason}.", retry_after=UNAVAILABLE_RETRY_S)


def inherited_sockets(descriptors: str) -> list[socket.socket]:
    """Listening sockets of the parent process, by their file descriptors."""
    return [socket.socket(fileno=int(each)) for each in descriptors.split(",")]
