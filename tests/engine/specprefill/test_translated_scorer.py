"""A draft that has other tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from bench.random_models import write_tokenizer
from ingot.engine.engine import Engine
from ingot.engine.request import Request
from ingot.engine.sequence import Sequence
from ingot.engine.sight import Sight
from ingot.engine.sparse.translated_scorer import TranslatedScorer
from ingot.engine.specprefill.prefill import SparseOffer
from ingot.engine.specprefill.scorers import DraftScorer
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tokens.translation import Translation
from tests import engines
from tests.engine.specprefill.world import Told, ask, draft_model, evenly, report, some
from tests.engines import answer

TWICE = Translation(tuple(number for token in range(50) for number in (token, 99)), tuple(range(2, 102, 2)))
"""Of a prompt of fifty tokens: each of them is two of theirs."""


def sequence(translated: Translation, prompt: tuple[int, ...] = tuple(range(50))) -> Sequence:
    made = Sequence(Request("r", (prompt,)), 0, 0, prompt, 10, 0, frozenset({3}))
    made.marks, made.translated = frozenset({10}), translated
    return made


def test_who_scores_reads_its_own_tokens_and_what_it_says_comes_back_in_ours() -> None:
    inner = Told(lambda prompt: np.arange(len(prompt), dtype=np.float32))
    scoring = TranslatedScorer(inner, frozenset({7})).score(sequence(TWICE))
    with pytest.raises(StopIteration) as done:
        while True:
            next(scoring)
    assert inner.asked == [TWICE.tokens]
    np.testing.assert_allclose(done.value.value, np.arange(0.5, 100, 2))


def test_ends_of_messages_and_of_answers_are_told_in_theirs() -> None:
    own = TranslatedScorer(Told(evenly), frozenset({7}))._own(sequence(TWICE))
    assert own.marks == {20} and own.stop_tokens == {7}


def test_a_prompt_without_text_is_none_that_it_can_score() -> None:
    scorer = TranslatedScorer(Told(evenly), frozenset())
    assert scorer.able(sequence(TWICE)) and not scorer.able(sequence(Translation((), (0, 0)), (1, 2)))


def test_a_prompt_that_shows_something_is_none_that_it_can_score() -> None:
    shown = sequence(TWICE)
    shown.sight = Sight(())
    assert not TranslatedScorer(Told(evenly), frozenset()).able(shown)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """One whose draft has fewer tokens than the target."""
    write_tokenizer(tmp_path, 110)
    theirs, ours = Tokenizer.load(tmp_path), engines.tiny_tokenizer()

    def offer() -> SparseOffer:
        scorer = TranslatedScorer(DraftScorer(draft_model()), theirs.eos_ids)
        return SparseOffer(scorer, 300, 0.3, lambda prompt: Translation.of(prompt, ours, theirs))

    made = engines.start("llama", sparse=offer, cache_bytes=1 << 26)
    yield made
    made.check()
    made.close()


def test_prompts_are_thinned_out_by_a_draft_of_another_tokenizer(engine: Engine) -> None:
    told = report(answer(engine, ask(some(600))))
    assert told.unused is None and told.scored == 600 and told.kept < 400
    assert report(answer(engine, ask(some(600)))).reused == 600


def test_a_next_turn_is_read_from_where_the_last_one_ended_in_theirs_too(engine: Engine) -> None:
    prompt = some(600)
    tokens = answer(engine, ask(prompt))
    assert report(tokens).scored == 600
    offer = engine._loaded.sparse
    assert offer is not None and offer.translate is not None
    turn = Sequence(Request("t", ((*prompt, *some(100, 1)),)), 0, 0, (*prompt, *some(100, 1)), 10, 0)
    turn.translated = offer.translate(turn.prompt)
    unread = engine.kept._run(lambda _: offer.scorer.unread(turn))
    assert 0 < unread <= 110 < len(turn.translated.tokens)
