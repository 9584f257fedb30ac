"""Engines of mixtures whose experts are read when they are needed: what requests are told, and what faults do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from ingot.config import Settings
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Failed, Request, Sampling, SequenceEnded, Stop
from ingot.errors import ConfigError, ModelError
from ingot.models.experts import files
from tests import engines, tiny


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = engines.start("moe-streamed")
    yield made
    made.check()
    made.close()


def request(name: str, first: int) -> Request:
    prompt = tuple(range(first, first + 20))
    return Request(name, (prompt,), max_tokens=4, sampling=Sampling(temperature=0.0), stop=Stop(ignore_eos=True))


def tokens_of(events: Sequence[Event]) -> tuple[int, ...]:
    [tokens] = [event.tokens for event in events if isinstance(event, SequenceEnded)]
    return tokens


def test_answers_are_those_of_the_model_in_memory(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tiny.EXPERT_MEMORY, "moe-streamed", "all")
    whole = engines.start("moe-streamed")
    for number in range(3):
        asked = request(f"r{number}", 20 * number)
        assert tokens_of(engines.answer(engine, asked)) == tokens_of(engines.answer(whole, asked))
    whole.close()


def test_the_ready_line_says_how_many_fit_and_what_to_expect(engine: Engine) -> None:
    assert any(note.startswith("fits 67 % of the experts") for note in engine.card.notes)


def test_a_request_is_told_what_was_read_for_it(engine: Engine) -> None:
    *_, ended = engines.answer(engine, request("told", 50))
    assert isinstance(ended, Ended) and ended.experts is not None
    assert ended.experts.hits + ended.experts.predicted + ended.experts.misses >= 4 * 3 * 2
    assert engine.figures.experts is not None and engine.figures.experts.share == pytest.approx(2 / 3)


def test_a_drive_that_fails_ends_requests_in_words_and_the_next_ones_are_answered(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = [tokens_of(engines.answer(engine, request(f"a{number}", number))) for number in range(0, 60, 10)]

    def broken(*given: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(files.os, "preadv", broken)
    found = [engines.answer(engine, request(f"b{number}", number))[-1] for number in range(0, 60, 10)]
    failed = [event.error for event in found if isinstance(event, Failed)]
    assert failed and all(error.status == 503 and "Input/output error" in error.message for error in failed)
    monkeypatch.undo()
    assert [tokens_of(engines.answer(engine, request(f"c{number}", number))) for number in range(0, 60, 10)] == right


def test_weights_that_do_not_fit_are_refused_with_what_would_do() -> None:
    folder, tokenizer = engines.tiny_folder("moe"), engines.tiny_tokenizer()
    with pytest.raises(ModelError, match="--expert-memory auto"):
        engines.load(Settings(), folder, tokenizer, memory=1 << 16)
    with pytest.raises(ConfigError, match="no mixture of experts"):
        engines.load(Settings(expert_memory="1MB"), engines.tiny_folder("llama"), tokenizer)
    with pytest.raises(ConfigError, match="neither all, auto nor an amount"):
        Settings(expert_memory="most")
