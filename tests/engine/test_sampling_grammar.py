"""Constrained answers in the engine: alone, batched, preempted, failing, and with everything else a request may ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np
import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.engine.admission import EngineLimits
from ingot.engine.engine import Engine
from ingot.engine.request import Ended, Event, Failed, Request, Sampling, SequenceEnded, Stop, TextDelta
from ingot.engine.sampling import apply_masks, sample_tokens
from ingot.errors import IngotError
from ingot.text.grammar.compiled import GrammarMatcher
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import GrammarTooComplex, GrammarViolated, TokenMask
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tool_formats.registry import format_by_name
from tests import engines, tiny
from tests.engine.test_sampling import Row

GREEDY = Sampling(temperature=0.0)
PROMPT = (5, 17, 40)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "w": {"enum": ["yes", "no"]}},
    "required": ["n", "w"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["cpu", "metal"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Where the device works beside Python, a step's tokens are read while the next one runs, if they may be."""
    made = engines.start("llama")
    device = replace(made._loaded.adapter.device, kind=request.param)
    object.__setattr__(made._loaded.adapter, "device", device)
    yield made
    made.check()
    made.close()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(engines.tiny_tokenizer(), tiny.VOCAB)
    yield made
    made.close()


def end(events: list[Event]) -> SequenceEnded:
    [found] = [event for event in events if isinstance(event, SequenceEnded)]
    return found


def valid(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"n", "w"} and 0 <= value["n"] <= 99 and value["w"] in ("yes", "no")


# The mask.


def packed(rows: np.ndarray) -> list[TokenMask]:
    bits = np.packbits(rows, axis=1, bitorder="little")
    bits = np.pad(bits, ((0, 0), (0, -bits.shape[1] % 4)))
    return list(bits.view(np.uint32))


@pytest.mark.parametrize("vocab", [7, 32, 33, 100, 1000, 4099])
@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_a_mask_takes_exactly_the_forbidden_tokens_out(vocab: int, dtype: mx.Dtype) -> None:
    chance = np.random.default_rng(vocab)
    allowed = chance.random((3, vocab)) < 0.4
    logits = mx.array(chance.normal(size=(4, vocab)).astype(np.float32)).astype(dtype)
    inputs: list[TokenMask | None] = [*packed(allowed), None]
    result = np.array(apply_masks(logits.astype(mx.float32), inputs))
    before = np.array(logits.astype(mx.float32))
    assert np.array_equal(result[3], before[3])
    assert np.array_equal(np.isneginf(result[:3]), ~allowed)
    assert np.array_equal(result[:3][allowed], before[:3][allowed])


def test_without_masks_the_logits_are_left_alone() -> None:
    logits = mx.zeros((2, 5))
    assert apply_masks(logits, [None, None]) is logits
    assert apply_masks(logits, ()) is logits


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(top_k=3), Sampling(top_p=0.1), Sampling(min_p=0.9)])
def test_what_is_drawn_is_allowed_however_it_is_drawn(sampling: Sampling) -> None:
    chance = np.random.default_rng(3)
    logits = chance.normal(0, 4, (1, 200)).astype(np.float32)
    allowed = np.zeros((1, 200), dtype=bool)
    allowed[0, np.argsort(logits[0])[:5]] = True  # the five least likely
    for index in range(30):
        row = Row(Sampling(**{**_fields(sampling), "logit_bias": ((int(np.argmax(logits)), 100.0),)}), sampled=index)
        drawn = sample_tokens(mx.array(logits), [row], masks=packed(allowed))
        assert allowed[0, drawn.tokens.item()]


def _fields(sampling: Sampling) -> dict[str, object]:
    return {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}


# The engine.


def test_an_answer_by_a_schema_is_valid_and_ends_when_it_is_complete(engine: Engine, grammars: Grammars) -> None:
    plan = grammars.json_schema(SCHEMA)
    for seed in range(5):
        request = Request(f"s{seed}", (PROMPT,), max_tokens=200, sampling=Sampling(seed=seed), grammar=plan)
        events = engines.answer(engine, request)
        assert valid(engines.text_of(events))
        assert end(events).reason == "stop"


def test_greedy_answers_are_held_too(engine: Engine, grammars: Grammars) -> None:
    request = Request("g", (PROMPT,), max_tokens=200, sampling=GREEDY, grammar=grammars.json_schema(SCHEMA))
    assert valid(engines.text_of(engines.answer(engine, request)))


