"""From an engine and settings to a listening server, and back to silence when a signal comes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol

import uvicorn
from starlette.applications import Starlette

from ingot.config import Settings
from ingot.errors import ConfigError, IngotError
from ingot.heap import find_trim, trim_heap
from ingot.http.guard import as_address, shutting_down
from ingot.http.http11 import BoundedHttp
from ingot.http.reload import reload
from ingot.http.shared_state import Hall, HasHall
from ingot.http.socket.config import server_config
from ingot.http.tenants import refuse_short_key
from ingot.observe.notices import Notice
from ingot.process import Terminal, heeded

if TYPE_CHECKING:
    from ingot.engine.engine import Engine

HURRIED_S: Final = 0.3  # what requests get for that once it is to stop at once
LAST_WORDS_S: Final = 2.0  # what requests get to say why they did not finish, once the server is told to stop
IDLE_CONNECTION_S: Final = 75
BACKLOG: Final = 1024
OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("ingot.http")


@dataclass(frozen=True, slots=True)
class Listener:
    """Sockets that listen, all on one port."""

    sockets: tuple[socket.socket, ...]
    host: str
    port: int

    @property
    def url(self) -> str:
        address = as_address(self.host)
        return (
            f"http://[{self.host}]:{self.port}"
            if address and address.version == 6
            else f"http://{self.host}:{self.port}"
        )

    def close(self) -> None:
        for one in self.sockets:
            one.close()


def listen(settings: Settings) -> Listener:
    """Take the port. Raises ConfigError where it cannot be had, or where it would be open to all without a key, or with
    one that is soon guessed."""
    refuse_short_key(settings)
    addresses = resolve(settings.host, settings.port)
    if not settings.keyed and not all(is_loopback(address) for _, address in addresses):
        raise ConfigError(
            f"Listening on {settings.host} would let anyone on the network in. Set --api-key, or listen on 127.0.0.1.",
            param="api_key",
        )
    sockets: list[socket.socket] = []
    port = settings.port
    try:
        for family, address in addresses:
            sockets.append(bound(family, address, port))
            port = sockets[0].getsockname()[1]
    except OSError as error:
        for one in sockets:
            one.close()
        raise ConfigError(refusal(settings.host, port, error), param="port") from error
    return Listener(tuple(sockets), settings.host, port)


def serve(
    engine: Engine, settings: Settings, on_ready: Callable[[str], None], *, listener: Listener | None = None
) -> None:
    """Serve until SIGINT (where it is not ignored) or SIGTERM, then let what runs finish for a few seconds, and return.

    `on_ready` gets the URL once connections are taken. The engine stays the caller's to close. `listener` is the
    port where it was taken beforehand.
    """
    make_server(engine, settings, on_ready, listener or listen(settings)).run()


def make_server(
    engine: Engine,
    settings: Settings,
    on_ready: Callable[[str], None],
    listener: Listener,
    settings_again: Callable[[], Settings] | None = None,
) -> Server:
    """`settings_again` reads them anew, for SIGHUP."""
    from ingot.http.endpoints.table import build_app  # which a server whose models come later does not wait for

    return server_of(build_app(engine, settings), settings, on_ready, listener, settings_again)


def server_of(
    app: Starlette,
    settings: Settings,
    on_ready: Callable[[str], None],
    listener: Listener,
    settings_again: Callable[[], Settings] | None = None,
) -> Server:
    config = server_config(app, settings, keep_alive_s=IDLE_CONNECTION_S, last_words_s=int(LAST_WORDS_S))
    return Server(config, listener, app.state.service, on_ready, settings_again)


class Started(HasHall, Protocol):
    """What the endpoints of an application share."""

    async def start(self) -> None: ...

    def ready(self) -> None:
        """Connections are taken."""

    async def stop(self) -> None: ...


class Server(uvicorn.Server):
    """uvicorn's, with four changes: it says when it is ready, it answers probes while requests finish, it ends what
    outlasts that with an error that the client can read, and a signal makes it return instead of ending the process."""

    def __init__(
        self,
        config: uvicorn.Config,
        listener: Listener,
        service: Started,
        on_ready: Callable[[str], None],
        settings_again: Callable[[], Settings] | None = None,
    ) -> None:
        super().__init__(config)
        self._settings_again = settings_again
        self.listener, self._service, self._on_ready = listener, service, on_ready
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._terminal = Terminal()
        self.given_up: IngotError | None = None
        self.stopped = False  # by a signal
        self.leave: Callable[[], object] = _nowhere_to_go
        """Ends the process at once: what a second interrupt asks for, whatever is under way."""

    @property
    def hall(self) -> Hall:
        return self._service.hall

    def give_up(self, error: IngotError) -> None:
        """End all requests with `error`, and return soon. Any thread may call it: the engine may hang by then."""
        self.given_up = error
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._abandon, error)

    def _abandon(self, error: IngotError) -> None:
        self.hall.live.draining = self.should_exit = True
        self.hall.live.refusal = error
        self.hall.live.abandon_all(error)

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            super().run(sockets or list(self.listener.sockets))
        finally:
            self.listener.close()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await self._service.start()
        await super().startup(sockets)
        for one in self.listener.sockets:
            one.listen(BACKLOG)
        asyncio.get_running_loop().set_exception_handler(LoopTrouble())
        if (trim := find_trim()) is not None:
            # What loading left behind goes before anybody looks at what the server takes.
            await asyncio.to_thread(trim)
            self._tasks.append(asyncio.create_task(trim_heap(trim)))
        self._on_ready(self.listener.url)
        self._service.ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        live = self.hall.live
        await live.drain(self.hall.settings.drain_s, lambda: self.force_exit)
        live.abandon_all(shutting_down())
        self._refuse_unsent(live.refusal or shutting_down())
        try:
            await super().shutdown(sockets)
        finally:
            await self._service.stop()

    def _refuse_unsent(self, error: IngotError) -> None:
        """Nobody waits any more for the rest of what clients have not sent."""
        sending = [one for one in self.server_state.connections if isinstance(one, BoundedHttp) and one.is_sending]
        for one in sending:
            one.give_way(error)
        if sending:
            log.warning("%d requests were refused whose bodies had not come", len(sending))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal asks the server to stop, or not to wait any longer for what it has to finish."""
        self.stopped = True
        super().handle_exit(sig, frame)
        if self._loop is None or self._loop.is_closed():
            return
        if self.force_exit:
            self._loop.call_soon_threadsafe(self._loop.call_later, HURRIED_S, self.leave)
        else:
            self._loop.call_soon_threadsafe(self._say_stopping)

    def _say_stopping(self) -> None:
        live, limit_s = self.hall.live, self.hall.settings.drain_s
        count = f"{len(live)} request{'' if len(live) == 1 else 's'}"
        finishing = f": {count} may take up to {limit_s:g} s to finish" if live else ""
        log.warning("stopping%s; one more Ctrl-C ends at once", finishing)

    def reload_soon(self, number: int, frame: FrameType | None) -> None:
        """A signal asks for the settings to be read again, or tells that the terminal was closed."""
        if self._terminal.is_gone:
            self.handle_exit(signal.SIGTERM, frame)
            return
        assert self._settings_again is not None
        asyncio.get_running_loop().call_soon_threadsafe(reload, self._service, self._settings_again)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals stop the server and nothing more, so that the caller can close the engine; SIGHUP lets it read its
        settings again."""
        handlers: dict[int, Callable[[int, FrameType | None], None]] = dict.fromkeys(
            (signal.SIGTERM, *heeded(signal.SIGINT)), self.handle_exit
        )
        if self._settings_again is not None:
            handlers[signal.SIGHUP] = self.reload_soon
        try:
            before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        except ValueError:  # not the main thread: whoever started this one stops it
            before = {}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if signal.SIGINT in before and self.should_exit and self.leave is not _nowhere_to_go:
                signal.signal(signal.SIGINT, lambda number, frame: self.leave())  # threads may take a while to end


def _nowhere_to_go() -> None:
    """The process is somebody else's."""


class LoopTrouble:
    """What the event loop does with what nobody caught. That there is no file for a connection comes up at each try."""

    def __init__(self) -> None:
        self._no_file = Notice(log)

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in OUT_OF_RESOURCES:
            self._no_file.warn("cannot take a connection: %s", error.strerror)
        else:
            loop.default_exception_handler(context)


def resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise ConfigError(f"'{host}' is no address of this machine: {error}", param="host") from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def is_loopback(address: str) -> bool:
    known = as_address(address)
    return known is not None and known.is_loopback


def bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    # The protocol is named because asyncio turns off Nagle's delay only where it is: 40 ms a token otherwise.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind((address, port))
        made.listen(BACKLOG)
    except OSError:
        made.close()
        raise
    return made


def refusal(host: str, port: int, error: OSError) -> str:
    match error.errno:
        case errno.EADDRINUSE:
            return f"Port {port} on {host} is in use. Choose another with --port, or 0 for any free one."
        case errno.EACCES:
            return f"Port {port} needs rights that this user does not have. Choose one above 1023 with --port."
        case errno.EADDRNOTAVAIL:
            return f"{host} is no address of this machine."
    return f"Cannot listen on {host}, port {port}: {error.strerror}"
