"""The shipped vision model served over HTTP: it answers about what it is shown, in one batch with text.

A few sights are asked about. INGOT_SIGHTS=100 asks about a hundred of each layout, and holds the card's figures.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from typing import Any

import pytest

from foundry.package import MODELS
from foundry.vision.layouts import LAYOUTS
from ingot.cli.serve import ready_record
from ingot.engine.engine import Engine
from ingot.engine.loading.language_model import start_engine
from ingot.engine.scheduler import Scheduler
from ingot.engine.sequence import TokenSequence
from ingot.text.tool_formats.registry import FORMATS, FoundFormat
from tests.foundry.vision.asking import Asked, asked, body_of
from tests.http import asgi
from tests.http.asgi import call
from tests.http.scripted import build_app, settings
from tests.seeing_engines import looks_of

pytestmark = pytest.mark.anyio
FOLDER = MODELS / "vision"
TEXT = [{"role": "user", "content": "What can you do?"}]
SIGHTS = int(os.environ.get("INGOT_SIGHTS", "5"))
LEAST = {False: 0.95, True: 0.93} if SIGHTS >= 50 else {False: 0.9, True: 0.85}
"""Right answers about pictures and about clips."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here is about how fast a machine is that has no kernels, or others beside it."""
    monkeypatch.setattr(asgi, "WAIT_S", 120.0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = start_engine(settings(), FOLDER, name="vision", source="foundry")
    yield made
    made.check()
    made.close()


@pytest.fixture(scope="module")
def app(engine: Engine) -> Any:
    return build_app(engine, settings())


async def said(app: Any, messages: list[dict[str, Any]], **options: Any) -> dict[str, Any]:
    answered = await call(app, "POST", "/v1/chat/completions", body=body_of(messages, **options))
    assert answered.status == 200, answered.json()
    found: dict[str, Any] = answered.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text


async def test_it_answers_about_held_out_pictures_and_clips_eight_at_a_time_beside_text(app: Any) -> None:
    questions = [one for name in LAYOUTS for seed in range(SIGHTS) for one in asked(name, seed, 2)]
    door = asyncio.Semaphore(8)

    async def is_right(one: Asked) -> bool:
        async with door:
            return text_of(await said(app, one.messages)) == one.answer

    beside = asyncio.gather(*(said(app, TEXT, max_tokens=16) for _ in range(2)))
    right = await asyncio.gather(*map(is_right, questions))
    one, other = await beside
    assert text_of(one) == text_of(other)
    for clip, least in LEAST.items():
        own = [good for good, question in zip(right, questions, strict=True) if question.clip is clip]
        assert sum(own) / len(own) >= least


@pytest.mark.parametrize("name", ["large", "pair", "clip8"])
async def test_a_second_turn_takes_over_the_first_and_looks_at_nothing(app: Any, engine: Engine, name: str) -> None:
    [first] = asked(name, 77)
    before = await said(app, first.messages)
    runs = looks_of(engine).runs
    turns = [*first.messages, {"role": "assistant", "content": text_of(before)}]
    after = await said(app, [*turns, {"role": "user", "content": "Are you sure?"}])
    assert looks_of(engine).runs == runs
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.97 * before["usage"]["total_tokens"] - 1


async def test_the_same_question_gets_the_same_answer_without_guesses_and_without_the_cache(app: Any) -> None:
    for name in ("wide", "clip6"):
        [one] = asked(name, 5)
        answers = [
            text_of(await said(app, one.messages, **options))
            for options in ({}, {"speculate": "off"}, {"cache": "off"}, {"stream": False})
        ]
        assert len(set(answers)) == 1


async def test_who_is_preempted_answers_as_who_is_not(app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    questions = [asked(name, 9)[0] for name in ("large", "pair", "clip8")]
    before = [text_of(await said(app, one.messages, cache="off")) for one in questions]
    preempted: list[TokenSequence] = []

    def everybody_once(self: Scheduler) -> list[TokenSequence]:
        chosen = [each for each in self.running if each.decoding and each.known and each not in preempted]
        preempted.extend(chosen)
        return [self._preempt(each) for each in chosen]

    monkeypatch.setattr(Scheduler, "_clear_the_way", everybody_once)
    answers = await asyncio.gather(*(said(app, one.messages, cache="off") for one in questions))
    assert [text_of(answer) for answer in answers] == before
    assert len(preempted) == len(questions)


async def test_what_counts_tokens_agrees_with_what_was_read(app: Any) -> None:
    for name in LAYOUTS:
        [one] = asked(name, 3)
        counted = await call(
            app, "POST", "/v1/tokenize", body={"messages": one.messages, "add_generation_prompt": True}
        )
        answered = await said(app, one.messages, max_tokens=1)
        assert abs(counted.json()["count"] - answered["usage"]["prompt_tokens"]) <= 4  # how thinking is opened


def test_the_ready_line_says_what_it_sees(engine: Engine) -> None:
    found = FoundFormat(FORMATS[0], "template")
    assert " | sees images and video | " in ready_record("http://x", engine.card, found, needs_key=False)


def test_for_text_alone_no_tower_is_loaded_and_flags_that_change_nothing_are_said() -> None:
    whole = start_engine(settings(), FOLDER, name="v", source="")
    blind = start_engine(settings(text_only=True), FOLDER, name="v", source="")
    text = start_engine(settings(text_only=True, media_hosts=("example.org",)), MODELS / "dense", name="v", source="")
    try:
        assert blind.card.weight_bytes < whole.card.weight_bytes and blind.card.sees == ()
        assert blind.processor is not None and blind._loaded.vision_encoder is None
        assert [note for note in blind.card.notes if "--text-only" in note]
        told = [note for note in text.card.notes if "changes nothing" in note]
        assert len(told) == 2 and text.processor is None
    finally:
        for engine in (whole, blind, text):
            engine.close()