def test_rows_with_and_without_a_guide_share_a_batch_and_give_what_they_give_alone(
    engine: Engine, grammars: Grammars
) -> None:
    plan = grammars.json_schema(SCHEMA)
    requests = [
        Request(
            f"b{number}",
            (PROMPT,),
            max_tokens=60,
            sampling=Sampling(seed=number),
            stop=Stop(ignore_eos=number % 2 == 1),
            grammar=plan if number % 2 == 0 else None,
        )
        for number in range(8)
    ]
    alone = [engines.text_of(engines.answer(engine, request)) for request in requests]
    streams = [engine.generate(request) for request in requests]
    together = [engines.text_of([event for batch in stream for event in batch]) for stream in streams]
    assert together == alone
    assert all(valid(text) for text in together[::2])


def test_every_answer_of_a_request_is_held_by_a_guide_of_its_own(engine: Engine, grammars: Grammars) -> None:
    request = Request(
        "n", (PROMPT, (1, 2)), n=3, max_tokens=200, sampling=Sampling(seed=1), grammar=grammars.json_schema(SCHEMA)
    )
    events = engines.answer(engine, request)
    texts = [engines.text_of(events, index) for index in range(6)]
    assert all(map(valid, texts)) and len(set(texts)) > 1


@pytest.mark.usefixtures("reserved_by_page")
def test_a_preempted_answer_goes_on_where_it_was(grammars: Grammars) -> None:
    plan = grammars.regex("[a-z]{90}")
    prompts = [tuple((7 * place + number) % 95 for place in range(44 + 10 * number)) for number in range(3)]
    wanted = [
        Request(f"p{number}", (prompt,), sampling=Sampling(seed=number), grammar=plan)
        for number, prompt in enumerate(prompts)
    ]
    roomy = engines.start("llama", context=160)
    alone = [engines.text_of(engines.answer(roomy, request)) for request in wanted]
    roomy.close()
    # Room for three sequences of up to 128 tokens, so that growing beyond pushes the newest out.
    tight_bytes = engines.tight_memory(roomy, rows=3, tokens=128)
    tight = engines.start("llama", context=160, memory=tight_bytes, limits=EngineLimits(max_sequences=4))
    texts, preempted = engines.preempted(tight, wanted)
    tight.check()
    tight.close()
    assert preempted > 0
    assert texts == alone and all(text.isalpha() for text in texts)


def test_logprobs_stay_the_models_own(engine: Engine, grammars: Grammars) -> None:
    """A forced token has the probability that the model gave it, not one."""
    request = Request(
        "lp", (PROMPT,), max_tokens=20, sampling=Sampling(temperature=0.0, logprobs=3), grammar=grammars.choice(["zqx"])
    )
    events = engines.answer(engine, request)
    infos = [info for event in events if isinstance(event, TextDelta) for info in event.tokens]
    assert [info.chosen.text for info in infos] == ["z", "q", "x"]
    assert all(info.chosen.logprob < -0.1 for info in infos)
    assert all(len(info.top) == 3 for info in infos)


def test_a_grammar_ends_the_answer_also_where_stop_tokens_may_not(engine: Engine, grammars: Grammars) -> None:
    for stop in (Stop(ignore_eos=True), Stop(min_tokens=50)):
        request = Request(f"e{stop.min_tokens}", (PROMPT,), max_tokens=100, stop=stop, grammar=grammars.choice(["ab"]))
        events = engines.answer(engine, request)
        assert engines.text_of(events) == "ab" and end(events).reason == "stop"


def test_a_limit_cuts_a_constrained_answer_off(engine: Engine, grammars: Grammars) -> None:
    events = engines.answer(engine, Request("cut", (PROMPT,), max_tokens=4, grammar=grammars.regex("[a-z]{10}")))
    assert len(engines.text_of(events)) == 4 and end(events).reason == "length"


def test_a_stop_string_ends_a_constrained_answer(engine: Engine, grammars: Grammars) -> None:
    request = Request(
        "st", (PROMPT,), max_tokens=50, stop=Stop(strings=("stop",)), grammar=grammars.choice(["go on and stop here"])
    )
    events = engines.answer(engine, request)
    assert engines.text_of(events) == "go on and " and end(events).stopped_by == "stop"


def test_penalties_and_biases_do_not_lift_a_constraint(engine: Engine, grammars: Grammars) -> None:
    sampling = Sampling(seed=2, presence_penalty=2.0, repetition_penalty=1.5, logit_bias=((3, 100.0), (4, -100.0)))
    request = Request("pb", (PROMPT,), max_tokens=200, sampling=sampling, grammar=grammars.json_schema(SCHEMA))
    assert valid(engines.text_of(engines.answer(engine, request)))


