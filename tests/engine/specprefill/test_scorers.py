"""Prompts that are read without seeing all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from math import ceil
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from bench.random_models import write_tokenizer
from ingot.cache import attention_state
from ingot.cache.attention_state import WindowState
from ingot.cache.forward_batch import ForwardPart
from ingot.cache.pages import PAGE
from ingot.engine.engine import Engine
from ingot.engine.request import Request
from ingot.engine.sequence import PromptMedia, TokenSequence
from ingot.engine.specprefill.prefill import SpecPrefillSetup
from ingot.engine.specprefill.scorers import (
    CONCENTRATED,
    LOOKAHEAD_TOKENS,
    NAMED_WEIGHT,
    SLICE_PAGES,
    TAIL_TOKENS,
    TOKENS_BEHIND,
    AttentionCapture,
    DraftScorer,
    NarrowedAttention,
    TranslatedScorer,
    concentrated,
    named_scores,
    rarity_scores,
    sum_by_chunks,
)
from ingot.engine.specprefill.selection import CHUNK_TOKENS, PromptScores
from ingot.engine.speculation.draft_model import CATCH_UP_TOKENS, LONGEST_DRAFT_PASS, DraftModel, DraftModelProposer
from ingot.errors import ModelError
from ingot.kernels.cpu import native
from ingot.kernels.device import Device, current_device
from ingot.kernels.paged_attention.kernels import PagedAttention
from ingot.models.adapter import ModelAdapter, adapt_model
from ingot.models.layers.fused_layers import FusedLayers, LayerStandIn
from ingot.models.precision import settle_precision
from ingot.text.tokenizer.tokenizer import PromptTranslation, Tokenizer
from tests import engines, tiny
from tests.engine.specprefill.world import Told, ask, draft_model, evenly, report, some
from tests.engines import answer
from tests.memory import pretended
from tests.one_path import one_path

__all__ = ["one_path"]

METAL = Device("metal", "a CPU that follows a GPU's rules", 1 << 34)
PLACES: list[tuple[str, Device | None, mx.Dtype]] = [
    ("llama", None, mx.float32),  # all layers as one operation
    ("moe", None, mx.float32),  # each one's attention
    ("kernel", engines.GPU, mx.float32),  # gathered
    ("kernel", engines.GPU, mx.float16),  # by the kernel for prompts
    ("kernel", METAL, mx.float16),  # gathered
]
PIECES = [200, 66]


def fewer(monkeypatch: pytest.MonkeyPatch, *, seen: int, newest: int) -> None:
    monkeypatch.setattr(attention_state, "SPARSE_FROM_TOKENS", 0)
    monkeypatch.setattr(attention_state, "SEEN_PAGES", seen)
    monkeypatch.setattr(attention_state, "NEWEST_PAGES", newest)


def read(
    kind: str, device: Device | None, dtype: mx.Dtype, prompt: tuple[int, ...], pieces: Sequence[int] = PIECES
) -> mx.array:
    """The logits behind it, read in pieces."""
    model, here = tiny.build(kind), device or current_device()
    model.set_dtype(dtype)
    settle_precision(model, here, None)
    adapter = adapt_model(model, tiny.CONFIGS[kind], here)
    adapter.allow_separate_layers()
    rows, begin = adapter.new_batch_state(), 0
    row = rows.new()
    narrowing = NarrowedAttention(rows, row)
    for width in pieces:
        tokens = mx.array(prompt[begin : begin + width], dtype=mx.uint32)
        with narrowing:
            logits = adapter.run(rows, tokens, [ForwardPart((row,), width)], [width - 1])
        mx.eval(logits, rows.pending())
        begin += width
    assert begin == len(prompt)
    rows.leave(row)
    return logits[-1].astype(mx.float32)


def by_stock_layers(kind: str, prompt: tuple[int, ...], newest: int) -> mx.array:
    """The same by mlx-lm's own layers, with what is not seen hidden: all but the first page and the newest."""
    model, count, begin = tiny.build(kind), len(prompt), 0
    mask = np.tril(np.ones((count, count), bool))
    for width in PIECES:
        full = begin // PAGE
        if full > newest + 1:
            mask[begin : begin + width, PAGE : (full - newest) * PAGE] = False
        begin += width
    x = model.model.embed_tokens(mx.array([prompt]))
    for layer in model.model.layers:
        x = layer(x, mx.array(mask), None)
    x = model.model.norm(x)[0, -1]
    return model.lm_head(x) if "lm_head" in model else model.model.embed_tokens.as_linear(x)


