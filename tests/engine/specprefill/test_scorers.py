"""What a draft attends to."""

from __future__ import annotations

from itertools import count
from math import ceil
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from ingot.cache.attention_state import WindowState
from ingot.engine.draft_model import AT_ONCE, CATCH_UP, DraftModel
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.sparse.attention_scores import BEHIND, SLICE, Onlookers, by_chunks
from ingot.engine.specprefill.scorers import AHEAD, NAMED, DraftScorer, named
from ingot.engine.specprefill.selection import CHUNK, Scores
from ingot.engine.speculation.draft_model import Draft
from ingot.errors import ModelError
from ingot.models.adapter import Adapter
from ingot.models.layers.fused_layers import FusedLayers, OwnLayer
from tests import engines, tiny
from tests.engine.specprefill.world import draft_model, some
from tests.memory import pretended

TICKETS = count()
KINDS = [("llama", None), ("window", None), ("hybrid", None), ("moe", None), ("kernel", engines.GPU)]


def sequence(prompt: tuple[int, ...], **asked: Any) -> Sequence:
    number = next(TICKETS)
    return Sequence(Request(f"r{number}", (prompt,), **asked), 0, number, prompt, 100, 0)


def scored(scorer: DraftScorer, own: Sequence) -> tuple[Scores, int]:
    """The scores, and in how many pieces they came."""
    scoring, pieces = scorer.score(own), 0
    while True:
        try:
            next(scoring)
            pieces += 1
        except StopIteration as done:
            return done.value, pieces


def guessed(draft: Draft, row: Sequence) -> bool:
    """Whether it guesses something, once it has read."""
    for _ in range(4):
        assert draft.offers([row]) != [None]
        if draft.propose([row], [2])[0].tokens:
            return True
    return False


def summed_by_chunks(shares: np.ndarray) -> np.ndarray:
    """Chunk by chunk."""
    begins = range(0, shares.shape[-1], CHUNK)
    return np.stack([shares[..., begin : begin + CHUNK + BEHIND].sum(-1) for begin in begins], axis=-1)


