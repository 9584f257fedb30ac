"""Matchers that look ahead: their masks after tokens that have not been sampled."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.errors import IngotError
from ingot.text.grammar.calls import GrammarTool
from ingot.text.grammar.compiled import LlguidanceGrammar
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar, GrammarMatcher, GrammarTooComplex, TokenMask
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.registry import format_by_name
from tests.text.grammar.walks import allowed, byte_tokenizer

OPENED, UNOPENED = ThinkingStart.OPENED, ThinkingStart.UNOPENED
HERMES, HARMONY = format_by_name("hermes"), format_by_name("harmony")
SPELLED = byte_tokenizer()
MARKED = byte_tokenizer("<think>", "</think>", "<tool_call>", "</tool_call>")
HARMONIC = byte_tokenizer("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
SCHEMA = {
    "type": "object",
    "properties": {"number": {"type": "integer"}, "word": {"enum": ["the thing", "then"]}, "text": {"type": "string"}},
    "required": ["number", "word"],
    "additionalProperties": False,
}
TOOLS = [GrammarTool("find_it", SCHEMA), GrammarTool("fix_it", {"type": "object"})]


@cache
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, tokenizer.vocab_size)


@pytest.fixture(scope="module", autouse=True)
def closed() -> Iterator[None]:
    yield
    for tokenizer in (SPELLED, MARKED, HARMONIC):
        grammars(tokenizer).close()


def schema(made: Grammars) -> CompiledGrammar | None:
    return made.json_schema(SCHEMA)


def pattern(made: Grammars) -> CompiledGrammar | None:
    return made.regex("[a-c]{2,5}(the|thx)?")


def choice(made: Grammars) -> CompiledGrammar | None:
    return made.choice(["the one", "the other", "12"])


def nested(made: Grammars) -> CompiledGrammar | None:
    return made.lark('start: "(" start* ")" | "the" | /[12]+/')


def required(made: Grammars) -> CompiledGrammar | None:
    return made.tools(HERMES, TOOLS, "required", parallel=True)


def budgeted(made: Grammars) -> CompiledGrammar | None:
    return made.answer(None, HERMES, OPENED, budget=6)


def thoughtful(made: Grammars) -> CompiledGrammar | None:
    return made.answer(schema(made), HERMES, OPENED, budget=9)


def unopened(made: Grammars) -> CompiledGrammar | None:
    return made.answer(made.choice(["<this>", "<that>"]), HERMES, UNOPENED, budget=5, may_think=True)


def calls_after_thinking(made: Grammars) -> CompiledGrammar | None:
    return made.answer(required(made), HERMES, OPENED, budget=4)


def schema_or_call(made: Grammars) -> CompiledGrammar | None:
    return made.answer(schema(made), HERMES, UNOPENED, calls=required(made), may_think=True, budget=3)


def channels(made: Grammars) -> CompiledGrammar | None:
    return made.answer(schema(made), HARMONY, UNOPENED, may_think=True, budget=5)


Make = Callable[[Grammars], CompiledGrammar | None]
PLANS: list[tuple[Make, Tokenizer]] = [
    *((make, SPELLED) for make in (schema, pattern, choice, nested, required, budgeted, thoughtful, unopened)),
    *((make, MARKED) for make in (required, thoughtful, unopened, calls_after_thinking, schema_or_call)),
    (channels, HARMONIC),
]


@cache
def planned(number: int) -> tuple[CompiledGrammar, Tokenizer]:
    make, tokenizer = PLANS[number]
    grammar = make(grammars(tokenizer))
    assert grammar is not None
    return grammar, tokenizer


def advanced(grammar: CompiledGrammar, tokens: Sequence[int]) -> GrammarMatcher:
    """A matcher that never looked ahead."""
    matcher = grammar.begin()
    for token in tokens:
        matcher.accept(token)
    return matcher


def choices(matcher: GrammarMatcher, tokenizer: Tokenizer) -> list[int]:
    mask = matcher.mask()
    return list(range(tokenizer.vocab_size)) if mask is None else allowed(mask, tokenizer.vocab_size)


def walked(
    grammar: CompiledGrammar, tokenizer: Tokenizer, chance: random.Random, before: Sequence[int], most: int
) -> list[int]:
    """Random tokens that may follow those before, until the matcher is done."""
    matcher, found = advanced(grammar, before), list[int]()
    while not matcher.done and len(found) < most:
        # Few tokens close anything, and a walk that takes them all alike never gets anywhere.
        free = choices(matcher, tokenizer)
        closing = [id for id in free if tokenizer.token_bytes(id).strip() in CLOSERS]
        found.append(chance.choice(closing if closing and chance.random() < 0.5 else free))
        matcher.accept(found[-1])
    return found


CLOSERS = {b'"', b'"}', b"}", b",", b"</", b"</think>", b"</tool_call>", b"<|end|>", b"<|message|>", b")", b"12"}


def same(one: TokenMask | None, other: TokenMask | None, vocab: int) -> bool:
    if one is None or other is None:
        return one is other
    return allowed(one, vocab) == allowed(other, vocab)


walks = st.tuples(st.integers(0, len(PLANS) - 1), st.randoms(use_true_random=False), st.integers(0, 40))


@given(walks)
def test_masks_are_those_of_a_matcher_that_accepts_the_tokens_one_by_one(
    walk: tuple[int, random.Random, int],
) -> None:
    number, chance, length = walk
    grammar, tokenizer = planned(number)
    before = walked(grammar, tokenizer, chance, (), length)
    draft = walked(grammar, tokenizer, chance, before, 12)
    looking, plain = advanced(grammar, before), advanced(grammar, before)
    if looking.done:
        return
    count = looking.count_allowed(draft)
    assert count == len(draft) - advanced(grammar, [*before, *draft]).done
    masks = looking.masks(draft[:count])
    assert len(masks) == count + 1
    for index, mask in enumerate(masks):
        assert same(mask, plain.mask(), tokenizer.vocab_size)
        if index < count:
            plain.accept(draft[index])


@settings(max_examples=settings().max_examples // 2)
@given(walks, st.lists(st.integers(0, 8), max_size=3))
def test_a_matcher_goes_on_as_one_that_never_looked_ahead(
    walk: tuple[int, random.Random, int], looks: list[int]
) -> None:
    number, chance, length = walk
    grammar, tokenizer = planned(number)
    written = walked(grammar, tokenizer, chance, (), length + 12)
    looking, plain = grammar.begin(), grammar.begin()
    for index, token in enumerate(written):
        for most in looks:
            draft = walked(grammar, tokenizer, chance, written[:index], most)
            noise = [chance.randrange(tokenizer.vocab_size) for _ in range(2)]
            looking.masks(draft[: looking.count_allowed([*draft, *noise])])
            looking.forced(most)
        assert (looking.free, looking.done) == (plain.free, plain.done)
        assert same(looking.mask(), plain.mask(), tokenizer.vocab_size)
        looking.accept(token)
        plain.accept(token)
    assert looking.done == plain.done


@given(walks, st.lists(st.integers(0, 255), max_size=3))
def test_a_matcher_agrees_up_to_what_its_masks_forbid_or_what_completes_it(
    walk: tuple[int, random.Random, int], noise: list[int]
) -> None:
    number, chance, length = walk
    grammar, tokenizer = planned(number)
    before = walked(grammar, tokenizer, chance, (), length)
    draft = [*walked(grammar, tokenizer, chance, before, chance.randrange(6)), *noise]
    matcher, expected = advanced(grammar, before), 0
    if matcher.done:
        return
    count_allowed = advanced(grammar, before).count_allowed(draft)
    for token in draft:
        if token not in choices(matcher, tokenizer):
            break
        matcher.accept(token)
        if matcher.done:
            break
        expected += 1
    assert count_allowed == expected


@given(walks, st.integers(0, 20))
def test_a_token_is_forced_where_the_mask_leaves_but_one(walk: tuple[int, random.Random, int], most: int) -> None:
    number, chance, length = walk
    grammar, tokenizer = planned(number)
    before = walked(grammar, tokenizer, chance, (), length)
    matcher = advanced(grammar, before)
    if matcher.done:
        return
    forced = advanced(grammar, before).forced(most)
    assert len(forced) <= most
    for token in forced:
        assert choices(matcher, tokenizer) == [token]
        matcher.accept(token)
        assert not matcher.done


def test_what_a_schema_leaves_no_choice_about_is_forced_up_to_where_there_is_one() -> None:
    grammar = grammars(SPELLED).json_schema(SCHEMA)
    matcher = advanced(grammar, SPELLED.encode('{"n', add_special=False))
    assert "".join(map(SPELLED.token_text, matcher.forced(99))) == "umber"
    assert "".join(map(SPELLED.token_text, matcher.forced(3))) == "umb"
    assert matcher.forced(0) == ()
    assert advanced(grammar, SPELLED.encode('{"number": ', add_special=False)).forced(99) == ()


def test_the_token_that_completes_an_answer_is_neither_forced_nor_agreed_to() -> None:
    matcher = grammars(SPELLED).choice(["zqx"]).begin()
    tokens = SPELLED.encode("zqx", add_special=False)
    assert matcher.forced(9) == tuple(tokens[:2])
    assert matcher.count_allowed(tokens) == 2
    assert matcher.count_allowed([*tokens, *SPELLED.eos_ids]) == 2


def test_a_spent_budget_forces_the_end_of_the_thinking() -> None:
    grammar = grammars(MARKED).answer(None, HERMES, OPENED, budget=2)
    assert grammar is not None
    matcher = advanced(grammar, MARKED.encode("ab", add_special=False))
    assert "".join(map(MARKED.token_text, matcher.forced(99))) == "\n</think>\n\n"
    assert matcher.mask() is not None


def test_masks_may_be_kept() -> None:
    matcher = grammars(SPELLED).regex("[a-c]{3}x").begin()
    draft = SPELLED.encode("abc", add_special=False)
    masks = matcher.masks(draft)
    copies = [None if mask is None else mask.copy() for mask in masks]
    for token in draft:
        matcher.mask()
        matcher.accept(token)
    matcher.masks([])
    assert all(same(one, other, SPELLED.vocab_size) for one, other in zip(masks, copies, strict=True))


def test_a_grammar_that_is_given_up_says_so_where_masks_are_asked_for_and_only_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammar = grammars(SPELLED).regex("(ab){9}[a-z]{2}")
    matcher = grammar.begin()
    draft = SPELLED.encode("abab", add_special=False)

    def give_up(grammar: LlguidanceGrammar, seconds: float) -> None:
        raise grammar.failed("too complex")

    monkeypatch.setattr(LlguidanceGrammar, "took", give_up)
    assert matcher.forced(4) == ()
    assert matcher.count_allowed(draft) == 4
    with pytest.raises(GrammarTooComplex):
        matcher.masks(draft)
    monkeypatch.undo()
    assert advanced_again(matcher, draft) is None


def advanced_again(matcher: GrammarMatcher, tokens: Sequence[int]) -> IngotError | None:
    """What goes wrong when these tokens are accepted, if anything does."""
    try:
        for token in tokens:
            matcher.accept(token)
    except IngotError as error:
        return error
    return None


def test_a_token_is_admitted_just_where_the_mask_allows_it() -> None:
    for number in range(len(PLANS)):
        grammar, tokenizer = planned(number)
        chance = random.Random(number)
        for length in (0, 3, 14):
            before = walked(grammar, tokenizer, chance, (), length)
            matcher = advanced(grammar, before)
            admitted = [id for id in range(tokenizer.vocab_size) if advanced(grammar, before).admits(id)]
            assert matcher.done or np.array_equal(admitted, choices(matcher, tokenizer))
