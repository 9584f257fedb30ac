"""KV events for routers, in vLLM's format: which blocks of tokens were added to the prefix cache, and which removed.

When the cache has changed, its blocks are listed anew between two steps, and the differences to what was published
before are published. So subscribers are right by construction, and the cache knows nothing of events. The listing is
bounded to a share of the engine's time.

Messages are arrays [time, events, rank], each event a map with its type, on ZeroMQ sockets. PUB sends [topic, number,
batch]. A subscriber that missed some asks ROUTER by the number of the first, and gets those that are still stored,
[number, batch] each, and -1 at the end. The publisher's own thread owns both sockets.

A block is a fixed number of consecutive tokens, identified by a hash of all tokens up to its end and of their owner. It
is listed if computing can resume behind it: to the end of each path of the index where sequences can resume after any
token, otherwise up to the path's last resume point. A key that is not a token, such as an image's digest, ends a path
here, as a router could not look it up.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import groupby, takewhile
from typing import Any, Final, Literal, Protocol

import msgspec

from ingot.cache.pages import PAGE
from ingot.cache.prefix_index import PrefixIndex, ResumeNeeds, can_resume_at_end, node_holds
from ingot.cache.prefix_tree import CacheOwner, PrefixNode
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


BlockMedium = Literal["GPU", "STORAGE"]
"""Where a block is, in the words of KV events: in memory, or only on disk."""
TOKEN_LIMIT = 1 << 32
"""Keys of the index from here on, and negative ones, are not tokens."""


@dataclass(frozen=True, slots=True)
class PrefixBlock:
    id: int
    parent: int | None  # the block before it
    tokens: tuple[int, ...]
    owner: CacheOwner
    medium: BlockMedium = "GPU"


@dataclass(frozen=True, slots=True)
class _BlockChain:
    """The blocks that end in a node, the id and the end of the last one up to there, and the tokens behind it; None
    behind a key that is not a token."""

    blocks: tuple[PrefixBlock, ...] = ()
    last: int | None = None
    end: int = 0
    partial: tuple[int, ...] | None = ()


EMPTY_CHAIN = _BlockChain()
_ChainCache = dict[int, tuple[tuple[int, ...], _BlockChain, _BlockChain]]
"""By node: its tokens, its parent's chain, and its own."""


@dataclass(slots=True)
class _VisitedNode:
    node: PrefixNode
    parent: int  # the parent's index among all that were visited, or -1
    chain: _BlockChain
    resident: int = 0  # the last resume point on a path through it, from memory
    reached: int = 0  # and with what is on disk


class BlockListing:
    """Hashes are cached from one listing to the next, so that only new ones are computed."""

    def __init__(self, needs: ResumeNeeds, size: int = PAGE) -> None:
        self.size = size
        self._needs = needs
        self._chains: _ChainCache = {}

    def take(self, index: PrefixIndex) -> dict[int, PrefixBlock]:
        """All blocks by their ids, each behind its parent."""
        earlier, self._chains = self._chains, {}
        found: dict[int, PrefixBlock] = {}
        for tenant in index.tenants:
            for owner in index.owners(tenant):
                for visited in self._visit(index, owner, earlier):
                    found.update((block.id, block) for block in self._reusable_blocks(visited))
        return found

    def _visit(self, index: PrefixIndex, owner: CacheOwner, earlier: _ChainCache) -> list[_VisitedNode]:
        """The nodes of an owner, each behind its parent."""
        visited: list[_VisitedNode] = []
        path: list[PrefixNode] = []
        pending = [(node, 0, -1) for node in index.first(owner)]
        while pending:
            node, depth, parent = pending.pop()
            if not node_holds(node, "disk"):
                continue
            path[depth:] = [node]
            chain = self._chain(node, visited[parent].chain if parent >= 0 else EMPTY_CHAIN, owner, earlier)
            each = _VisitedNode(node, parent, chain)
            if can_resume_at_end(path, self._needs, "disk"):
                each.reached = node.end
                if node.record is not None and can_resume_at_end(path, self._needs, "ram"):
                    each.resident = node.end
            pending.extend((child, depth + 1, len(visited)) for child in node.children.values())
            visited.append(each)
        for each in reversed(visited):
            if each.parent >= 0:
                above = visited[each.parent]
                above.resident = max(above.resident, each.resident)
                above.reached = max(above.reached, each.reached)
        return visited

    def _chain(self, node: PrefixNode, parent: _BlockChain, owner: CacheOwner, earlier: _ChainCache) -> _BlockChain:
        tokens, since, chain = earlier.get(id(node), ((), parent, parent))
        if tokens is not node.tokens or (since.last, since.partial) != (parent.last, parent.partial):
            chain = self._make_chain(node.tokens, parent, owner)
        self._chains[id(node)] = node.tokens, parent, chain
        return chain

    def _make_chain(self, added: tuple[int, ...], parent: _BlockChain, owner: CacheOwner) -> _BlockChain:
        if parent.partial is None:
            return replace(parent, blocks=())
        plain = added
        if min(added) < 0 or max(added) >= TOKEN_LIMIT:
            plain = tuple(takewhile(lambda token: 0 <= token < TOKEN_LIMIT, added))
        tokens, blocks, last = parent.partial + plain, [], parent.last
        whole = len(tokens) - len(tokens) % self.size
        for begin in range(0, whole, self.size):
            part = tokens[begin : begin + self.size]
            blocks.append(PrefixBlock(block_hash(last, part, owner), last, part, owner))
            last = blocks[-1].id
        return _BlockChain(
            tuple(blocks), last, parent.end + whole, tokens[whole:] if len(plain) == len(added) else None
        )

    def _reusable_blocks(self, each: _VisitedNode) -> Iterator[PrefixBlock]:
        blocks = each.chain.blocks
        begin = each.chain.end - self.size * len(blocks)
        for end, block in zip(range(begin + self.size, each.chain.end + 1, self.size), blocks, strict=True):
            if end <= each.resident:
                yield block
            elif end <= each.reached:
                yield replace(block, medium="STORAGE")


def block_hash(parent: int | None, tokens: tuple[int, ...], owner: CacheOwner) -> int:
    """The same on every server for the same tokens of the same owner."""
    hashed = blake2b(digest_size=8)
    if parent is None:
        hashed.update(repr(tuple(owner)).encode())
    else:
        hashed.update(parent.to_bytes(8, "big"))
    hashed.update(array("Q", tokens).tobytes())
    return int.from_bytes(hashed.digest(), "big")
