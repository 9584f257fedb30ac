"""What clients are answered at a port that is taken while no model is there to serve them: to come again soon."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Final

import anyio
import uvicorn
from starlette.types import Receive, Scope, Send

from ingot.config import Settings
from ingot.errors import Unavailable
from ingot.http.edge import Edge, Json, answer_of
from ingot.http.socket.config import server_config
from ingot.protocol.ingot_api.health import HealthBody

RETRY_S: Final = 2
KEEP_ALIVE_S: Final = 5  # longer than clients are told to wait
LAST_WORDS_S: Final = 1
BODY_S: Final = 2.0  # what a client has to send the rest of a body that nobody reads


class ClosedDoor:
    """A server on a thread of its own, on sockets that others listen at, too. Any thread may call it, one at a time."""

    def __init__(self, sockets: Sequence[socket.socket], settings: Settings) -> None:
        self._sockets, self._settings = sockets, settings
        self._reason = ""
        self._running: tuple[uvicorn.Server, threading.Thread] | None = None

    def open(self, reason: str) -> None:
        """Answer from now on, with this reason."""
        self._reason = reason
        if self._running is not None:
            return
        app = Edge(self._answer, Counter())
        config = server_config(app, self._settings, keep_alive_s=KEEP_ALIVE_S, last_words_s=LAST_WORDS_S)
        server = uvicorn.Server(config)
        own = [one.dup() for one in self._sockets]
        thread = threading.Thread(target=server.run, args=(own,), name="ingot-closed-door", daemon=True)
        thread.start()
        self._running = server, thread

    def close(self) -> None:
        """Leave the sockets to who else listens at them; answers that were begun are finished."""
        if self._running is not None:
            server, thread = self._running
            server.should_exit = True
            thread.join()
            self._running = None

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The next request of the same client is to find who serves then.
        answer_of(scope).headers.append(("connection", "close"))
        with anyio.move_on_after(BODY_S):
            while (await receive()).get("more_body"):
                pass
        if scope["path"].startswith("/health"):
            alive = scope["path"] == "/health/live"
            await Json(HealthBody(alive, self._reason), 200 if alive else 503)(scope, receive, send)
            return
        raise Unavailable(f"The model is not there just now: {self._reason}.", retry_after=RETRY_S)


def inherited(descriptors: str) -> list[socket.socket]:
    """Sockets that the parent process listens at and has handed down, by the numbers of their files."""
    return [socket.socket(fileno=int(each)) for each in descriptors.split(",")]
