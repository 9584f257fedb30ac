"""Whole answers: thinking that is free up to a budget, and then what a plan says."""

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


def choices(guide: GrammarMatcher, tokenizer: Tokenizer) -> set[str] | None:
    mask = guide.mask()
    return None if mask is None else {tokenizer.token_text(id) for id in allowed(mask, tokenizer.vocab_size)}


def write(guide: GrammarMatcher, tokenizer: Tokenizer, text: str) -> None:
    """Each token must be allowed where it comes."""
    for token in tokenizer.encode(text, add_special=False):
        mask = guide.mask()
        assert mask is None or token in allowed(mask, tokenizer.vocab_size), tokenizer.token_text(token)
        guide.accept(token)


def forced(guide: GrammarMatcher, tokenizer: Tokenizer) -> str:
    """The text that must come next, as long as there is but one token."""
    written = ""
    while (mask := guide.mask()) is not None and len(ids := allowed(mask, tokenizer.vocab_size)) == 1:
        if ids[0] in tokenizer.eos_ids:
            break
        written += tokenizer.token_text(ids[0])
        guide.accept(ids[0])
    return written


def begun(plan: CompiledGrammar | None) -> GrammarMatcher:
    assert plan is not None
    return plan.begin()


@pytest.mark.parametrize("tokenizer", [SPELLED, MARKED], ids=["spelled", "marked"])
def test_the_grammar_begins_where_the_thinking_ends(made: Make, tokenizer: Tokenizer) -> None:
    grammars = made(tokenizer)
    guide = begun(grammars.answer(grammars.json_schema(SCHEMA), HERMES, OPENED))
    write(guide, tokenizer, 'Anything {"goes" </thin here.</think>')
    assert choices(guide, tokenizer) == {"{", '{"', " ", "\n", "\n\n", "\t", "\r"}
    write(guide, tokenizer, '\n\n{"n": 5}')
    assert guide.done


def test_a_token_that_closes_the_thinking_may_go_on_with_white_space_alone(made: Make) -> None:
    grammars = made(SPELLED)
    guide = begun(grammars.answer(grammars.json_schema(SCHEMA), HERMES, OPENED))
    before = choices(guide, SPELLED)
    assert before is not None and {">", ">\n", ">x"} <= before
    write(guide, SPELLED, "hm</think")
    now = choices(guide, SPELLED)
    assert now is not None and {">", ">\n"} <= now and ">x" not in now


def test_an_answer_that_is_held_to_something_cannot_end_while_it_thinks(made: Make) -> None:
    grammars = made(SPELLED)
    guide = begun(grammars.answer(grammars.json_schema(SCHEMA), HERMES, OPENED))
    mask = guide.mask()
    assert mask is not None and not SPELLED.eos_ids & set(allowed(mask, SPELLED.vocab_size))
    assert not guide.free and not guide.done


def test_white_space_between_thinking_and_grammar_comes_to_an_end(made: Make) -> None:
    grammars = made(SPELLED)
    guide = begun(grammars.answer(grammars.json_schema(SCHEMA), HERMES, OPENED))
    write(guide, SPELLED, "</think>\t\t\t\t")
    assert choices(guide, SPELLED) == {"{", '{"'}


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("tokenizer", [SPELLED, MARKED], ids=["spelled", "marked"])
def test_a_spent_budget_closes_the_thinking_as_the_family_does(made: Make, tokenizer: Tokenizer, budget: int) -> None:
    grammars = made(tokenizer)
    for plan in (None, grammars.json_schema(SCHEMA)):
        guide = begun(grammars.answer(plan, HERMES, OPENED, budget=budget))
        write(guide, tokenizer, "x" * budget)
        assert forced(guide, tokenizer).startswith("\n</think>\n\n")
        assert (choices(guide, tokenizer) is None) == (plan is None)


def test_a_budget_that_is_not_spent_changes_nothing(made: Make) -> None:
    guide = begun(made(SPELLED).answer(None, HERMES, OPENED, budget=20))
    write(guide, SPELLED, "ok</think>")
    write(guide, SPELLED, "and now as long as it likes, whatever the budget was: <think> it is over")
    assert guide.free and not guide.done and guide.mask() is None


