"""Long prompts of which only what matters is computed, in a running engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ingot.cache.records import serialise_record
from ingot.engine.engine import Engine
from ingot.engine.prefix_cache import PrefixCache
from ingot.engine.request import Failed, Request, Sampling, SequenceEnded, SpecPrefillRequest, Stop
from ingot.engine.scheduler import SMALLEST_CHUNK
from ingot.engine.sequence import TokenSequence as Running
from ingot.engine.specprefill.prefill import TRIED_AGAIN_AFTER, ScoringPayoff, SpecPrefill, SpecPrefillSetup
from ingot.engine.specprefill.scorers import DraftScorer
from ingot.engine.specprefill.selection import PromptScores, required_tokens, select_tokens
from ingot.engine.speculation.lookup import LookupProposer
from ingot.engine.step_costs import StepCosts
from ingot.errors import BadRequest, Cancelled, ContextOverflow, Unsupported
from ingot.text.grammar.grammars import Grammars
from tests import engines, tiny
from tests.engine.specprefill.world import Told, ask, draft_model, ended, evenly, report, some, start, written_by_stock
from tests.engines import answer, text_of
from tests.models.layers import family_configs

Starting = Callable[..., Engine]
KINDS = [("llama", None), ("window", None), ("hybrid", None), ("kernel", engines.GPU)]


@pytest.fixture
def starting() -> Iterator[Starting]:
    made: list[Engine] = []

    def started(kind: str = "llama", scorer: Told | None = None, **options: Any) -> Engine:
        made.append(start(kind, (lambda: scorer or Told(evenly)), **options))
        return made[-1]

    yield started
    for engine in made:
        engine.check()
        engine.close()


def tokens_of(engine: Engine, request: Request) -> tuple[int, ...]:
    events = answer(engine, request)
    ended(events)
    return next(event.tokens for event in events if isinstance(event, SequenceEnded))


def states_of(engine: Engine) -> dict[tuple[int, ...], list[bytes]]:
    """All that is kept, bit by bit."""

    def told(prefix_cache: PrefixCache) -> dict[tuple[int, ...], list[bytes]]:
        nodes = [(node, node.record) for node in prefix_cache.index.nodes() if node.record is not None]
        return {tuple(node.tokens): serialise_record(prefix_cache.encoding.loose(record)) for node, record in nodes}

    return engine.kept._run(told)


def kept_of(prompt: tuple[int, ...], keep: float = 0.3, scores: Callable[..., PromptScores] = evenly) -> list[int]:
    positions: list[int] = select_tokens(scores(prompt), required_tokens(len(prompt)), keep).tolist()
    return positions


def first_gap(prompt: tuple[int, ...]) -> int:
    return next(offset for offset, token in enumerate(kept_of(prompt)) if token > offset)


def test_the_answer_is_what_stock_layers_write_where_the_rest_is_hidden(starting: Starting) -> None:
    prompt = some(420)
    kept = kept_of(prompt)
    assert len(kept) < 300
    wanted = written_by_stock("llama", prompt, kept, 3)
    assert list(tokens_of(starting(), ask(prompt, max_tokens=3))) == wanted
    assert wanted != written_by_stock("llama", prompt, range(420), 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "device"), KINDS, ids=lambda value: str(getattr(value, "kind", value)))
def test_a_prompt_in_pieces_is_answered_like_one_at_once_on_every_kind_of_layer(
    starting: Starting, kind: str, device: Any
) -> None:
    prompt = some(420)
    pair = [starting(kind, device=device, widest=widest, cache_bytes=0) for widest in (1024, 100)]
    told = [tokens_of(engine, ask(prompt, max_tokens=6)) for engine in pair]
    assert told[0] == told[1]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["llama", "window", "hybrid"])
def test_who_does_not_ask_never_meets_what_was_computed_in_part(starting: Starting, kind: str) -> None:
    prompt, engine = some(700), starting(kind)
    fresh = tokens_of(starting(kind), ask(prompt, None))
    thin = tokens_of(engine, ask(prompt))
    dense = answer(engine, ask(prompt, None))
    assert text_of(dense) == text_of(answer(starting(kind), ask(prompt, None)))
    assert next(event.tokens for event in dense if isinstance(event, SequenceEnded)) == fresh
    assert kind == "hybrid" or fresh != thin
    # Up to the first gap all that was computed is what anybody would have computed.
    assert ended(dense).usage.cached_tokens <= first_gap(prompt)
    assert ended(answer(engine, ask(prompt, None))).usage.cached_tokens >= 690


def test_the_same_prompt_asked_again_is_taken_over_and_not_scored_again(starting: Starting) -> None:
    scorer, prompt = Told(evenly), some(700)
    engine = starting(scorer=scorer)
    first = tokens_of(engine, ask(prompt))
    again = answer(engine, ask(prompt))
    assert next(event.tokens for event in again if isinstance(event, SequenceEnded)) == first
    assert len(scorer.asked) == 1
    assert ended(again).usage.cached_tokens == len(kept_of(prompt)) - 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "device"), KINDS, ids=lambda value: str(getattr(value, "kind", value)))
def test_the_whole_share_is_the_whole_prompt_and_the_very_same_states(
    starting: Starting, kind: str, device: Any
) -> None:
    prompt = some(150)
    # Prompts are cut by the clock, but for pieces of the least size, and what is computed is rounded as it is cut.
    engine, fresh = (starting(kind, device=device, widest=SMALLEST_CHUNK, threshold=100) for _ in range(2))
    whole = tokens_of(engine, ask(prompt, SpecPrefillRequest(keep=1.0)))
    tokens_of(fresh, ask(prompt, None))
    assert states_of(engine) == states_of(fresh) != {}
    dense = answer(engine, ask(prompt, None))
    assert next(event.tokens for event in dense if isinstance(event, SequenceEnded)) == whole
    assert ended(dense).usage.cached_tokens == 149


def test_usage_counts_what_was_sent_and_the_report_what_was_done(starting: Starting) -> None:
    prompt = some(700)
    events = answer(starting(), ask(prompt))
    assert ended(events).usage.prompt_tokens == 700
    told = report(events)
    assert (told.scorer, told.scored, told.kept, told.unused) == ("told", 700, len(kept_of(prompt)), None)
    assert 0 < told.scoring_s <= ended(events).timing.prefill


def test_limits_count_what_was_sent_however_little_of_it_is_kept(starting: Starting) -> None:
    engine = starting(context=720)
    with pytest.raises(ContextOverflow):
        engine.generate(ask(some(730)))
    events = answer(engine, ask(some(700), max_tokens=None))
    assert report(events).unused is None
    assert ended(events).usage.completion_tokens == 20


def test_a_grammar_holds_the_answer_behind_a_thinned_prompt(starting: Starting) -> None:
    with closing(Grammars(engines.tiny_tokenizer(), tiny.VOCAB)) as grammars:
        plan = grammars.choice(["neither of them"])
    events = answer(starting(), ask(some(700), max_tokens=60, grammar=plan, stop=Stop()))
    assert report(events).unused is None
    assert text_of(events) == "neither of them"


def test_decoding_goes_on_at_the_full_length_and_memory_holds_what_is_kept(starting: Starting) -> None:
    prompt, engine, seen = some(700), starting(), list[tuple[int, int, int]]()
    for _ in engine.generate(ask(prompt, max_tokens=40)):
        rows = engines.runner_of(engine).batch
        seen += [(row.row.length, row.row.position, row.reserved) for row in rows if row.row is not None]
    left = 700 - len(kept_of(prompt))
    behind = [each for each in seen if each[1] > 700]
    assert behind and all(position - length == left for length, position, _ in behind)
    assert all(reserved < 700 for _, _, reserved in seen)


@pytest.mark.parametrize("options", [{"n": 3}, {"sampling": Sampling(temperature=0.8, seed=3, repetition_penalty=1.2)}])
def test_answers_are_as_many_as_asked_for_and_their_prompt_is_scored_once(
    starting: Starting, options: dict[str, Any]
) -> None:
    scorer, prompt = Told(evenly), some(700)
    engine = starting(scorer=scorer)
    events = answer(engine, ask(prompt, **options))
    assert len([event for event in events if isinstance(event, SequenceEnded)]) == options.get("n", 1)
    assert len(scorer.asked) == 1
    assert text_of(events) == text_of(answer(starting(), ask(prompt, **{**options, "n": 1})))


def test_short_prompts_and_known_ones_are_computed_whole_and_the_report_says_why(starting: Starting) -> None:
    engine, prompt = starting(scorer=Told(evenly, longest=700)), some(700)
    assert report(answer(engine, ask(prompt[:299]))).unused == "below_threshold"
    answer(engine, ask(prompt, None))
    assert report(answer(engine, ask(prompt))).unused == "cached"
    scored = ask(prompt, sampling=Sampling(temperature=0.0, prompt_logprobs=0))
    assert report(answer(engine, scored)).unused == "unsupported"
    assert report(answer(engine, ask(some(701)))).unused == "unsupported"


def test_who_forces_it_is_thinned_out_however_short_his_prompt_and_what_is_new_of_it_are(starting: Starting) -> None:
    engine, forced = starting(), SpecPrefillRequest(forced=True)
    told = report(answer(engine, ask(some(250), forced)))
    assert told.unused is None and told.kept < told.scored == 250
    answer(engine, ask(some(700)[:500], None))
    told = report(answer(engine, ask(some(700), forced)))
    assert told.unused is None and told.kept < told.scored == 200
    # There is nothing that could be left out.
    assert report(answer(engine, ask(some(100), forced))).unused == "does_not_pay"
    answer(engine, ask(some(400), None))
    assert report(answer(engine, ask(some(400), forced))).unused == "cached"


def test_what_is_known_stays_whole_and_what_is_new_is_thinned_out(starting: Starting) -> None:
    engine, prompt = starting(), some(1200)
    answer(engine, ask(prompt[:600], None))
    events = answer(engine, ask(prompt))
    told = report(events)
    assert ended(events).usage.cached_tokens == 600
    assert told.scored == 600 and told.kept < 400


@pytest.mark.parametrize(("takes_s", "left"), [(0.5, "does_not_pay"), (0.3, None)])
def test_scoring_that_would_cost_more_than_it_saves_is_left(takes_s: float, left: str | None) -> None:
    now = 0.0

    def slowly(prompt: tuple[int, ...]) -> PromptScores:
        nonlocal now
        now += takes_s
        return evenly(prompt)

    costs, scorer = StepCosts(), Told(slowly)
    costs.observe_prefill(1000, 1000.0)  # so leaving out 400 tokens of 700 saves 0.4 s
    offer = SpecPrefillSetup(scorer, threshold=300, keep=0.3)
    specprefill = SpecPrefill(offer, costs, draft_model(cache_bytes=0).prefix_cache, 0, clock=lambda: now)
    prompts = [some(700, seed) for seed in range(5)]
    waiting = [Running(ask(prompt), 0, ticket, prompt, 1, 0) for ticket, prompt in enumerate(prompts)]
    for sequence in waiting:
        while not specprefill.ready(sequence):
            specprefill.advance(sequence, seconds=1.0)
    told = [sequence.specprefill for sequence in waiting if sequence.specprefill is not None]
    assert [each.unused for each in told] == [None, None, None, left, left]
    assert [each.scoring_s for each in told[:3]] == [pytest.approx(takes_s)] * 3


def test_a_request_that_is_cancelled_while_it_is_scored_leaves_nothing(starting: Starting) -> None:
    scorer = Told(evenly, pieces=1_000_000)
    engine = starting(scorer=scorer)
    request = ask(some(700))
    stream = engine.generate(request)
    while not scorer.asked:
        pass
    engine.cancel(request.id)
    last = [event for batch in stream for event in batch][-1]
    assert isinstance(last, Failed) and isinstance(last.error, Cancelled)
    answer(engine, ask(some(50), None))
    assert scorer.open == 0


def test_a_scorer_that_fails_ends_its_request_alone(starting: Starting) -> None:
    def failing(prompt: tuple[int, ...]) -> PromptScores:
        raise RuntimeError("no idea")

    engine = starting(scorer=Told(failing))
    assert isinstance(answer(engine, ask(some(700)))[-1], Failed)
    ended(answer(engine, ask(some(700), None)))


def test_a_preempted_sequence_goes_on_with_what_was_kept(starting: Starting, reserved_by_page: None) -> None:
    prompts = [some(700, seed) for seed in range(2)]
    engine = starting(cache_bytes=0)
    wanted = [text_of(answer(engine, ask(prompt, max_tokens=150))) for prompt in prompts]
    most = len(kept_of(prompts[0])) + 100
    tight = starting(memory=engines.tight_memory(engine, rows=2, tokens=most), cache_bytes=0)
    texts, seen = engines.preempted(tight, [ask(prompt, max_tokens=150) for prompt in prompts])
    assert texts == wanted and seen


def test_a_cache_report_counts_in_tokens_of_what_was_sent(starting: Starting) -> None:
    engine, prompt = starting(), some(700)
    answer(engine, ask(prompt))
    [told] = ended(answer(engine, ask(prompt))).cache
    assert (told.prompt_tokens, told.known) == (700, 700) and told.matched == len(kept_of(prompt)) - 1


def test_guesses_behind_a_thinned_prompt_change_nothing(starting: Starting) -> None:
    prompt = some(60) * 8
    plain = answer(starting(), ask(prompt, max_tokens=40))
    drafts = answer(starting(proposers=[LookupProposer()], fixed_draft_tokens=4), ask(prompt, max_tokens=40))
    assert text_of(drafts) == text_of(plain)
    assert ended(drafts).speculation.proposed > 0 == ended(plain).speculation.proposed
    assert report(drafts).kept == report(plain).kept < 480


def test_thinned_prompts_run_beside_whole_ones_as_they_would_alone(starting: Starting) -> None:
    engine, prompts = starting(cache_bytes=0), [some(420, seed) for seed in range(4)]
    asks = [ask(prompt, SpecPrefillRequest() if number % 2 else None) for number, prompt in enumerate(prompts)]
    alone = [text_of(answer(engine, replace(request, id=f"{request.id} alone"))) for request in asks]
    streams = [engine.generate(request) for request in asks]
    assert [text_of([event for batch in stream for event in batch]) for stream in streams] == alone


def test_nobody_to_score_is_refused() -> None:
    engine = engines.start("llama")
    try:
        with pytest.raises(Unsupported, match="--specprefill"):
            engine.generate(ask(some(700)))
    finally:
        engine.close()


def test_exact_and_in_part_cannot_both_be_asked_for(starting: Starting) -> None:
    with pytest.raises(BadRequest, match="exact"):
        starting().generate(ask(some(700), exact=True))


def test_windows_are_whole_behind_the_prompt(starting: Starting) -> None:
    assert tiny.CONFIGS["window"]["sliding_window"] < 64  # which is kept in any case
    flags = required_tokens(1000, window=512)
    assert np.flatnonzero(~flags).max() < 1000 - 512


def measured(*scoring_s: float) -> ScoringPayoff:
    """A millisecond a token to compute, and so long to score 1,000."""
    costs = StepCosts()
    costs.observe_prefill(1000, 1000.0)
    payoff = ScoringPayoff(costs)
    for seconds in scoring_s:
        payoff.observe(1000, seconds)
    return payoff


def test_nothing_pays_where_nothing_could_be_left_out() -> None:
    assert not ScoringPayoff(StepCosts()).pays(1000, 1000, 1000)


def test_what_is_not_measured_is_tried() -> None:
    assert ScoringPayoff(StepCosts()).pays(1000, 300, 1000)
    assert measured().pays(1000, 300, 1000)


def test_the_first_prompt_does_not_count_and_of_the_next_the_quickest() -> None:
    assert measured(5.0).pays(1000, 300, 1000)
    assert not measured(0.1, 0.8, 0.9).pays(1000, 300, 1000)
    assert measured(5.0, 0.8, 0.6).pays(1000, 300, 1000)


def test_a_scorer_that_has_read_most_of_it_before_pays() -> None:
    payoff = measured(1.0, 1.0, 1.0)
    assert not payoff.pays(1000, 300, 1000) and payoff.pays(1000, 300, 600)


def test_a_policy_asks_what_is_known_beforehand_until_there_are_measurements() -> None:
    """What was measured once may be a compilation."""
    dear, cheap = (ScoringPayoff(StepCosts(), expected_cost=cost) for cost in (0.8, 0.1))
    for payoff in (dear, cheap):
        payoff.observe(1000, 50.0)
    assert [dear.pays(1000, 300, 1000, proven=True) for _ in range(2 * TRIED_AGAIN_AFTER)] == [False] * 16
    assert cheap.pays(1000, 300, 1000, proven=True) and dear.pays(1000, 300, 100, proven=True)


def test_a_policy_believes_what_was_measured() -> None:
    assert not measured(50.0, 0.8, 0.9).pays(1000, 300, 1000, proven=True)
    assert measured(50.0, 0.6, 0.7).pays(1000, 300, 1000, proven=True)


def test_a_policy_thins_out_prompts_from_the_threshold_on_and_the_report_says_that_it_did(starting: Starting) -> None:
    engine, auto = starting(), SpecPrefillRequest(auto=True)
    found = report(answer(engine, ask(some(700), auto)))
    assert found.auto and found.lossy and found.kept == len(kept_of(some(700)))
    assert tokens_of(engine, ask(some(701), auto)) == tokens_of(starting(), ask(some(701)))
    short = report(answer(engine, ask(some(299), auto)))
    assert short.unused == "below_threshold" and not short.lossy and not short.may_vary


def test_a_policy_leaves_prompts_whole_where_the_scorer_is_about_as_large_as_the_model() -> None:
    scorer = Told(evenly)
    engine = start("llama", lambda: scorer, expected_cost=1.0)
    try:
        found = report(answer(engine, ask(some(700), SpecPrefillRequest(auto=True))))
        assert (found.unused, found.may_vary, scorer.asked) == ("does_not_pay", True, [])
        assert report(answer(engine, ask(some(700, 1)))).unused is None, "who asks for it has it tried"
    finally:
        engine.close()


def test_a_quality_decides_for_each_prompt_how_much_is_kept_and_a_share_that_is_asked_for_goes_first() -> None:
    def focused(prompt: tuple[int, ...]) -> PromptScores:
        """All attention that matters is on as many of the best chunks as the first token says."""
        mass = np.zeros(len(prompt), np.float32)
        for chunk in range(prompt[0]):
            mass[7 * 32 * (chunk + 1) : 7 * 32 * (chunk + 1) + 32] = 1.0
        return mass

    engine = start("llama", lambda: Told(evenly, mass=focused), quality=0.99)
    try:
        for chunks in (1, 3, 2):
            prompt = (chunks, *some(1199, chunks))
            found = report(answer(engine, ask(prompt)))
            assert found.kept == int(required_tokens(1200).sum()) + 32 * chunks
            assert found.mass == pytest.approx(1.0)
        found = report(answer(engine, ask((4, *some(1199, 9)), SpecPrefillRequest(keep=0.05))))
        assert found.kept == int(required_tokens(1200).sum()) + 32 * 2
        assert found.mass == pytest.approx(2 / 4)
    finally:
        engine.close()


BY_NAME: dict[str, dict[str, Any]] = {
    "nemotron_h": tiny.CONFIGS["kernel-mamba-packed"],  # without RoPE, next to recurrent layers
    "gpt_oss": family_configs.config("gpt_oss") | {"sliding_window": 100},  # windows, sinks and a mixture
}
by_name = pytest.mark.parametrize("name", BY_NAME)


def named_prompt(name: str) -> tuple[int, ...]:
    return tuple(1 + token % (BY_NAME[name]["vocab_size"] - 1) for token in some(420))


@by_name
def test_nemotron_h_and_gpt_oss_answer_thinned_prompts_by_the_rules_of_every_device(
    name: str, rules: str, starting: Starting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.CONFIGS, name, BY_NAME[name])
    prompt, window = named_prompt(name), BY_NAME[name].get("sliding_window", 0)
    engine, another = starting(name), starting(name, widest=100, cache_bytes=0)
    events = answer(engine, ask(prompt, max_tokens=6))
    [tokens] = [event.tokens for event in events if isinstance(event, SequenceEnded)]
    kept = select_tokens(evenly(prompt), required_tokens(420, window=window), 0.3).tolist()
    assert report(events).kept == len(kept) < 300 and set(range(420 - window, 420)) <= set(kept)
    assert tokens_of(another, ask(prompt, max_tokens=6)) == tokens, "in pieces"
    if name == "nemotron_h":  # nothing in it knows positions, so that it answers as to what is kept alone
        assert tokens_of(another, ask([prompt[at] for at in kept], None, max_tokens=6)) == tokens
    again = answer(engine, ask(prompt, max_tokens=6))
    assert ended(again).usage.cached_tokens > 0
    assert next(event.tokens for event in again if isinstance(event, SequenceEnded)) == tokens
    whole = [tokens_of(each, ask(prompt, None, max_tokens=6)) for each in (engine, another)]
    assert whole[0] == whole[1], "who does not ask meets nothing that was computed in part"


@by_name
def test_nemotron_h_and_gpt_oss_score_prompts_by_the_rules_of_every_device(
    name: str, rules: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tiny.CONFIGS, name, BY_NAME[name])
    scorer, prompt = DraftScorer(draft_model(name)), named_prompt(name)
    work = scorer.score(Running(ask(prompt), 0, 0, prompt, 1, 0))
    with pytest.raises(StopIteration) as done:
        while True:
            next(work)
    scores, mass = done.value.value
    assert scores.shape == mass.shape == (420,) and np.isfinite(scores).all() and scores.max() > scores.min()
    scorer.check()


def test_of_many_that_would_not_pay_one_is_scored_since_that_may_change() -> None:
    payoff = measured(1.0, 1.0, 1.0)
    told = [payoff.pays(1000, 300, 1000) for _ in range(2 * TRIED_AGAIN_AFTER)]
    assert told == 2 * [*[False] * (TRIED_AGAIN_AFTER - 1), True]
    payoff.observe(1000, 0.1)
    assert payoff.pays(1000, 300, 1000)
