"""Whatever ends half-way leaves nothing behind: neither rows nor states that others would meet."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from ingot.engine.engine import Engine
from ingot.engine.request import Failed, Request, SequenceEnded
from ingot.engine.specprefill.scorers import DraftScorer
from ingot.models.adapter import ModelAdapter
from tests import engines
from tests.engine.specprefill.world import ask, draft_model, ended, some, start
from tests.engines import answer

KINDS = ["llama", "window", "hybrid"]
PASSES = 16
"""What a request takes at least, of the draft and of the target."""


class Passes:
    """Counts forward passes of both models, and has something done at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left, self.fails, self.engine, self.request = -1, False, None, ""
        run = ModelAdapter.run

        def counted(adapter: ModelAdapter, rows: Any, *rest: Any, **more: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                assert isinstance(self.engine, Engine)
                if self.fails and rows is self.draft:
                    raise RuntimeError("the draft is lost")
                self.engine.cancel(self.request)
            return run(adapter, rows, *rest, **more)

        self.draft: Any = None
        monkeypatch.setattr(ModelAdapter, "run", counted)

    def ends(self, engine: Engine, request: Request, at: int, *, fails: bool) -> bool:
        """Whether a request that something happens to ended by it."""
        self.left, self.fails, self.engine, self.request = at, fails, engine, request.id
        last = answer(engine, request)[-1]
        self.left = -1
        return isinstance(last, Failed)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Passes:
    return Passes(monkeypatch)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, passes: Passes) -> Iterator[list[Engine]]:
    """An engine that things happen to, and one that is left alone."""

    def scorer() -> DraftScorer:
        model = draft_model()
        passes.draft = model.rows
        return DraftScorer(model)

    made = [start(request.param, scorer) for _ in range(2)]  # the draft that is watched is the second one's
    yield made
    for engine in made:
        engine.close()


def tokens_of(engine: Engine, request: Request) -> tuple[int, ...]:
    events = answer(engine, request)
    ended(events)
    return next(event.tokens for event in events if isinstance(event, SequenceEnded))


def test_whatever_ends_at_any_pass_leaves_nothing_that_others_meet(pair: list[Engine], passes: Passes) -> None:
    alone, engine = pair
    chance = random.Random(1)
    for at in chance.sample(range(1, PASSES + 1), 5):
        prompt = some(420, at)
        assert passes.ends(engine, ask(prompt, max_tokens=30), at, fails=at % 2 == 0)
        engine.check()
        assert engines.runner_of(engine).rows.count == 0 == passes.draft.count
    # The last one, of which something was computed.
    assert tokens_of(engine, ask(prompt)) == tokens_of(alone, ask(prompt))
    assert tokens_of(engine, ask(prompt, None)) == tokens_of(alone, ask(prompt, None))