def test_tokens_need_not_be_read_at_once_while_the_budget_lasts(made: Make) -> None:
    guide = begun(made(SPELLED).answer(None, HERMES, OPENED, budget=3))
    freedom = []
    for token in SPELLED.encode("abc", add_special=False):
        freedom.append((guide.free, guide.mask() is None))
        guide.accept(token)
    assert freedom == [(True, True), (True, True), (False, True)]
    assert guide.mask() is not None


def test_a_budget_does_not_cut_a_character_in_two(made: Make) -> None:
    guide = begun(made(SPELLED).answer(None, HERMES, OPENED, budget=1))
    snowman = SPELLED.encode("☃", add_special=False)
    assert len(snowman) == 3
    for token in snowman:
        assert guide.mask() is None
        guide.accept(token)
    assert forced(guide, SPELLED) == "\n</think>\n\n"


def test_a_character_that_is_never_finished_does_not_lift_the_budget(made: Make) -> None:
    guide = begun(made(SPELLED).answer(None, HERMES, OPENED, budget=1))
    first = SPELLED.encode("☃", add_special=False)[0]
    for _ in range(6):
        if guide.mask() is not None:
            break
        guide.accept(first)
    assert forced(guide, SPELLED) == "\n</think>\n\n"


@pytest.mark.parametrize("tokenizer", [SPELLED, MARKED], ids=["spelled", "marked"])
def test_a_model_that_may_think_opens_its_thinking_or_answers_at_once(made: Make, tokenizer: Tokenizer) -> None:
    grammars = made(tokenizer)
    plan = grammars.answer(grammars.json_schema(SCHEMA), HERMES, UNOPENED, may_think=True)
    guide = begun(plan)
    write(guide, tokenizer, '<think>why?</think>{"n": 1}')
    assert guide.done
    guide = begun(plan)
    write(guide, tokenizer, '{"n": 1}')
    assert guide.done


def test_what_begins_like_the_tag_may_still_be_the_answer(made: Make) -> None:
    grammars = made(SPELLED)
    plan = grammars.answer(grammars.choice(["<this>", "<that>"]), HERMES, UNOPENED, may_think=True)
    guide = begun(plan)
    write(guide, SPELLED, "<this>")
    assert guide.done
    guide = begun(plan)
    write(guide, SPELLED, "<thi")
    assert choices(guide, SPELLED) == {"s", "n"}
    write(guide, SPELLED, "nk>hm</think><that>")
    assert guide.done


def test_a_model_that_may_not_think_does_not(made: Make) -> None:
    grammars = made(SPELLED)
    plan = grammars.json_schema(SCHEMA)
    assert grammars.answer(plan, HERMES, UNOPENED) is plan


def test_the_budget_counts_from_where_the_model_opens_its_thinking(made: Make) -> None:
    plan = made(SPELLED).answer(None, HERMES, UNOPENED, budget=4, may_think=True)
    guide = begun(plan)
    write(guide, SPELLED, " <think>abcd")
    assert forced(guide, SPELLED) == "\n</think>\n\n"
    guide = begun(plan)
    write(guide, SPELLED, "No thinking: <think> this is text, however long it may be")
    assert guide.free and guide.mask() is None


def test_where_nothing_is_held_to_there_is_no_guide(made: Make) -> None:
    grammars = made(SPELLED)
    assert grammars.answer(None, HERMES, OPENED) is None
    assert grammars.answer(None, HERMES, UNOPENED, budget=5) is None
    assert grammars.answer(None, format_by_name("plain"), OPENED, budget=5, may_think=True) is None


def test_harmony_answers_on_the_final_channel_after_an_analysis_or_without(made: Make) -> None:
    grammars = made(HARMONIC)
    schema = grammars.json_schema(SCHEMA)
    guide = begun(grammars.answer(schema, HARMONY, UNOPENED))
    assert forced(guide, HARMONIC).startswith("<|channel|>final<|message|>")
    plan = grammars.answer(schema, HARMONY, UNOPENED, may_think=True, budget=9)
    thought = "<|channel|>analysis<|message|>so, hm<|end|><|start|>assistant"
    for before in ("", thought):
        guide = begun(plan)
        write(guide, HARMONIC, before + '<|channel|>final<|message|>{"n": 1}')
        assert guide.done
    guide = begun(plan)
    write(guide, HARMONIC, "<|channel|>analysis<|message|>so it is.")
    assert forced(guide, HARMONIC).startswith("<|end|><|start|>assistant<|channel|>final<|message|>")