def written(model: Any, prompt: tuple[int, ...], count: int = AHEAD) -> list[int]:
    """The prompt, and the likeliest tokens behind it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1])))
    return tokens


def by_stock_layers(kind: str, prompt: tuple[int, ...], ahead: int = AHEAD) -> np.ndarray:
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
    return np.repeat(best.max(0), CHUNK)[: len(prompt)] + NAMED * named(prompt)


def test_scores_are_what_the_newest_tokens_attend_to_most_in_any_layer_and_head() -> None:
    prompt = some(200)
    told, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    np.testing.assert_allclose(told, by_stock_layers("llama", prompt), rtol=0.02, atol=1e-5)


@pretended
def test_layers_that_are_one_operation_stay_so_but_for_the_tokens_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    model, widths, by_itself = draft_model(), list[int](), OwnLayer.by_itself

    def watched(layer: OwnLayer, x: mx.array, mask: Any, state: Any) -> mx.array:
        widths.append(x.shape[1])
        return by_itself(layer, x, mask, state)

    scorer = DraftScorer(model)
    monkeypatch.setattr(OwnLayer, "by_itself", watched)
    scored(scorer, sequence(some(700)))
    assert any(isinstance(module, FusedLayers) for module in model.adapter.model.modules())
    assert widths == [AHEAD + 1] * len(model.rows.states)


def test_layers_that_forget_are_not_asked() -> None:
    rows = draft_model("window").rows
    asked = Onlookers(rows).layers
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
        np.testing.assert_allclose(cut, by_stock_layers(kind, prompt, 3), rtol=0.02, atol=1e-5)


def test_pieces_are_longer_where_they_take_next_to_nothing_and_shorter_where_others_would_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scorer = DraftScorer(draft_model(widest=AT_ONCE))

    def pieces(quick_s: float, slow_s: float) -> int:
        monkeypatch.setattr("ingot.engine.specprefill.scorers.QUICK_S", quick_s)
        monkeypatch.setattr("ingot.engine.specprefill.scorers.SLOW_S", slow_s)
        return scored(scorer, sequence(some(1700), cache=False))[1] - 1  # without what is written

    assert pieces(60, 60) == 3  # of 512, 1,024 and the rest
    assert pieces(0, 60) == 1
    assert [pieces(0, 0) for _ in range(3)] == [1, 3, ceil(1699 / CATCH_UP)]


@pytest.mark.parametrize(("kind", "device"), KINDS, ids=lambda value: str(getattr(value, "kind", value)))
def test_every_family_whose_attention_is_known_can_score_and_leaves_nothing_behind(kind: str, device: Any) -> None:
    model, prompt = draft_model(kind, device), some(700)
    scorer = DraftScorer(model)
    told, pieces = scored(scorer, sequence(prompt))
    assert told.shape == (700,) and np.isfinite(told).all() and 0 < told.max() <= 1 + NAMED and pieces >= 3
    scorer.check()
    assert model.rows.count == 0


def test_a_next_turn_is_read_from_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, prompt, seen, run = DraftScorer(draft_model()), some(900), list[int](), Adapter.run

    def counting(self: Adapter, rows: Any, tokens: mx.array, *rest: Any, **more: Any) -> Any:
        seen.append(tokens.size)
        return run(self, rows, tokens, *rest, **more)

    monkeypatch.setattr(Adapter, "run", counting)
    scored(scorer, sequence(prompt[:800]))
    assert sum(seen) == 800 + 2 * AHEAD
    seen.clear()
    again = sequence(prompt)
    assert scorer.unread(again) == 100
    told, _ = scored(scorer, again)
    assert sum(seen) == 100 + 2 * AHEAD
    anew, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    np.testing.assert_allclose(told, anew, rtol=0.02, atol=1e-5)


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
    draft, scorer = Draft(model, vocab=tiny.VOCAB), DraftScorer(model)
    row = sequence(some(900))
    assert guessed(draft, row)
    assert model.rows.count == 1
    told, _ = scored(scorer, sequence(some(1400)))
    assert told.shape == (1400,) and model.rows.count == 0
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
    draft, scorer = Draft(model, vocab=tiny.VOCAB), DraftScorer(model)
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
    monkeypatch.setattr(Adapter, "mixed", False, raising=False)
    object.__setattr__(model.adapter, "mixed", False)
    with pytest.raises(ModelError, match="cannot score prompts"):
        DraftScorer(model)
    assert model.rows.count == 0


def test_a_chunk_is_named_by_the_rarest_of_its_tokens_that_stand_at_the_end() -> None:
    prompt = (*([1] * 40), 7, *([2] * 60), 8, *([1] * 98), *([3] * 62), 7, 2)
    told = named(prompt)
    assert set(told[32:64]) == {0.5} and set(told[64:96]) == {np.float32(1 / 61)}
    assert set(told[:32]) == set(told[128:160]) == {0.0}


@pytest.mark.parametrize("tokens", [20, 64, 150])
def test_a_chunk_has_what_its_tokens_and_the_first_behind_it_are_given(tokens: int) -> None:
    shares = mx.random.uniform(shape=(2, 3, tokens), key=mx.random.key(0))
    np.testing.assert_allclose(np.array(by_chunks(shares)), summed_by_chunks(np.array(shares)), atol=1e-5)


def test_keys_of_several_slices_are_scored_like_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = some(500)
    whole, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    assert SLICE * 64 > 500
    monkeypatch.setattr("ingot.engine.sparse.attention_scores.SLICE", 2)
    sliced, _ = scored(DraftScorer(draft_model()), sequence(prompt))
    np.testing.assert_allclose(sliced, whole, rtol=1e-4, atol=1e-7)
