from __future__ import annotations

from dataclasses import replace

import pytest

from ingot.cache.block_listing import Census
from ingot.cache.pages import PAGE
from ingot.engine.kv_events_events import AllBlocksCleared, BlockEvent
from ingot.engine.kv_events_news import PAUSE_S, News
from ingot.engine.request import Ended, Request, Sampling
from ingot.kernels.device import Device
from tests import engines
from tests.cache.paper import APPEND, index, store
from tests.engine.test_events import Listener
from tests.engines import GPU

WORDS = list(range(200))


class Teller:
    def __init__(self) -> None:
        self.listener, self.told, self.full, self.closed = Listener(), 0, False, False

    def tell(self, events: list[BlockEvent]) -> bool:
        if self.full:
            return False
        self.told += 1
        if events == [AllBlocksCleared()]:
            self.listener.known.clear()
        self.listener.follow(events)
        return True

    def close(self) -> None:
        self.closed = True


def test_what_is_kept_is_told_once_and_what_changes_after_a_pause() -> None:
    teller, held, now = Teller(), index(APPEND), [0.0]
    news = News(teller, lambda: now[0])
    news.of(held, APPEND)
    store(held, WORDS, APPEND)
    news.look()
    news.look()
    assert teller.told == 1 and len(teller.listener.known) == 3
    store(held, [5, *WORDS], APPEND)
    news.look()
    assert teller.told == 1
    now[0] += PAUSE_S
    news.look()
    assert teller.told == 2 and len(teller.listener.known) == 6


def test_an_idle_engine_tells_at_once() -> None:
    teller, held = Teller(), index(APPEND)
    news = News(teller, lambda: 0.0)
    news.of(held, APPEND)
    for words in (WORDS, [5, *WORDS]):
        store(held, words, APPEND)
        news.look(now=True)
    assert len(teller.listener.known) == 6


def test_what_nobody_could_take_is_told_later() -> None:
    teller, held = Teller(), index(APPEND)
    news = News(teller, lambda: 0.0)
    news.of(held, APPEND)
    store(held, WORDS, APPEND)
    teller.full = True
    news.look(now=True)
    teller.full = False
    news.look(now=True)
    assert set(teller.listener.known) == set(Census(APPEND).take(held))


def test_new_books_and_the_end_take_back_what_was_told() -> None:
    teller, held = Teller(), index(APPEND)
    news = News(teller, lambda: 0.0)
    news.of(held, APPEND)
    store(held, WORDS, APPEND)
    news.look(now=True)
    news.of(index(APPEND), APPEND)
    news.look(now=True)
    assert not teller.listener.known
    news.of(held, APPEND)
    news.look(now=True)
    news.close()
    assert not teller.listener.known and teller.closed


@pytest.mark.parametrize("kind", ["llama", "window", "hybrid"])
@pytest.mark.parametrize("device", [None, GPU], ids=["here", "gpu"])
def test_an_engine_tells_what_it_could_take_over_and_takes_it_over(kind: str, device: Device | None) -> None:
    teller = Teller()
    engine = engines.start(kind, cache_bytes=1 << 26, device=device, teller=teller)
    try:
        prompt = tuple(number % 90 for number in range(300))
        request = Request("first", (prompt,), max_tokens=4, sampling=Sampling(temperature=0.0))
        engines.answer(engine, request)
        engine.check()  # once it rests
        known = len(teller.listener.known) * PAGE
        assert 256 <= known <= 304
        ended = engines.answer(engine, replace(request, id="second"))[-1]
        assert isinstance(ended, Ended) and ended.usage.cached_tokens >= 256
    finally:
        engine.close()
    assert teller.closed and not teller.listener.known