def test_harmony_calls_after_an_analysis(made: Make) -> None:
    grammars = made(HARMONIC)
    calls = grammars.tools(HARMONY, [GrammarTool("f", SCHEMA)], "required", parallel=False)
    guide = begun(grammars.answer(calls, HARMONY, UNOPENED, may_think=True))
    write(guide, HARMONIC, "<|channel|>analysis<|message|>so<|end|><|start|>assistant")
    write(guide, HARMONIC, '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 3}')
    assert guide.done


@pytest.mark.parametrize("name", ["hermes", "harmony", "muse", "inkling", "llama"])
def test_an_answer_by_a_schema_may_be_a_call_instead_where_tools_may_be_called(made: Make, name: str) -> None:
    grammars, format = made(HARMONIC), format_by_name(name)
    calls = grammars.tools(format, [GrammarTool("f", SCHEMA)], "required", parallel=False)
    plan = grammars.answer(grammars.json_schema(SCHEMA), format, UNOPENED, calls=calls)
    header, end = (format.channels.answer, format.channels.call_end) if format.channels else ("", "")
    for text in (render_calls(format, [PastCall("f", {"n": 4})]).removesuffix(end), header + '{"n": 5}'):
        guide = begun(plan)
        write(guide, HARMONIC, text)
        assert guide.done
    walker = Walker(HARMONIC, random.Random(2), soft=30)
    assert plan is not None
    for _ in range(10):
        events = parsed(format, HARMONIC, walker.answer(plan), UNOPENED)
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        assert content == "" if any(isinstance(event, ToolCallBegan) for event in events) else json.loads(content)


@pytest.mark.parametrize("name", [known.name for known in FORMATS if known.channels])
def test_a_call_that_is_forced_may_come_behind_a_message_of_thinking(made: Make, name: str) -> None:
    grammars, format = made(HARMONIC), format_by_name(name)
    calls = grammars.tools(format, [GrammarTool("f", SCHEMA)], "required", parallel=False)
    plan = grammars.answer(calls, format, UNOPENED, may_think=True)
    channels = format.channels
    assert channels is not None
    call = render_calls(format, [PastCall("f", {"n": 4})]).removesuffix(channels.call_end)
    for thought in ("", f"{channels.asides[0]}Hm.{channels.ends[0]}{channels.start}{channels.role}"):
        guide = begun(plan)
        write(guide, HARMONIC, thought + call)
        assert guide.done


def test_forced_text_that_does_not_come_breaks_the_guide(made: Make) -> None:
    guide = begun(made(SPELLED).answer(None, HERMES, OPENED, budget=0))
    with pytest.raises(GrammarViolated):
        guide.accept(SPELLED.encode("x", add_special=False)[0])


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
    plan = grammars.answer(grammars.json_schema(SCHEMA), format, OPENED, budget=25)
    assert plan is not None
    walker = Walker(SPELLED, random.Random(name), soft=40)
    for _ in range(5):
        events = parsed(format, SPELLED, walker.answer(plan), OPENED)
        assert all(isinstance(event, ReasoningDelta | ContentDelta) for event in events)
        content = "".join(event.text for event in events if isinstance(event, ContentDelta))
        assert set(json.loads(content)) == {"n"}


@pytest.mark.parametrize("name", [name for name in THINKING if format_by_name(name).can_call])
def test_forced_calls_come_after_the_thinking(made: Make, name: str) -> None:
    format = format_by_name(name)
    grammars = made(SPELLED)
    calls = grammars.tools(format, [GrammarTool("f", SCHEMA)], "required", parallel=False)
    plan = grammars.answer(calls, format, OPENED, budget=12)
    assert plan is not None
    events = parsed(format, SPELLED, Walker(SPELLED, random.Random(3), soft=20).answer(plan), OPENED)
    assert sum(isinstance(event, ToolCallBegan) for event in events) == 1
    assert not any(isinstance(event, ContentDelta) for event in events)
