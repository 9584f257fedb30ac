"""KV events for routers, in vLLM's format: which blocks of tokens were added to the prefix cache, and which removed.

When the cache has changed, its blocks are listed anew between two steps, and the differences to what was published
before are published. So subscribers are right by construction, and the cache knows nothing of events. The listing is
bounded to a share of the engine's time.

Messages are arrays [time, events, rank], each event a map with its type, on ZeroMQ sockets. PUB sends [topic, number,
batch]. A subscriber that missed some asks ROUTER by the number of the first, and gets those that are still stored,
[number, batch] each, and -1 at the end. The publisher's own thread owns both sockets.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Final, Protocol

import msgspec

from ingot.cache.block_listing import BlockListing, BlockMedium, PrefixBlock
from ingot.cache.prefix_index import PrefixIndex, ResumeNeeds
from ingot.config import Settings
from ingot.errors import ConfigError
from ingot.extras import require_extra

LISTING_PAUSE_S = 0.1
"""At least, between two listings."""
LISTING_SHARE = 0.01
"""Of the engine's time, that listing may take."""


class KVEventSink(Protocol):
    def publish(self, events: list[BlockEvent]) -> bool:
        """False where the events cannot be taken now: they are published later."""

    def close(self) -> None: ...


class KVEventTracker:
    def __init__(self, sink: KVEventSink, clock: Callable[[], float] = time.monotonic) -> None:
        self._sink, self._clock = sink, clock
        self._listing: BlockListing | None = None
        self._index: PrefixIndex | None = None
        self._published: dict[int, PrefixBlock] = {}
        self._changes, self._next = -1, 0.0

    def track(self, index: PrefixIndex, needs: ResumeNeeds) -> None:
        """Follow this index from now on; the blocks of another are gone."""
        self._index, self._listing, self._changes = index, BlockListing(needs), -1

    def publish_changes(self, *, now: bool = False) -> None:
        """Publish what changed, unless that was done just before; `now` does so all the same."""
        began = self._clock()
        if self._index is None or self._listing is None or self._index.changes == self._changes:
            return
        if not now and began < self._next:
            return
        changes, found = self._index.changes, self._listing.take(self._index)
        events = block_differences(self._published, found)
        if not events or self._sink.publish(events):
            self._published, self._changes = found, changes
        took = self._clock() - began
        self._next = began + max(LISTING_PAUSE_S, took / LISTING_SHARE)

    def close(self) -> None:
        """Nothing is cached any more."""
        if self._published:
            self._sink.publish([AllBlocksCleared()])
        self._published = {}
        self._sink.close()


MOST_EVENT_BLOCKS: Final = 512
"""In one event."""


class BlockStored(msgspec.Struct, tag=True, tag_field="type", omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    medium: BlockMedium
    lora_name: str | None = None
    extra_keys: list[list[str] | None] | None = None


class BlockRemoved(msgspec.Struct, tag=True, tag_field="type"):
    block_hashes: list[int]
    medium: BlockMedium


class AllBlocksCleared(msgspec.Struct, tag=True, tag_field="type"):
    pass


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockEvent]
    data_parallel_rank: int = 0


def block_differences(before: Mapping[int, PrefixBlock], after: Mapping[int, PrefixBlock]) -> list[BlockEvent]:
    """The events between two listings. Removals come first, so that subscribers never count too many blocks."""
    removed = [block for block in before.values() if after.get(block.id) != block]
    stored = [block for block in after.values() if before.get(block.id) != block]
    return [*_removed_events(removed), *_stored_events(stored)]


def _removed_events(blocks: list[PrefixBlock]) -> Iterator[BlockRemoved]:
    """Blocks before their parents."""
    for medium, group in groupby(reversed(blocks), key=lambda block: block.medium):
        ids = [block.id for block in group]
        for begin in range(0, len(ids), MOST_EVENT_BLOCKS):
            yield BlockRemoved(ids[begin : begin + MOST_EVENT_BLOCKS], medium)


def _stored_events(blocks: Iterable[PrefixBlock]) -> Iterator[BlockStored]:
    """One event for consecutive blocks."""
    run: list[PrefixBlock] = []
    for block in blocks:
        if run and (block.parent != run[-1].id or block.medium != run[-1].medium or len(run) == MOST_EVENT_BLOCKS):
            yield _stored_event(run)
            run = []
        run.append(block)
    if run:
        yield _stored_event(run)


