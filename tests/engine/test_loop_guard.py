"""Answers that repeat themselves without end are ended; repetition that is meant is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ingot.engine import loop_guard
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.loop_guard import (
    CHECK_EVERY,
    LOOP_TOKENS,
    STRUCTURE_TOKENS,
    VERSE_TOKENS,
    LoopGuard,
    reads_as_prose,
)
from ingot.engine.request import Ended, Event, LoopReport, Request, Sampling, SequenceEnded, Stop
from ingot.engine.sequence import TokenSequence
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests import engines, scripted
from tests.rehearsed import Rehearsed

DEFAULT_MODEL = Path("~/.cache/ingot/models/smollm2-135m").expanduser()
POEM = "The waves of the sea, a mystic realm,\nA place where the stars shine bright,\n\n"
REAL_LOOPS = (
    "The sea is a place where the human heart is free,\nA place where the human heart is free,\n\n",
    "A place where the soul finds its own rhythm,\n",
    "The sea, a place of endless wonder,\nA place where the human heart can dream,\n\n",
    "The sea is a place of endless beauty,\nA place where the human heart can't escape.\n\n",
    "The sea is a place where the soul is free,\nAbe a sea of dreams,\nAbe a sea of dreams,\nAbe a sea of dreams.\n\n",
    "A place where the sea is, a place,\n",
    "A place where dreams are made,where hearts are made,\n",
    "A tale of the sea, a tale of the sea,\n",
    "A place where the soul,\n",
    "The Earth's rotation is a result of the Earth's rotation around the Sun. ",
)
"""What the default model wrote again and again when it was asked for a poem about the sea, or about seasons."""
MEANT = {
    "laughter": "ha" * 500,
    "a word": "very " * 1000,
    "a table": "| item | amount |\n|---|---|\n" + "| apple pie with cream | none was sold today |\n" * 200,
    "values": "red apple,green pear,blue plum,yellow lemon\n" * 200,
    "a long line": "-" * 20_000,
    "zeros": "0" * 5000,
    "JSON": "[" + '{"name": "the name of a person", "age": 0}, ' * 300 + "]",
    "code": "```python\n"
    + "    # call the function that does the work\n    do_the_work(of, all, parts)\n" * 150
    + "```",
    "base64": "QUFBQUFBQUFBQUFBQUFBQUFBQUFBQUFB" * 200,
    "ASCII art": "  /\\  /\\  \n /  \\/  \\ \n" * 200,
    "indentation": "    " * 3000,
    "similar lines": "".join(f"{n}. The house with number {n} is on the left side.\n" for n in range(400)),
    "a chorus": ("Row, row, row your boat, gently down the stream, merrily, merrily, life is but a dream.\n" * 30),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    if not (DEFAULT_MODEL / "tokenizer.json").is_file():
        pytest.skip("the default model has not been fetched")
    return Tokenizer.load(DEFAULT_MODEL)


def watched(
    tokenizer: Tokenizer, answer: str, prompt: str = "Write a poem.", stop: Stop | None = None
) -> tuple[int, LoopReport] | None:
    """After how many tokens of the answer a loop is found, and which."""
    ids = tuple(tokenizer.encode(prompt, add_special=False))
    sequence = TokenSequence(Request("r", (ids,), stop=stop or Stop()), 0, 0, ids, 1 << 20, 0)
    guard = LoopGuard.of(sequence, tokenizer)
    tokens = tokenizer.encode(answer, add_special=False)
    for begin in range(0, len(tokens) - CHECK_EVERY + 1, CHECK_EVERY):
        sequence.tokens += tokens[begin : begin + CHECK_EVERY]
        if guard is not None and (loop := guard.look()) is not None:
            return sequence.produced, loop
    return None


@pytest.mark.parametrize("unit", REAL_LOOPS)
def test_what_the_default_model_repeated_is_a_loop(tokenizer: Tokenizer, unit: str) -> None:
    found = watched(tokenizer, POEM + unit * 1000)
    assert found is not None
    produced, loop = found
    before = len(tokenizer.encode(POEM, add_special=False))
    assert LOOP_TOKENS <= produced < LOOP_TOKENS + before + 2 * CHECK_EVERY
    assert loop.period == len(tokenizer.encode(unit * 9, add_special=False)) - len(
        tokenizer.encode(unit * 8, add_special=False)
    )
    assert LOOP_TOKENS // loop.period <= loop.count <= produced // loop.period


@pytest.mark.parametrize("what", MEANT)
def test_repetition_that_is_meant_is_no_loop(tokenizer: Tokenizer, what: str) -> None:
    assert watched(tokenizer, f"Here you are:\n\n{MEANT[what]}\n\nThat was it.") is None


def test_verses_that_come_again_and_again_are_a_loop(tokenizer: Tokenizer) -> None:
    verse = "".join(line for line in REAL_LOOPS[:5]) + POEM
    found = watched(tokenizer, verse * 40)
    assert found is not None and found[1].period > LOOP_TOKENS // loop_guard.LEAST_COUNT
    assert VERSE_TOKENS <= found[0] < VERSE_TOKENS + 2 * CHECK_EVERY


def test_what_the_prompt_quotes_may_be_repeated_as_often_as_a_table(tokenizer: Tokenizer) -> None:
    line = "I must not talk while the teacher explains the lesson.\n"
    assert watched(tokenizer, line * 500, f'Write "{line.strip()}" 500 times.') is None
    assert watched(tokenizer, line * 500) is not None


@pytest.mark.parametrize("unit", ["| a | b |\n", "! ", "0, ", "A place where the soul is free,\n| a | b |\n" * 9])
def test_anything_is_a_loop_in_the_end(tokenizer: Tokenizer, unit: str) -> None:
    found = watched(tokenizer, unit * (60_000 // len(unit)))
    assert found is not None and STRUCTURE_TOKENS <= found[0] < STRUCTURE_TOKENS + 2 * CHECK_EVERY


def test_a_repetition_that_stopped_is_no_loop(tokenizer: Tokenizer) -> None:
    assert watched(tokenizer, REAL_LOOPS[0] * 40 + "And then it was over. " + REAL_LOOPS[1] * 90) is None


def test_requests_may_want_repetition(tokenizer: Tokenizer) -> None:
    for stop in (Stop(loop_guard=False), Stop(ignore_eos=True), Stop(min_tokens=1 << 20)):
        assert watched(tokenizer, REAL_LOOPS[0] * 1000, stop=stop) is None


def test_sentences_of_many_languages_read_as_prose() -> None:
    for text in (
        "The sea is a place where the soul is free,\n",
        "El mar es un lugar donde el alma es libre, y nada más.\n",
        "大海是灵魂自由的地方。",
        "Море — это место, где душа свободна и спокойна.\n",
    ):
        assert reads_as_prose(text), text
    for text in (
        "| the sea | a place | for all | souls |\n",
        "ha ha ha ha ha ha ",
        "x = the + sea + is + a + place\n",
        "",
    ):
        assert not reads_as_prose(text), text


@pytest.mark.parametrize(
    ("tokens", "period"),
    [
        ([7] * 80, 1),
        ([1, 2, 3] * 30, 3),
        (([0] * 40 + [1]) * 8, 41),  # that repeats itself within
        ([5, *([1, 2] * 40)], None),  # not from its first token on
        ([*range(100)], None),
    ],
)
def test_the_shortest_period_is_found(tokens: Sequence[int], period: int | None) -> None:
    assert loop_guard.shortest_period(tokens, 50) == period


def ends(events: Sequence[Event]) -> list[SequenceEnded]:
    return [event for event in events if isinstance(event, SequenceEnded)]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops of few tokens."""
    for name, value in (
        ("CHECK_EVERY", 8),
        ("LOOP_TOKENS", 32),
        ("STRUCTURE_TOKENS", 32),
        ("ANCHOR_TOKENS", 4),
        ("LEAST_COUNT", 2),
    ):
        monkeypatch.setattr(loop_guard, name, value)


