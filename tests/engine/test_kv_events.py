"""With a subscriber's own sockets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.cache.pages import PAGE
from ingot.cache.prefix_index import ResumeNeeds
from ingot.cache.prefix_tree import CacheOwner
from ingot.engine.kv_events import (
    END_OF_REPLAY,
    LISTING_PAUSE_S,
    AllBlocksCleared,
    BlockEvent,
    BlockListing,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    KVEventPublisher,
    KVEventsAddress,
    KVEventTracker,
    PrefixBlock,
    block_differences,
)
from ingot.engine.request import Ended, Request, Sampling
from ingot.errors import ConfigError
from ingot.kernels.device import Device
from tests import engines
from tests.cache.paper import APPEND, HYBRID, WINDOW, index, store
from tests.engines import GPU
from tests.waiting import WAIT_S

WORDS = list(range(200))


class Teller:
    def __init__(self) -> None:
        self.listener, self.batches, self.full, self.closed = EventsListener(), 0, False, False

    def publish(self, events: list[BlockEvent]) -> bool:
        if self.full:
            return False
        self.batches += 1
        if events == [AllBlocksCleared()]:
            self.listener.known.clear()
        self.listener.follow(events)
        return True

    def close(self) -> None:
        self.closed = True


def test_what_is_kept_is_told_once_and_what_changes_after_a_pause() -> None:
    kv_event_sink, prefix_index, now = Teller(), index(APPEND), [0.0]
    news = KVEventTracker(kv_event_sink, lambda: now[0])
    news.track(prefix_index, APPEND)
    store(prefix_index, WORDS, APPEND)
    news.publish_changes()
    news.publish_changes()
    assert kv_event_sink.batches == 1 and len(kv_event_sink.listener.known) == 3
    store(prefix_index, [5, *WORDS], APPEND)
    news.publish_changes()
    assert kv_event_sink.batches == 1
    now[0] += LISTING_PAUSE_S
    news.publish_changes()
    assert kv_event_sink.batches == 2 and len(kv_event_sink.listener.known) == 6


def test_an_idle_engine_tells_at_once() -> None:
    kv_event_sink, prefix_index = Teller(), index(APPEND)
    news = KVEventTracker(kv_event_sink, lambda: 0.0)
    news.track(prefix_index, APPEND)
    for words in (WORDS, [5, *WORDS]):
        store(prefix_index, words, APPEND)
        news.publish_changes(now=True)
    assert len(kv_event_sink.listener.known) == 6


def test_what_nobody_could_take_is_told_later() -> None:
    kv_event_sink, prefix_index = Teller(), index(APPEND)
    news = KVEventTracker(kv_event_sink, lambda: 0.0)
    news.track(prefix_index, APPEND)
    store(prefix_index, WORDS, APPEND)
    kv_event_sink.full = True
    news.publish_changes(now=True)
    kv_event_sink.full = False
    news.publish_changes(now=True)
    assert set(kv_event_sink.listener.known) == set(BlockListing(APPEND).take(prefix_index))


def test_new_books_and_the_end_take_back_what_was_told() -> None:
    kv_event_sink, prefix_index = Teller(), index(APPEND)
    news = KVEventTracker(kv_event_sink, lambda: 0.0)
    news.track(prefix_index, APPEND)
    store(prefix_index, WORDS, APPEND)
    news.publish_changes(now=True)
    news.track(index(APPEND), APPEND)
    news.publish_changes(now=True)
    assert not kv_event_sink.listener.known
    news.track(prefix_index, APPEND)
    news.publish_changes(now=True)
    news.close()
    assert not kv_event_sink.listener.known and kv_event_sink.closed


@pytest.mark.parametrize("kind", ["llama", "window", "hybrid"])
@pytest.mark.parametrize("device", [None, GPU], ids=["here", "gpu"])
def test_an_engine_tells_what_it_could_take_over_and_takes_it_over(kind: str, device: Device | None) -> None:
    kv_event_sink = Teller()
    engine = engines.start(kind, cache_bytes=1 << 26, device=device, kv_event_sink=kv_event_sink)
    try:
        prompt = tuple(number % 90 for number in range(300))
        request = Request("first", (prompt,), max_tokens=4, sampling=Sampling(temperature=0.0))
        engines.answer(engine, request)
        engine.check()  # once it rests
        known = len(kv_event_sink.listener.known) * PAGE
        assert 256 <= known <= 304
        ended = engines.answer(engine, replace(request, id="second"))[-1]
        assert isinstance(ended, Ended) and ended.usage.cached_tokens >= 256
    finally:
        engine.close()
    assert kv_event_sink.closed and not kv_event_sink.listener.known


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class EventsListener:
    """Follows events as a router does: a block is known by where it is, and must go on from one that is known."""

    def __init__(self) -> None:
        self.known: dict[int, str] = {}

    def follow(self, events: list[BlockEvent]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                for number, (parent, id) in enumerate(pairwise([event.parent_block_hash, *event.block_hashes])):
                    assert parent is None or parent in self.known, "it goes on from what nobody told of"
                    assert id is not None
                    part = event.token_ids[event.block_size * number : event.block_size * (number + 1)]
                    assert len(part) == event.block_size
                    self.known[id] = event.medium
            elif isinstance(event, BlockRemoved):
                for id in event.block_hashes:
                    assert self.known.pop(id) == event.medium


@pytest.mark.parametrize("needs", [APPEND, WINDOW, HYBRID])
@given(course=st.lists(st.tuples(TOKENS, st.integers(0, 900)), max_size=8))
def test_who_follows_the_events_knows_what_is_kept(needs: ResumeNeeds, course: list[tuple[list[int], int]]) -> None:
    prefix_index, listing, listener = index(needs), BlockListing(needs, 2), EventsListener()
    batches: dict[int, PrefixBlock] = {}
    for tokens, most in course:
        store(prefix_index, tokens, needs)
        prefix_index.shrink(most)
        found = listing.take(prefix_index)
        listener.follow(block_differences(batches, found))
        batches = found
        assert listener.known == {block.id: block.medium for block in batches.values()}


def test_blocks_that_follow_one_another_are_one_event() -> None:
    blocks = [
        PrefixBlock(1, None, (7, 8), CacheOwner()),
        PrefixBlock(2, 1, (9, 9), CacheOwner()),
        PrefixBlock(3, None, (5, 5), CacheOwner("a", "salt")),
    ]
    events = block_differences({}, {block.id: block for block in blocks})
    assert [event.block_hashes for event in events if isinstance(event, BlockStored)] == [[1, 2], [3]]
    assert isinstance(events[0], BlockStored) and events[0].token_ids == [7, 8, 9, 9] and events[0].extra_keys is None
    assert isinstance(events[1], BlockStored) and events[1].extra_keys == [["a", "salt"]]


def test_a_block_that_moves_to_disk_is_removed_here_and_stored_there() -> None:
    here, there = PrefixBlock(1, None, (7, 8), CacheOwner()), PrefixBlock(1, None, (7, 8), CacheOwner(), "STORAGE")
    removed, stored = block_differences({1: here}, {1: there})
    assert isinstance(removed, BlockRemoved) and removed.medium == "GPU"
    assert isinstance(stored, BlockStored) and stored.medium == "STORAGE"


def test_a_batch_is_an_array_of_a_time_maps_with_a_type_and_a_rank() -> None:
    batch = KVEventBatch(12.5, block_differences({}, {1: PrefixBlock(1, None, (7, 8), CacheOwner())}))
    message = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    assert message[0] == 12.5 and message[2] == 0
    assert message[1] == [
        {
            "type": "BlockStored",
            "block_hashes": [1],
            "parent_block_hash": None,
            "token_ids": [7, 8],
            "block_size": 2,
            "medium": "GPU",
        }
    ]


zmq = pytest.importorskip("zmq")


@pytest.fixture
def publisher() -> Iterator[KVEventPublisher]:
    made = KVEventPublisher(KVEventsAddress("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@here@tiny"))
    yield made
    made.close()


def test_batches_come_numbered_under_their_topic(publisher: KVEventPublisher) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(b"kv@")
        while not subscriber.poll(20):  # until it is heard: what was told before is missed
            publisher.publish([AllBlocksCleared()])
        _, first, _ = subscriber.recv_multipart()
        publisher.publish([BlockRemoved([5], "GPU")])
        number, message = int.from_bytes(first, "big"), [{"type": "AllBlocksCleared"}]
        while message == [{"type": "AllBlocksCleared"}]:
            assert subscriber.poll(5000)
            topic, raw, batch = subscriber.recv_multipart()
            assert topic == b"kv@here@tiny" and int.from_bytes(raw, "big") == number + 1
            number, message = number + 1, msgspec.msgpack.decode(batch)[1]
        assert message == [{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}]


def test_what_was_missed_can_be_asked_for(publisher: KVEventPublisher) -> None:
    for id in range(3):
        publisher.publish([BlockRemoved([id], "GPU")])
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(publisher.replay)
        asking.send_multipart((b"", (1).to_bytes(8, "big")))
        got = []
        while True:
            assert asking.poll(5000)
            _, number, batch = asking.recv_multipart()
            if number == END_OF_REPLAY:
                break
            got.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)[1][0]["block_hashes"]))
    assert got == [(1, [1]), (2, [2])]


def test_a_replay_has_everything_that_was_published_before_it_was_asked_for(publisher: KVEventPublisher) -> None:
    asked, send = threading.Event(), publisher._send
    publisher._send = lambda batch: (asked.wait(WAIT_S), send(batch))  # type: ignore[method-assign, assignment]
    for id in range(3):
        publisher.publish([BlockRemoved([id], "GPU")])
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.connect(publisher.replay)
        client.send_multipart((b"", bytes(8)))
        assert publisher._router.poll(5000)  # the publisher's thread waits, and does not use it meanwhile
        asked.set()
        numbers = []
        while (message := client.recv_multipart())[1] != END_OF_REPLAY:
            numbers.append(int.from_bytes(message[1], "big"))
    assert numbers == [0, 1, 2]


def test_an_endpoint_that_is_taken_is_an_error_that_names_it(publisher: KVEventPublisher) -> None:
    with pytest.raises(ConfigError, match=r"kv_events cannot be published at tcp://127\.0\.0\.1"):
        KVEventPublisher(KVEventsAddress(publisher.endpoint))


def test_what_was_told_is_sent_before_it_closes() -> None:
    made = KVEventPublisher(KVEventsAddress("tcp://127.0.0.1:*"))
    assert made.publish([AllBlocksCleared()])
    made.close()
    assert len(made._sent) == 1
