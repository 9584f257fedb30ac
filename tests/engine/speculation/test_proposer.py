"""Spans that a grammar leaves no choice about."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ingot.engine  # noqa: F401  (binds the fast BLAS before mlx)
from ingot.engine import sampling
from ingot.engine.request import Request
from ingot.engine.sequence import TokenSequence
from ingot.engine.speculation.proposer import MOST_FORCED_TOKENS, ForcedTokensProposer
from ingot.text.grammar.compiled import LlguidanceMatcher
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar
from ingot.text.tokenizer.tokenizer import Tokenizer
from tests import engines, tiny

TOKENIZER = engines.tiny_tokenizer()


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(TOKENIZER, tiny.VOCAB)
    yield made
    made.close()


def sequence(plan: CompiledGrammar | None, written: str = "") -> TokenSequence:
    request = Request("r", ((5, 17),), grammar=plan)
    made = TokenSequence(request, 0, 0, request.prompts[0], 100, 0)
    sampling.begin_grammar(made)
    for token in TOKENIZER.encode(written, add_special=False):
        made.tokens.append(token)
        made.sampled += 1
        sampling.accept_token(made, token)
    return made


def text(tokens: tuple[int, ...], tokenizer: Tokenizer = TOKENIZER) -> str:
    return "".join(map(tokenizer.token_text, tokens))


def test_what_must_come_is_offered_for_nothing_and_proposed_as_offered(grammars: Grammars) -> None:
    row = sequence(grammars.choice(["yes indeed", "no"]), "y")
    forced = ForcedTokensProposer()
    [offer] = forced.offers([row])
    assert offer is not None and offer.free and offer.most == len("es indee") and offer.source == "forced"
    assert offer.confidences == (1.0,) * offer.most
    [proposal] = forced.propose([row], [offer.most])
    assert text(proposal.tokens) == "es indee" and proposal.confidences == offer.confidences


def test_no_more_is_proposed_than_asked_for(grammars: Grammars) -> None:
    row = sequence(grammars.choice(["yes indeed", "no"]), "y")
    forced = ForcedTokensProposer()
    forced.offers([row])
    [proposal] = forced.propose([row], [3])
    assert text(proposal.tokens) == "es " and len(proposal.confidences) == 3


def test_rows_with_a_choice_or_without_a_guide_get_no_offer(grammars: Grammars) -> None:
    rows = [sequence(grammars.choice(["yes", "no"])), sequence(None), sequence(grammars.choice(["abc"]))]
    assert [offer is not None for offer in ForcedTokensProposer().offers(rows)] == [False, False, True]


def test_a_long_span_is_offered_in_pieces(grammars: Grammars) -> None:
    letters = "abcdefgh" * 20
    row = sequence(grammars.choice([letters]))
    forced, written = ForcedTokensProposer(), ""
    while (offer := forced.offers([row])[0]) is not None:
        assert offer.most <= MOST_FORCED_TOKENS
        [proposal] = forced.propose([row], [offer.most])
        for token in proposal.tokens:
            row.tokens.append(token)
            sampling.accept_token(row, token)
        written += text(proposal.tokens)
    assert written == letters[:-1] and not sampling.grammar_is_done(row)


def test_what_must_come_is_found_out_once_however_often_it_is_asked_for(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = sequence(grammars.choice(["abcd"]))
    forced = ForcedTokensProposer()
    first = forced.offers([row])
    monkeypatch.setattr(LlguidanceMatcher, "forced", lambda matcher, most: pytest.fail("asked again"))
    assert forced.offers([row]) == first
    assert text(forced.propose([row], [9])[0].tokens) == "abc"


def test_nothing_is_held_for_sequences_that_are_forgotten(grammars: Grammars) -> None:
    row = sequence(grammars.choice(["abcd"]))
    forced = ForcedTokensProposer()
    forced.offers([row])
    forced.forget(row)
    forced.forget(sequence(None))
    assert not forced._spans