ENDLESS = [
    Request(
        f"e{number}",
        (tuple(range(1, 2 + number)),),
        max_tokens=100,
        sampling=Sampling(temperature=0.0, logit_bias=((number + 5, 100.0),)),
        cache=False,
    )
    for number in range(3)
]


@pytest.fixture
def alone(short: None) -> Iterator[tuple[Engine, list[SequenceEnded]]]:
    engine = engines.start("llama", context=140, widest=64)
    found = [ends(engines.answer(engine, request))[0] for request in ENDLESS]
    assert [(end.reason, end.completion_tokens, end.loop) for end in found] == [
        ("length", 32, LoopReport(0, 1, 32))
    ] * 3
    yield engine, found
    engine.check()
    engine.close()


def together(engine: Engine, requests: Sequence[Request]) -> list[list[Event]]:
    streams = [engine.generate(request) for request in requests]
    return [[event for batch in stream for event in batch] for stream in streams]


def test_an_answer_ends_at_the_same_token_among_others_and_with_draft_tokens(
    alone: tuple[Engine, list[SequenceEnded]],
) -> None:
    engine, expected = alone
    assert [ends(events)[0] for events in together(engine, ENDLESS)] == expected
    twice = engines.answer(engine, replace(ENDLESS[0], id="twice", n=2))
    assert [end.loop for end in ends(twice)] == [LoopReport(index, 1, 32) for index in range(2)]
    assert isinstance(twice[-1], Ended) and {loop.index for loop in twice[-1].loops} == {0, 1}
    assert engine.figures.endings["repetition"] == 7 and engine.figures.endings["length"] == 0
    answers = {(request.prompts[0], 0): [*end.tokens] * 4 for request, end in zip(ENDLESS, expected, strict=True)}
    guessing = engines.start("llama", context=140, widest=64, proposers=[Rehearsed(answers)], fixed_draft_tokens=6)
    found = together(guessing, ENDLESS)
    guessing.check()
    guessing.close()
    assert [ends(events)[0] for events in found] == expected
    assert all(isinstance(events[-1], Ended) and events[-1].speculation.accepted for events in found)