def test_a_thinking_budget_closes_the_thinking_and_the_grammar_follows(engine: Engine, grammars: Grammars) -> None:
    plan = grammars.answer(grammars.choice(["done"]), format_by_name("hermes"), ThinkingStart.OPENED, budget=6)
    request = Request("th", (PROMPT,), max_tokens=60, sampling=Sampling(seed=4), grammar=plan)
    events = engines.answer(engine, request)
    thinking, _, rest = engines.text_of(events).partition("</think>")
    assert len(thinking) >= 6 and rest.strip() == "done"


@pytest.mark.parametrize("budget", [0, 1, 2, 5])
def test_a_thinking_budget_is_kept_to_the_token(engine: Engine, grammars: Grammars, budget: int) -> None:
    plan = grammars.answer(None, format_by_name("hermes"), ThinkingStart.OPENED, budget=budget)
    stop = Stop(ignore_eos=True)
    request = Request(f"bt{budget}", (PROMPT,), max_tokens=40, sampling=Sampling(seed=6), stop=stop, grammar=plan)
    tokens = end(engines.answer(engine, request)).tokens
    closing = tuple(engine.tokenizer.encode("</think>", add_special=False))
    assert tokens[budget : budget + len(closing)] == closing


# Guides that fail.


@dataclass(frozen=True)
class Trap:
    """A plan whose guide fails at its `after`-th token, in one of three places."""

    place: str
    after: int = 3
    error: type[IngotError] = GrammarViolated

    def begin(self) -> _Trapped:
        if self.place == "begin":
            raise self.error("trapped")
        return _Trapped(self)


@dataclass
class _Trapped(GrammarMatcher):
    trap: Trap
    accepted: list[int] = field(default_factory=list)
    free: bool = False
    done: bool = False

    def mask(self) -> TokenMask | None:
        if self.trap.place == "mask" and len(self.accepted) == self.trap.after:
            raise self.trap.error("trapped")
        return None

    def accept(self, token: int) -> None:
        if self.trap.place == "accept" and len(self.accepted) == self.trap.after:
            raise self.trap.error("trapped")
        self.accepted.append(token)

    def snapshot(self) -> int:
        return len(self.accepted)

    def rollback(self, snapshot: int) -> None:
        del self.accepted[snapshot:]


@pytest.mark.parametrize("error", [GrammarViolated, GrammarTooComplex])
@pytest.mark.parametrize("place", ["begin", "mask", "accept"])
def test_a_guide_that_fails_ends_its_own_request_and_shows_nothing_more(
    engine: Engine, place: str, error: type[IngotError]
) -> None:
    other = Request("other", (PROMPT,), max_tokens=30, sampling=Sampling(seed=9), stop=Stop(ignore_eos=True))
    expected = engines.text_of(engines.answer(engine, other))
    running = engine.generate(other)
    stop = Stop(ignore_eos=True)
    trap = Request("trap", (PROMPT,), max_tokens=30, sampling=GREEDY, stop=stop, grammar=Trap(place, 3, error))
    events = engines.answer(engine, trap)
    assert isinstance(events[-1], Failed) and isinstance(events[-1].error, error)
    shown = "".join(event.text for event in events if isinstance(event, TextDelta))
    assert len(shown) == (0 if place == "begin" else 3)
    assert engines.text_of([event for batch in running for event in batch]) == expected
    engine.check()


def test_the_other_answers_of_a_request_end_with_the_one_whose_guide_failed(engine: Engine) -> None:
    stop = Stop(ignore_eos=True)
    events = engines.answer(engine, Request("all", (PROMPT,), n=4, max_tokens=30, stop=stop, grammar=Trap("mask")))
    assert isinstance(events[-1], Failed)
    assert not any(isinstance(event, SequenceEnded | Ended) for event in events)
    engine.check()


def test_each_token_is_accepted_once_and_in_order(engine: Engine) -> None:
    cached: list[_Trapped] = []

    @dataclass(frozen=True)
    class Recording:
        free: bool

        def begin(self) -> _Trapped:
            cached.append(_Trapped(Trap("nowhere"), free=self.free))
            return cached[-1]

    for free in (False, True):
        request = Request(f"rec{free}", (PROMPT,), max_tokens=25, stop=Stop(ignore_eos=True), grammar=Recording(free))
        events = engines.answer(engine, request)
        assert tuple(cached[-1].accepted) == end(events).tokens
