from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from ingot.http.edge import ClientGone
from ingot.http.streaming import EventFeed

pytestmark = pytest.mark.anyio


def batch(number: int) -> Any:
    return [number]


async def read(feed: EventFeed) -> list[Any]:
    return [answer async for answer in feed.reader().batches()]


async def test_whoever_reads_along_gets_every_batch_whenever_they_came() -> None:
    feed = EventFeed()
    early = asyncio.create_task(read(feed))
    for number in range(3):
        feed.put(batch(number))
        await asyncio.sleep(0)
    late = asyncio.create_task(read(feed))
    await asyncio.sleep(0)
    feed.put(batch(3))
    feed.end()
    answer = [[0], [1], [2], [3]]
    assert (await early, await late, await read(feed)) == (answer, answer, answer)


async def test_a_reader_knows_how_much_waits_for_it() -> None:
    feed = EventFeed()
    feed.put(batch(0))
    feed.put(batch(1))
    reader = feed.reader()
    batches = reader.batches()
    assert (len(reader), await anext(batches), len(reader)) == (2, [0], 1)


async def test_a_reader_that_falls_too_far_behind_is_given_up() -> None:
    feed = EventFeed()
    feed._batches = deque(maxlen=10)
    reader = feed.reader().batches()
    feed.put(batch(0))
    assert await anext(reader) == [0]
    for number in range(1, 12):
        feed.put(batch(number))
    assert not feed.whole
    with pytest.raises(ClientGone):
        await anext(reader)