@pytest.mark.usefixtures("reserved_by_page")
def test_an_answer_ends_at_the_same_token_after_preemption(alone: tuple[Engine, list[SequenceEnded]]) -> None:
    engine, _ = alone
    longer = [
        replace(request, id=f"p{number}", prompts=(tuple(range(40 + number)),), max_tokens=None)
        for number, request in enumerate(ENDLESS)
    ]
    expected = [engines.text_of(engines.answer(engine, request)) for request in longer]
    memory = engines.tight_memory(engine, rows=3, tokens=64)
    tight = engines.start("llama", memory=memory, context=76, widest=256, limits=EngineLimits(max_sequences=4))
    texts, preempted = engines.preempted(tight, longer)
    tight.check()
    tight.close()
    assert preempted > 0 and texts == expected


def test_nothing_is_ended_within_a_grammar(short: None) -> None:
    from ingot.text.grammar.grammars import Grammars

    engine = scripted.start(lambda prompt: "the sea, " * 40)
    try:
        grammar = Grammars(engine.tokenizer, scripted.VOCAB).regex("(the sea, )+")
        prompt = tuple(engine.tokenizer.encode(scripted.ANSWER, add_special=False))
        request = Request("g", (prompt,), max_tokens=100, sampling=Sampling(temperature=0.0), grammar=grammar)
        [held] = ends(engines.answer(engine, request))
        [free] = ends(engines.answer(engine, replace(request, id="f", grammar=None)))
        assert (held.completion_tokens, held.loop) == (100, None)
        assert free.loop is not None and free.completion_tokens == 32
    finally:
        engine.close()