def distance(one: mx.array, other: mx.array) -> float:
    return float(mx.abs(one - other).max().item() / mx.abs(other).max().item())


@pytest.mark.parametrize(("kind", "device", "dtype"), PLACES, ids=lambda value: str(getattr(value, "kind", value)))
def test_tokens_see_the_first_page_the_newest_and_themselves(
    monkeypatch: pytest.MonkeyPatch, kind: str, device: Any, dtype: mx.Dtype
) -> None:
    fewer(monkeypatch, seen=2, newest=1)
    prompt, lengths, attend = some(sum(PIECES)), list[int](), PagedAttention.attend

    def watched(self: PagedAttention, queries: mx.array, rows: Any, *rest: Any) -> mx.array:
        lengths.extend(length for length, _ in rows.spans)
        return attend(self, queries, rows, *rest)

    monkeypatch.setattr(PagedAttention, "attend", watched)
    apart = distance(read(kind, device, dtype, prompt), by_stock_layers(kind, prompt, newest=1))
    assert apart < (0.002 if dtype == mx.float32 else 0.02)
    if device is engines.GPU and dtype == mx.float16:  # the kernel for prompts read so many places, in both layers
        assert lengths[-2:] == 2 * [2 * PAGE + PIECES[0] % PAGE + PIECES[1]]


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
@pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
def test_native_attention_chooses_what_others_choose(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    pieces = [350, 130]
    fewer(monkeypatch, seen=4, newest=1)
    prompt = some(sum(pieces))
    natively = read(kind, None, mx.float32, prompt, pieces)
    monkeypatch.setenv("INGOT_KERNELS", "mlx")
    plainly = read(kind, None, mx.float32, prompt, pieces)
    fewer(monkeypatch, seen=2, newest=1)
    otherwise = read(kind, None, mx.float32, prompt, pieces)
    assert distance(natively, plainly) < 0.002 < 0.005 < distance(otherwise, plainly)


@pytest.mark.skipif(not native.available(), reason=f"{native.advice()}")
def test_layers_that_are_one_operation_stay_so_while_they_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    fewer(monkeypatch, seen=2, newest=1)
    choices, spans = list[Any](), native.attention_spans

    def watched(*given: Any) -> Any:
        choices.append(given[-1])
        return spans(*given)

    monkeypatch.setattr(native, "attention_spans", watched)
    monkeypatch.delattr(LayerStandIn, "by_itself")
    read("llama", None, mx.float32, some(sum(PIECES)))
    assert choices[-2:] == [None, (2, 1, attention_state.QUERY_STRIDE)]  # of each piece, once for all layers


@pytest.mark.parametrize(("kind", "device"), [("llama", None), ("kernel", engines.GPU)])
def test_nobody_asks_what_to_see_as_long_as_all_is_seen(
    monkeypatch: pytest.MonkeyPatch, kind: str, device: Any
) -> None:
    monkeypatch.setenv("INGOT_KERNELS", "mlx")
    asked, choose = list[int](), attention_state.PageSelection.__call__

    def counted(choice: attention_state.PageSelection, queries: mx.array, scale: float, start: int) -> mx.array | None:
        asked.append(start)
        return choose(choice, queries, scale, start)

    monkeypatch.setattr(attention_state.PageSelection, "__call__", counted)
    read(kind, device, mx.float32, some(sum(PIECES)))
    assert asked == []
    fewer(monkeypatch, seen=2, newest=1)
    read(kind, device, mx.float32, some(sum(PIECES)))
    assert set(asked) == {PIECES[0]}


def test_what_is_hidden_matters() -> None:
    prompt = some(sum(PIECES))
    whole = read("llama", None, mx.float32, prompt)
    assert distance(whole, by_stock_layers("llama", prompt, newest=1)) > 0.02


TICKETS = count()
KINDS = [("llama", None), ("window", None), ("hybrid", None), ("moe", None), ("kernel", engines.GPU)]


def sequence(prompt: tuple[int, ...], **asked: Any) -> TokenSequence:
    number = next(TICKETS)
    return TokenSequence(Request(f"r{number}", (prompt,), **asked), 0, number, prompt, 100, 0)


def scored(scorer: DraftScorer, own: TokenSequence) -> tuple[PromptScores, int]:
    """The scores, and in how many pieces they came."""
    scoring, pieces = scorer.score(own), 0
    while True:
        try:
            next(scoring)
            pieces += 1
        except StopIteration as done:
            return done.value.scores, pieces


def guessed(draft: DraftModelProposer, row: TokenSequence) -> bool:
    """Whether it guesses something, once it has read."""
    for _ in range(4):
        assert draft.offers([row]) != [None]
        if draft.propose([row], [2])[0].tokens:
            return True
    return False


def summed_by_chunks(shares: np.ndarray) -> np.ndarray:
    """Chunk by chunk."""
    begins = range(0, shares.shape[-1], CHUNK_TOKENS)
    return np.stack([shares[..., begin : begin + CHUNK_TOKENS + TOKENS_BEHIND].sum(-1) for begin in begins], axis=-1)


def written(model: Any, prompt: tuple[int, ...], count: int = LOOKAHEAD_TOKENS) -> list[int]:
    """The prompt, and the likeliest tokens behind it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    return tokens


def by_stock_layers_of_draft_scorer(kind: str, prompt: tuple[int, ...], ahead: int = LOOKAHEAD_TOKENS) -> np.ndarray:
    """The scores by mlx-lm's own layers, from all queries and keys at once."""
    model = tiny.build(kind, seed=1)
    tokens = written(model, prompt, ahead)
    x, best = model.model.embed_tokens(mx.array([tokens])), np.zeros(0)
    for layer in model.model.layers:
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        heads, shared = attention.n_heads, attention.n_kv_heads
        queries, keys = (
            attention.rope(made.reshape(1, len(tokens), many, -1).swapaxes(1, 2))[0]
            for made, many in ((attention.q_proj(normed), heads), (attention.k_proj(normed), shared))
        )
        keys = mx.repeat(keys[:, : len(prompt)], heads // shared, axis=0)
        shares = mx.softmax(attention.scale * queries[:, len(prompt) - 1 :] @ keys.swapaxes(-1, -2), axis=-1)
        seen = summed_by_chunks(np.array(shares)).max(0)
        best = np.maximum(best, seen) if best.size else seen
        x = layer(x, "causal", None)
    return np.repeat(best.max(0), CHUNK_TOKENS)[: len(prompt)] + NAMED_WEIGHT * named_scores(prompt)


def test_scores_are_what_the_newest_tokens_attend_to_most_in_any_layer_and_head() -> None:
    prompt = some(200)
    result, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    np.testing.assert_allclose(result, by_stock_layers_of_draft_scorer("llama", prompt), rtol=0.02, atol=1e-5)


@pretended
def test_layers_that_are_one_operation_stay_so_but_for_the_tokens_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths, by_itself = draft_model(), list[int](), LayerStandIn.by_itself

    def watched(layer: LayerStandIn, x: mx.array, mask: Any, state: Any) -> mx.array:
        widths.append(x.shape[1])
        return by_itself(layer, x, mask, state)

    scorer = DraftScorer(model)
    monkeypatch.setattr(LayerStandIn, "by_itself", watched)
    scored(scorer, sequence(some(700)))
    assert any(isinstance(module, FusedLayers) for module in model.adapter.model.modules())
    assert widths == [LOOKAHEAD_TOKENS + 1] * len(model.rows.states)


def test_layers_that_forget_are_not_asked() -> None:
    rows = draft_model("window").rows
    asked = AttentionCapture(rows).layers
    assert asked and {type(state) for state in rows.states if state not in asked} == {WindowState}


@pytest.mark.parametrize("kind", ["llama", "hybrid"])
def test_what_would_follow_the_end_of_an_answer_does_not_ask(kind: str) -> None:
    prompt, scorer = some(200), DraftScorer(draft_model(kind))
    ends = written(tiny.build(kind, seed=1), prompt, 3)[-1:]
    own = sequence(prompt)
    own.stop_tokens = frozenset(ends)
    cut, _ = scored(scorer, own)
    whole, _ = scored(scorer, sequence(prompt))
    assert (cut <= whole + 1e-6).all() and (cut < whole - 1e-6).any()
    if kind == "llama":
        np.testing.assert_allclose(cut, by_stock_layers_of_draft_scorer(kind, prompt, 3), rtol=0.02, atol=1e-5)


def test_pieces_are_longer_where_they_take_next_to_nothing_and_shorter_where_others_would_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer = DraftScorer(draft_model(widest=LONGEST_DRAFT_PASS))

    def pieces(quick_s: float, slow_s: float) -> int:
        monkeypatch.setattr("ingot.engine.specprefill.scorers.QUICK_S", quick_s)
        monkeypatch.setattr("ingot.engine.specprefill.scorers.SLOW_S", slow_s)
        return scored(scorer, sequence(some(1700), cache=False))[1] - 1  # without what is written

    assert pieces(60, 60) == 3  # of 512, 1,024 and the rest
    assert pieces(0, 60) == 1
    assert [pieces(0, 0) for _ in range(3)] == [1, 3, ceil(1699 / CATCH_UP_TOKENS)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "device"), KINDS, ids=lambda value: str(getattr(value, "kind", value)))
def test_every_family_whose_attention_is_known_can_score_and_leaves_nothing_behind(kind: str, device: Any) -> None:
    model, prompt = draft_model(kind, device), some(700)
    scorer = DraftScorer(model)
    result, pieces = scored(scorer, sequence(prompt))
    assert result.shape == (700,) and np.isfinite(result).all() and 0 < result.max() <= 1 + NAMED_WEIGHT and pieces >= 3
    scorer.check()
    assert model.rows.count == 0


def test_a_next_turn_is_read_from_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, prompt, seen, run = DraftScorer(draft_model()), some(900), list[int](), ModelAdapter.run

    def counting(self: ModelAdapter, rows: Any, tokens: mx.array, *rest: Any, **more: Any) -> Any:
        seen.append(tokens.size)
        return run(self, rows, tokens, *rest, **more)

    monkeypatch.setattr(ModelAdapter, "run", counting)
    scored(scorer, sequence(prompt[:800]))
    assert sum(seen) == 800 + 2 * LOOKAHEAD_TOKENS
    seen.clear()
    again = sequence(prompt)
    assert scorer.unread(again) == 100
    result, _ = scored(scorer, again)
    assert sum(seen) == 100 + 2 * LOOKAHEAD_TOKENS
    anew, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    np.testing.assert_allclose(result, anew, rtol=0.02, atol=1e-5)


def test_scoring_that_is_given_up_leaves_no_row_and_what_was_read() -> None:
    scorer, own = DraftScorer(draft_model()), sequence(some(2000))
    scoring = scorer.score(own)
    next(scoring)
    next(scoring)
    scoring.close()
    scorer.check()
    assert scorer.unread(own) <= 2000 - 512


def test_who_guesses_gives_way_to_who_scores() -> None:
    one = draft_model()
    room = one.budget.row_bytes(1536)
    aside = 1 - one.budget.states / (1 << 26)
    model = draft_model(states=int(1.4 * room / (1 - aside)))
    draft, scorer = DraftModelProposer(model, vocab=tiny.VOCAB), DraftScorer(model)
    row = sequence(some(900))
    assert guessed(draft, row)
    assert model.rows.count == 1
    result, _ = scored(scorer, sequence(some(1400)))
    assert result.shape == (1400,) and model.rows.count == 0
    assert guessed(draft, row)


def test_memory_that_the_next_prompt_needs_is_given_back_when_something_else_ran() -> None:
    model = draft_model("kernel", engines.GPU, cache_bytes=0)
    scorer = DraftScorer(model)
    scored(scorer, sequence(some(300)))
    scorer.rest()
    assert model.rows.nbytes > 0
    scorer.rest()
    assert model.rows.nbytes == 0


def test_what_one_has_read_the_other_need_not_read() -> None:
    model = draft_model()
    draft, scorer = DraftModelProposer(model, vocab=tiny.VOCAB), DraftScorer(model)
    scored(scorer, sequence(some(900)))
    row = sequence(some(900))
    draft.offers([row])
    assert draft.propose([row], [2])[0].tokens  # at once: 900 tokens take more than one step
    draft.forget(row)
    assert scorer.unread(sequence(some(900))) == 1


def test_a_prompt_that_is_too_long_for_the_draft_is_none_that_it_can_score() -> None:
    scorer = DraftScorer(draft_model(states=1 << 19))
    assert scorer.able(sequence(some(100)))
    assert not scorer.able(sequence(some(4090))) and not scorer.able(sequence(some(4000)))


def test_a_model_whose_layers_tell_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: DraftModel = draft_model()
    monkeypatch.setattr(ModelAdapter, "mixed", False, raising=False)
    object.__setattr__(model.adapter, "mixed", False)
    with pytest.raises(ModelError, match="cannot score prompts"):
        DraftScorer(model)
    assert model.rows.count == 0


def test_a_chunk_is_named_by_the_rarest_of_its_tokens_that_stand_at_the_end() -> None:
    prompt = (*([1] * 40), 7, *([2] * 60), 8, *([1] * 98), *([3] * 62), 7, 2)
    result = named_scores(prompt)
    assert set(result[32:64]) == {0.5} and set(result[64:96]) == {np.float32(1 / 61)}
    assert set(result[:32]) == set(result[128:160]) == {0.0}


@pytest.mark.parametrize("tokens", [20, 64, 150])
def test_a_chunk_has_what_its_tokens_and_the_first_behind_it_are_given(tokens: int) -> None:
    shares = mx.random.uniform(shape=(2, 3, tokens), key=mx.random.key(0))
    np.testing.assert_allclose(np.array(sum(sum_by_chunks(shares))), summed_by_chunks(np.array(shares)), atol=1e-5)


def test_attention_counts_as_mass_where_it_is_concentrated_and_not_where_it_is_even() -> None:
    assert not concentrated(mx.full((2, 3, 40), 1 / 40)).any()
    peak = mx.zeros((2, 1, 40))
    peak[0, 0, 3], peak[1, 0, 5] = 0.5, CONCENTRATED / 40
    mass = np.array(concentrated(peak))
    assert np.flatnonzero(mass).tolist() == [3]
    assert mass[3] == pytest.approx((0.5 - CONCENTRATED / 40) / 2)


def test_a_draft_says_how_much_attention_each_token_has_in_our_tokens_too() -> None:
    scoring = TranslatedScorer(DraftScorer(draft_model()), frozenset({7})).score(sequence_of_translated_scorer(TWICE))
    with pytest.raises(StopIteration) as done:
        while True:
            next(scoring)
    scores, mass = done.value.value
    assert scores.shape == mass.shape == (50,) and (mass >= 0).all()


def test_keys_of_several_slices_are_scored_like_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = some(500)
    whole, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    assert SLICE_PAGES * 64 > 500
    monkeypatch.setattr("ingot.engine.specprefill.scorers.SLICE_PAGES", 2)
    sliced, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    np.testing.assert_allclose(sliced, whole, rtol=1e-4, atol=1e-7)


def test_a_token_counts_where_the_end_has_it_and_the_more_the_rarer_it_is() -> None:
    prompt = (*([1] * 50), 7, *([2] * 50), 8, *([3] * (TAIL_TOKENS - 2)), 7, 1)
    scores = rarity_scores(prompt)
    assert scores.shape == (len(prompt),) and scores.dtype == np.float32
    assert scores[50] == 0.5, "7 is there twice, and once at the end"
    assert scores[101] == 0 and scores[60] == 0, "8 and 2 are not at the end"
    assert scores[0] == np.float32(1 / 51)


def test_an_end_that_is_all_of_it_is_scored_by_how_rare_its_tokens_are() -> None:
    np.testing.assert_allclose(rarity_scores((4, 4, 5)), [0.5, 0.5, 1.0])


TWICE = PromptTranslation(tuple(number for token in range(50) for number in (token, 99)), tuple(range(2, 102, 2)))
"""Of a prompt of fifty tokens: each of them is two of theirs."""


def sequence_of_translated_scorer(
    translated: PromptTranslation, prompt: tuple[int, ...] = tuple(range(50))
) -> TokenSequence:
    made = TokenSequence(Request("r", (prompt,)), 0, 0, prompt, 10, 0, frozenset({3}))
    made.marks, made.translated = frozenset({10}), translated
    return made


def test_who_scores_reads_its_own_tokens_and_what_it_says_comes_back_in_ours() -> None:
    inner = Told(lambda prompt: np.arange(len(prompt), dtype=np.float32))
    scoring = TranslatedScorer(inner, frozenset({7})).score(sequence_of_translated_scorer(TWICE))
    with pytest.raises(StopIteration) as done:
        while True:
            next(scoring)
    assert inner.asked == [TWICE.tokens]
    np.testing.assert_allclose(done.value.value.scores, np.arange(0.5, 100, 2))


def test_ends_of_messages_and_of_answers_are_told_in_theirs() -> None:
    own = TranslatedScorer(Told(evenly), frozenset({7}))._own(sequence_of_translated_scorer(TWICE))
    assert own.marks == {20} and own.stop_tokens == {7}


def test_a_prompt_without_text_is_none_that_it_can_score() -> None:
    scorer = TranslatedScorer(Told(evenly), frozenset())
    assert scorer.able(sequence_of_translated_scorer(TWICE)) and not scorer.able(
        sequence_of_translated_scorer(PromptTranslation((), (0, 0)), (1, 2))
    )


def test_a_prompt_that_shows_something_is_none_that_it_can_score() -> None:
    shown = sequence_of_translated_scorer(TWICE)
    shown.prompt_media = PromptMedia(())
    assert not TranslatedScorer(Told(evenly), frozenset()).able(shown)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """One whose draft has fewer tokens than the target."""
    write_tokenizer(tmp_path, 110)
    theirs, ours = Tokenizer.load(tmp_path), engines.tiny_tokenizer()

    def offer() -> SpecPrefillSetup:
        scorer = TranslatedScorer(DraftScorer(draft_model()), theirs.eos_ids)
        return SpecPrefillSetup(scorer, 300, 0.3, lambda prompt: PromptTranslation.of(prompt, ours, theirs))

    made = engines.start("llama", specprefill=offer, cache_bytes=1 << 26)
    yield made
    made.check()
    made.close()


def test_prompts_are_thinned_out_by_a_draft_of_another_tokenizer(engine: Engine) -> None:
    result = report(answer(engine, ask(some(600))))
    assert result.unused is None and result.scored == 600 and result.kept < 400
    assert report(answer(engine, ask(some(600)))).reused == 600


def test_a_next_turn_is_read_from_where_the_last_one_ended_in_theirs_too(engine: Engine) -> None:
    prompt = some(600)
    tokens = answer(engine, ask(prompt))
    assert report(tokens).scored == 600
    offer = engine._loaded.specprefill
    assert offer is not None and offer.translate is not None
    turn = TokenSequence(Request("t", ((*prompt, *some(100, 1)),)), 0, 0, (*prompt, *some(100, 1)), 10, 0)
    turn.translated = offer.translate(turn.prompt)
    unread = engine.kept._run(lambda _: offer.scorer.unread(turn))
    assert 0 < unread <= 110 < len(turn.translated.tokens)
