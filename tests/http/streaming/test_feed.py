from __future__ import annotations

import pytest

from ingot.http.edge import ClientGone
from ingot.http.streaming import feed as feeds
from ingot.http.streaming.feed import Feed

pytestmark = pytest.mark.anyio


async def test_whoever_reads_along_gets_every_batch() -> None:
    feed = Feed()
    for _ in range(3):
        feed.put([])
    feed.end()
    assert [batch async for batch in feed] == [[], [], []]


async def test_for_a_reader_that_left_nothing_is_kept() -> None:
    feed = Feed()
    feed.put([])
    await feed.aclose()
    for _ in range(10):
        feed.put([])
    assert len(feed) <= 1


async def test_a_reader_that_falls_too_far_behind_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "BEHIND", 10)
    feed = Feed()
    for _ in range(100):
        feed.put([])
    assert len(feed) <= 10
    with pytest.raises(ClientGone):
        [batch async for batch in feed]