def _stored_event(run: list[PrefixBlock]) -> BlockStored:
    words = [word for word in run[0].owner.words if word]
    return BlockStored(
        [block.id for block in run],
        run[0].parent,
        [token for block in run for token in block.tokens],
        len(run[0].tokens),
        medium=run[0].medium,
        extra_keys=[words] * len(run) if words else None,
    )


log = logging.getLogger("ingot.engine")

QUEUED_BATCHES: Final = 1_000
"""Batches that may wait to be sent."""
REPLAYED_BATCHES: Final = 10_000
"""Batches that are stored for replay."""
UNREAD_MESSAGES: Final = 100_000
"""Messages that a subscriber may leave unread before some are dropped."""
LONGEST_MESSAGE: Final = 4096
"""Bytes of a peer's message: a number, or a topic. Anybody may connect."""
POLL_MS: Final = 50
END_OF_REPLAY: Final = (-1).to_bytes(8, "big", signed=True)


@dataclass(frozen=True, slots=True)
class KVEventsAddress:
    endpoint: str
    replay: str | None = None
    topic: str = ""


class KVEventPublisher:
    def __init__(self, address: KVEventsAddress) -> None:
        """Raises ConfigError where the sockets cannot be opened."""
        require_extra("events", "kv_events", param="kv_events")
        import zmq

        self._zmq = zmq
        self._context = self._zmq.Context()
        self._batches: queue.Queue[KVEventBatch | None] = queue.Queue(QUEUED_BATCHES)
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=REPLAYED_BATCHES)
        self._topic, self._next_number, self._encoder = address.topic.encode(), 0, msgspec.msgpack.Encoder()
        self._pub = self._bound(self._zmq.PUB, address.endpoint)
        self._pub.set_hwm(UNREAD_MESSAGES)
        self._router = None if address.replay is None else self._bound(self._zmq.ROUTER, address.replay)
        self.endpoint: str = self._pub.last_endpoint.decode()
        self.replay: str | None = None if self._router is None else self._router.last_endpoint.decode()
        self._thread = threading.Thread(target=self._run, name="ingot-kv-events", daemon=True)
        self._thread.start()

    def _bound(self, kind: int, endpoint: str) -> Any:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.maxmsgsize = LONGEST_MESSAGE
        try:
            socket.bind(endpoint)
        except self._zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(
                f"kv_events cannot be published at {endpoint}: {error.strerror}", param="kv_events"
            ) from error
        return socket

    def publish(self, events: list[BlockEvent]) -> bool:
        """From any thread; never waits."""
        try:
            self._batches.put_nowait(KVEventBatch(time.time(), events))
        except queue.Full:
            return False
        return True

    def close(self) -> None:
        """Once everything is sent."""
        self._batches.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while True:
                try:
                    batch = self._batches.get(timeout=POLL_MS / 1000)
                except queue.Empty:
                    self._replay()
                    continue
                if batch is None:
                    return
                self._send(batch)
                if self._batches.empty():  # what was published before a client asks for a replay is in it
                    self._replay()
        except Exception:
            log.exception("KV events are no longer published")
        finally:
            self._context.destroy(linger=1000)

    def _send(self, batch: KVEventBatch) -> None:
        message = (self._next_number.to_bytes(8, "big"), self._encoder.encode(batch))
        self._next_number += 1
        self._sent.append(message)
        self._pub.send_multipart((self._topic, *message))

    def _replay(self) -> None:
        """Answer requests for earlier batches."""
        while self._router is not None and self._router.poll(0):
            peer, *_, first_number = self._router.recv_multipart()
            if len(first_number) != 8:
                continue
            for number, batch in self._sent:
                if number >= first_number:
                    self._router.send_multipart((peer, b"", number, batch))
            self._router.send_multipart((peer, b"", END_OF_REPLAY, b""))


def open_kv_events(settings: Settings) -> KVEventPublisher | None:
    """Raises ConfigError where the sockets cannot be opened."""
    if settings.kv_events is None:
        return None
    address = KVEventsAddress(settings.kv_events, settings.kv_events_replay, settings.kv_events_topic or "")
    return KVEventPublisher(address)
