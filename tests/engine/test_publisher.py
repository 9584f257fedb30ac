"""With a subscriber's own sockets."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from ingot.engine.kv_events import END, Address, Publisher
from ingot.engine.kv_events_events import AllBlocksCleared, BlockRemoved
from ingot.errors import ConfigError

zmq = pytest.importorskip("zmq")


@pytest.fixture
def publisher() -> Iterator[Publisher]:
    made = Publisher(Address("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", "kv@here@tiny"))
    yield made
    made.close()


def test_batches_come_numbered_under_their_topic(publisher: Publisher) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(b"kv@")
        while not subscriber.poll(20):  # until it is heard: what was told before is missed
            publisher.tell([AllBlocksCleared()])
        _, first, _ = subscriber.recv_multipart()
        publisher.tell([BlockRemoved([5], "GPU")])
        number, said = int.from_bytes(first, "big"), [{"type": "AllBlocksCleared"}]
        while said == [{"type": "AllBlocksCleared"}]:
            assert subscriber.poll(5000)
            topic, raw, batch = subscriber.recv_multipart()
            assert topic == b"kv@here@tiny" and int.from_bytes(raw, "big") == number + 1
            number, said = number + 1, msgspec.msgpack.decode(batch)[1]
        assert said == [{"type": "BlockRemoved", "block_hashes": [5], "medium": "GPU"}]


def test_what_was_missed_can_be_asked_for(publisher: Publisher) -> None:
    for id in range(3):
        publisher.tell([BlockRemoved([id], "GPU")])
    with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
        asking.connect(publisher.replay)
        asking.send_multipart((b"", (1).to_bytes(8, "big")))
        got = []
        while True:
            assert asking.poll(5000)
            _, number, batch = asking.recv_multipart()
            if number == END:
                break
            got.append((int.from_bytes(number, "big"), msgspec.msgpack.decode(batch)[1][0]["block_hashes"]))
    assert got == [(1, [1]), (2, [2])]


def test_an_endpoint_that_is_taken_is_an_error_that_names_it(publisher: Publisher) -> None:
    with pytest.raises(ConfigError, match=r"kv_events cannot be told at tcp://127\.0\.0\.1"):
        Publisher(Address(publisher.endpoint))


def test_what_was_told_is_sent_before_it_closes() -> None:
    made = Publisher(Address("tcp://127.0.0.1:*"))
    assert made.tell([AllBlocksCleared()])
    made.close()
    assert len(made._sent) == 1
