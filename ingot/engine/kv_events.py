"""Events on ZeroMQ sockets, as vLLM's subscribers expect them.

PUB sends [topic, number, batch]. Who missed some asks ROUTER, by the number of the first, and gets what is left of
them, [number, batch] each, and -1 at the end. A thread of its own owns both sockets.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ingot.engine.kv_events_events import Batch, BlockEvent
from ingot.errors import ConfigError
from ingot.extras import require

log = logging.getLogger("ingot.engine")

QUEUED: Final = 1_000
"""Batches that wait to be sent; one more is told later."""
REMEMBERED: Final = 10_000
"""Batches that can be asked for again."""
UNREAD: Final = 100_000
"""Messages that a subscriber may leave unread before it misses some."""
LONGEST: Final = 4096
"""Bytes that a peer may send in one piece: a number, or a topic that it subscribes to. Anybody may connect."""
POLL_MS: Final = 50
END: Final = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class Address:
    endpoint: str
    replay: str | None = None
    topic: str = ""


class Publisher:
    def __init__(self, address: Address) -> None:
        """Raises ConfigError where the sockets cannot be opened."""
        require("events", "kv_events", param="kv_events")
        import zmq

        self._zmq = zmq
        self._context = self._zmq.Context()
        self._batches: queue.Queue[Batch | None] = queue.Queue(QUEUED)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=REMEMBERED)
        self._topic = address.topic.encode()
        self._pub = self._bound(self._zmq.PUB, address.endpoint)
        self._pub.set_hwm(UNREAD)
        self._router = None if address.replay is None else self._bound(self._zmq.ROUTER, address.replay)
        self.endpoint: str = self._pub.last_endpoint.decode()
        self.replay: str | None = None if self._router is None else self._router.last_endpoint.decode()
        self._thread = threading.Thread(target=self._run, name="ingot-kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = LONGEST
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"kv_events cannot be told at {endpoint}: {error.strerror}", param="kv_events") from error
        return socket

    def tell(self, events: list[BlockEvent]) -> bool:
        """From any thread; never waits."""
        try:
            self._batches.put_nowait(Batch(time.time(), events))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Once what was told is sent."""
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        encoder, number = msgspec.msgpack.Encoder(), 0
        try:
            while True:
                try:
                    batch = self._batches.get(timeout=POLL_MS / 1000)
                except queue.Empty:
                    self._replay()
                    continue
                if batch is None:
                    return
                message = (number.to_bytes(8, "big"), encoder.encode(batch))
                number += 1
                self._sent.append(message)
                self._pub.send_multipart((self._topic, *message))
                self._replay()
        except Exception:
            log.exception("events of what is kept are not told any more")
        finally:
            self._context.destroy(linger=1000)

    def _replay(self) -> None:
        """Answer who asks for what was sent before."""
        while self._router is not None and self._router.poll(0):
            who, *_, asked = self._router.recv_multipart()
            if len(asked) != 8:
                continue
            for number, batch in self._sent:
                if number >= asked:
                    self._router.send_multipart((who, b"", number, batch))
            self._router.send_multipart((who, b"", END, b""))
