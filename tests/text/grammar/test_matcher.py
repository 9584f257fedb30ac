"""Whole answers: thinking that is free up to a budget, and then what a grammar allows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import pytest

from ingot.text.grammar.calls import GrammarTool
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import CompiledGrammar, GrammarMatcher, GrammarViolated
from ingot.text.parser.events import (
    ContentDelta,
    PastCall,
    ReasoningDelta,
    ToolCallBegan,
    ToolSchema,
    call_id_maker,
    merge_events,
)
from ingot.text.parser.parser import Parser, ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import FORMATS, format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.text.grammar.walks import Walker, allowed, byte_tokenizer

OPENED, UNOPENED = ThinkingStart.OPENED, ThinkingStart.UNOPENED
HERMES, HARMONY = format_by_name("hermes"), format_by_name("harmony")
SPELLED = byte_tokenizer()
MARKED = byte_tokenizer("<think>", "</think>")
HARMONIC = byte_tokenizer(
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>", "<|constrain|>"
)
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}

Make = Callable[[Tokenizer], Grammars]


@pytest.fixture(scope="module")
def made() -> Iterator[Make]:
    known: dict[int, Grammars] = {}

    def make(tokenizer: Tokenizer) -> Grammars:
        return known.setdefault(id(tokenizer), Grammars(tokenizer, tokenizer.vocab_size))

    yield make
    for grammars in known.values():
        grammars.close()


def choices(matcher: GrammarMatcher, tokenizer: Tokenizer) -> set[str] | None:
    mask = matcher.mask()
    return None if mask is None else {tokenizer.token_text(id) for id in allowed(mask, tokenizer.vocab_size)}


def write(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> None:
    """Each token must be allowed where it comes."""
    for token in tokenizer.encode(text, add_special=False):
        mask = matcher.mask()
        assert mask is None or token in allowed(mask, tokenizer.vocab_size), tokenizer.token_text(token)
        matcher.accept(token)


def forced(matcher: GrammarMatcher, tokenizer: Tokenizer) -> str:
    """The text that must come next, as long as there is but one token."""
    written = ""
    while (mask := matcher.mask()) is not None and len(ids := allowed(mask, tokenizer.vocab_size)) == 1:
        if ids[0] in tokenizer.eos_ids:
            break
        written += tokenizer.token_text(ids[0])
        matcher.accept(ids[0])
    return written


def started(grammar: CompiledGrammar | None) -> GrammarMatcher:
    assert grammar is not None
    return grammar.begin()


@pytest.mark.parametrize("tokenizer", [SPELLED, MARKED], ids=["spelled", "marked"])
def test_the_grammar_begins_where_the_thinking_ends(made: Make, tokenizer: Tokenizer) -> None:
    grammars = made(tokenizer)
    matcher = started(grammars.answer(grammars.json_schema(SCHEMA), HERMES, OPENED))
    write(matcher, tokenizer, 'Anything {"goes" </thin here.</think>')
    assert choices(matcher, tokenizer) == {"{", '{"', " ", "\n", "\n\n", "\t", "\r"}
    write(matcher, tokenizer, '\n\n{"n": 5}')
    assert matcher.done


def test_a_token_that_closes_the_thinking_may_go_on_with_white_space_alone(made: Make) -> None:
    grammars = made(SPELLED)
    matcher = started(grammars.answer(grammars.json_schema(SCHEMA), HERMES, OPENED))
    before = choices(matcher, SPELLED)
    assert before is not None and {">", ">\n", ">x"} <= before
    write(matcher, SPELLED, "hm</think")
    now = choices(matcher, SPELLED)
    assert now is not None and {">", ">\n"} <= now and ">x" not in now


def test_an_answer_with_a_grammar_cannot_end_while_it_thinks(made: Make) -> None:
    grammars = made(SPELLED)
    matcher = started(grammars.answer(grammars.json_schema(SCHEMA), HERMES, OPENED))
    mask = matcher.mask()
    assert mask is not None and not SPELLED.eos_ids & set(allowed(mask, SPELLED.vocab_size))
    assert not matcher.free and not matcher.done


def test_white_space_between_thinking_and_grammar_comes_to_an_end(made: Make) -> None:
    grammars = made(SPELLED)
    matcher = started(grammars.answer(grammars.json_schema(SCHEMA), HERMES, OPENED))
    write(matcher, SPELLED, "</think>\t\t\t\t")
    assert choices(matcher, SPELLED) == {"{", '{"'}


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("tokenizer", [SPELLED, MARKED], ids=["spelled", "marked"])
def test_a_spent_budget_closes_the_thinking_as_the_family_does(made: Make, tokenizer: Tokenizer, budget: int) -> None:
    grammars = made(tokenizer)
    for grammar in (None, grammars.json_schema(SCHEMA)):
        matcher = started(grammars.answer(grammar, HERMES, OPENED, budget=budget))
        write(matcher, tokenizer, "x" * budget)
        assert forced(matcher, tokenizer).startswith("\n</think>\n\n")
        assert (choices(matcher, tokenizer) is None) == (grammar is None)


def test_a_budget_that_is_not_spent_changes_nothing(made: Make) -> None:
    matcher = started(made(SPELLED).answer(None, HERMES, OPENED, budget=20))
    write(matcher, SPELLED, "ok</think>")
    write(matcher, SPELLED, "and now as long as it likes, whatever the budget was: <think> it is over")
    assert matcher.free and not matcher.done and matcher.mask() is None


def test_tokens_need_not_be_read_at_once_while_the_budget_lasts(made: Make) -> None:
    matcher = started(made(SPELLED).answer(None, HERMES, OPENED, budget=3))
    freedom = []
    for token in SPELLED.encode("abc", add_special=False):
        freedom.append((matcher.free, matcher.mask() is None))
        matcher.accept(token)
    assert freedom == [(True, True), (True, True), (False, True)]
    assert matcher.mask() is not None


def test_a_budget_does_not_cut_a_character_in_two(made: Make) -> None:
    matcher = started(made(SPELLED).answer(None, HERMES, OPENED, budget=1))
    snowman = SPELLED.encode("☃", add_special=False)
    assert len(snowman) == 3
    for token in snowman:
        assert matcher.mask() is None
        matcher.accept(token)
    assert forced(matcher, SPELLED) == "\n</think>\n\n"


def test_a_character_that_is_never_finished_does_not_lift_the_budget(made: Make) -> None:
    matcher = started(made(SPELLED).answer(None, HERMES, OPENED, budget=1))
    first = SPELLED.encode("☃", add_special=False)[0]
    for _ in range(6):
        if matcher.mask() is not None:
            break
        matcher.accept(first)
    assert forced(matcher, SPELLED) == "\n</think>\n\n"


@pytest.mark.parametrize("tokenizer", [SPELLED, MARKED], ids=["spelled", "marked"])
def test_a_model_that_may_think_opens_its_thinking_or_answers_at_once(made: Make, tokenizer: Tokenizer) -> None:
    grammars = made(tokenizer)
    grammar = grammars.answer(grammars.json_schema(SCHEMA), HERMES, UNOPENED, may_think=True)
    matcher = started(grammar)
    write(matcher, tokenizer, '<think>why?</think>{"n": 1}')
    assert matcher.done
    matcher = started(grammar)
    write(matcher, tokenizer, '{"n": 1}')
    assert matcher.done


def test_what_begins_like_the_tag_may_still_be_the_answer(made: Make) -> None:
    grammars = made(SPELLED)
    grammar = grammars.answer(grammars.choice(["<this>", "<that>"]), HERMES, UNOPENED, may_think=True)
    matcher = started(grammar)
    write(matcher, SPELLED, "<this>")
    assert matcher.done
    matcher = started(grammar)
    write(matcher, SPELLED, "<thi")
    assert choices(matcher, SPELLED) == {"s", "n"}
    write(matcher, SPELLED, "nk>hm</think><that>")
    assert matcher.done


def test_a_model_that_may_not_think_does_not(made: Make) -> None:
    grammars = made(SPELLED)
    grammar = grammars.json_schema(SCHEMA)
    assert grammars.answer(grammar, HERMES, UNOPENED) is grammar


def test_the_budget_counts_from_where_the_model_opens_its_thinking(made: Make) -> None:
    grammar = made(SPELLED).answer(None, HERMES, UNOPENED, budget=4, may_think=True)
    matcher = started(grammar)
    write(matcher, SPELLED, " <think>abcd")
    assert forced(matcher, SPELLED) == "\n</think>\n\n"
    matcher = started(grammar)
    write(matcher, SPELLED, "No thinking: <think> this is text, however long it may be")
    assert matcher.free and matcher.mask() is None


def test_where_nothing_is_enforced_there_is_no_matcher(made: Make) -> None:
    grammars = made(SPELLED)
    assert grammars.answer(None, HERMES, OPENED) is None
    assert grammars.answer(None, HERMES, UNOPENED, budget=5) is None
    assert grammars.answer(None, format_by_name("plain"), OPENED, budget=5, may_think=True) is None


def test_harmony_answers_on_the_final_channel_after_an_analysis_or_without(made: Make) -> None:
    grammars = made(HARMONIC)
    schema = grammars.json_schema(SCHEMA)
    matcher = started(grammars.answer(schema, HARMONY, UNOPENED))
    assert forced(matcher, HARMONIC).startswith("<|channel|>final<|message|>")
    grammar = grammars.answer(schema, HARMONY, UNOPENED, may_think=True, budget=9)
    thought = "<|channel|>analysis<|message|>so, hm<|end|><|start|>assistant"
    for before in ("", thought):
        matcher = started(grammar)
        write(matcher, HARMONIC, before + '<|channel|>final<|message|>{"n": 1}')
        assert matcher.done
    matcher = started(grammar)
    write(matcher, HARMONIC, "<|channel|>analysis<|message|>so it is.")
    assert forced(matcher, HARMONIC).startswith("<|end|><|start|>assistant<|channel|>final<|message|>")


def test_harmony_calls_after_an_analysis(made: Make) -> None:
    grammars = made(HARMONIC)
    calls = grammars.tools(HARMONY, [GrammarTool("f", SCHEMA)], "required", parallel=False)
    matcher = started(grammars.answer(calls, HARMONY, UNOPENED, may_think=True))
    write(matcher, HARMONIC, "<|channel|>analysis<|message|>so<|end|><|start|>assistant")
    write(matcher, HARMONIC, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 3}')
    assert matcher.done


@pytest.mark.parametrize("name", ["hermes", "harmony", "muse", "inkling", "llama"])
def test_an_answer_by_a_schema_may_be_a_call_instead_where_tools_may_be_called(made: Make, name: str) -> None:
    grammars, format = made(HARMONIC), format_by_name(name)
    calls = grammars.tools(format, [GrammarTool("f", SCHEMA)], "required", parallel=False)
    grammar = grammars.answer(grammars.json_schema(SCHEMA), format, UNOPENED, calls=calls)
    header, end = (format.channels.answer, format.channels.call_end) if format.channels else ("", "")
    for text in (render_calls(format, [PastCall("f", {"n": 4})]).removesuffix(end), header + '{"n": 5}'):
        matcher = started(grammar)
        write(matcher, HARMONIC, text)
        assert matcher.done
    walker = Walker(HARMONIC, random.Random(2), soft=30)
    assert grammar is not None
    for _ in range(10):
        events = parsed(format, HARMONIC, walker.answer(grammar), UNOPENED)
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        assert content == "" if any(isinstance(event, ToolCallBegan) for event in events) else json.loads(content)


@pytest.mark.parametrize("name", [known.name for known in FORMATS if known.channels])
def test_a_call_that_is_forced_may_come_behind_a_message_of_thinking(made: Make, name: str) -> None:
    grammars, format = made(HARMONIC), format_by_name(name)
    calls = grammars.tools(format, [GrammarTool("f", SCHEMA)], "required", parallel=False)
    grammar = grammars.answer(calls, format, UNOPENED, may_think=True)
    channels = format.channels
    assert channels is not None
    call = render_calls(format, [PastCall("f", {"n": 4})]).removesuffix(channels.call_end)
    for thought in ("", f"{channels.asides[0]}Hm.{channels.ends[0]}{channels.start}{channels.role}"):
        matcher = started(grammar)
        write(matcher, HARMONIC, thought + call)
        assert matcher.done


def test_forced_text_that_does_not_come_breaks_the_matcher(made: Make) -> None:
    matcher = started(made(SPELLED).answer(None, HERMES, OPENED, budget=0))
    with pytest.raises(GrammarViolated):
        matcher.accept(SPELLED.encode("x", add_special=False)[0])


def parsed(format: Format, tokenizer: Tokenizer, tokens: list[int], start: ThinkingStart) -> list[object]:
    detokenizer = tokenizer.detokenizer(tokenizer.special_within(format.markers))
    text = "".join(map(detokenizer.push, tokens)) + detokenizer.flush()
    parser = Parser(format, tools=[ToolSchema("f", SCHEMA)], thinking=start, ids=call_id_maker(format.ids))
    return list(merge_events([*parser.push(text), *parser.flush()]))


THINKING = [known.name for known in FORMATS if known.thinking is not None]


@pytest.mark.parametrize("name", THINKING)
def test_whatever_comes_out_parses_as_thinking_and_then_the_answer(made: Make, name: str) -> None:
    format = format_by_name(name)
    assert format.thinking is not None
    grammars = made(SPELLED)
    grammar = grammars.answer(grammars.json_schema(SCHEMA), format, OPENED, budget=25)
    assert grammar is not None
    walker = Walker(SPELLED, random.Random(name), soft=40)
    for _ in range(5):
        events = parsed(format, SPELLED, walker.answer(grammar), OPENED)
        assert all(isinstance(event, ReasoningDelta | ContentDelta) for event in events)
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        assert set(json.loads(content)) == {"n"}


@pytest.mark.parametrize("name", [name for name in THINKING if format_by_name(name).can_call])
def test_forced_calls_come_after_the_thinking(made: Make, name: str) -> None:
    format = format_by_name(name)
    grammars = made(SPELLED)
    calls = grammars.tools(format, [GrammarTool("f", SCHEMA)], "required", parallel=False)
    grammar = grammars.answer(calls, format, OPENED, budget=12)
    assert grammar is not None
    events = parsed(format, SPELLED, Walker(SPELLED, random.Random(3), soft=20).answer(grammar), OPENED)
    assert sum(isinstance(event, ToolCallBegan) for event in events) == 1
    assert not any(isinstance(event, ContentDelta) for event in events)
