"""Calls that follow their schema once they have begun, and text that is free around them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ingot.errors import Unavailable
from ingot.text.grammar.calls import GrammarTool
from ingot.text.grammar.compiled import LlguidanceMatcher
from ingot.text.grammar.grammars import CompilerProcesses, Grammars
from ingot.text.grammar.lazy_calls import LazyCallMatcher, _call_beginning
from ingot.text.grammar.matcher import CompiledGrammar, GrammarMatcher, GrammarTooComplex
from ingot.text.grammar.pending import GrammarPending, prepared_grammars
from ingot.text.parser.parser import ThinkingStart
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.format import Format, Gap, Maybe, Name
from ingot.text.tool_formats.registry import format_by_name
from tests.text.grammar.test_calls import CALLING, MARKED, PLAIN, TOOLS, calls, closers, content_text, parsed, written
from tests.text.grammar.walks import Walker, allowed

OPENED, UNOPENED = ThinkingStart.OPENED, ThinkingStart.UNOPENED
LAX = tuple(replace(tool, strict=False) for tool in TOOLS)
Make = Callable[[Tokenizer], Grammars]


@pytest.fixture(scope="module")
def made() -> Iterator[Make]:
    known = {id(tokenizer): Grammars(tokenizer, tokenizer.vocab_size) for tokenizer in (PLAIN, MARKED)}
    yield lambda tokenizer: known[id(tokenizer)]
    for grammars in known.values():
        grammars.close()


def grammar(
    made: Make, name: str, tokenizer: Tokenizer, *, start: ThinkingStart = UNOPENED, parallel: bool = True
) -> CompiledGrammar:
    found, unenforced = made(tokenizer).begun_calls(format_by_name(name), LAX, start, parallel=parallel)
    assert found is not None and not unenforced
    return found


def write(matcher: GrammarMatcher, tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens that nothing may forbid."""
    tokens = tokenizer.encode(text, add_special=False)
    for token in tokens:
        assert matcher.admits(token), (text, tokenizer.token_text(token))
        matcher.accept(token)
    return tokens


def is_constrained(matcher: GrammarMatcher) -> bool:
    assert isinstance(matcher, LazyCallMatcher)
    return matcher._position.call_matcher is not None


def finished(matcher: GrammarMatcher, tokenizer: Tokenizer, chance: random.Random, closings: list[str]) -> list[int]:
    """Random tokens that the matcher allows, until nothing is constrained."""
    walker = Walker(tokenizer, chance, soft=25, closers=closings)
    tokens: list[int] = []
    text = b""
    while is_constrained(matcher):
        assert len(tokens) < 3000, text
        mask = matcher.mask()
        assert mask is not None
        choices = [id for id in allowed(mask, tokenizer.vocab_size) if id not in tokenizer.eos_ids]
        assert choices, text
        token = walker._chosen(choices, text, len(tokens))
        matcher.accept(token)
        tokens.append(token)
        text += tokenizer.token_bytes(token)
    return tokens


def all_closers(format: Format) -> list[str]:
    """Of all its forms, and not of the first alone, but for those that could begin a key."""
    found = [one for form in format.forms for one in closers(replace(format, forms=(form,)))] or closers(format)
    return [one for one in found if one not in ("```", "print(tool_code)")]


def beginnings(name: str) -> list[str]:
    """How calls of a family may begin, as far as they have to be written to be constrained."""
    format = format_by_name(name)
    if (channels := format.channels) is not None:
        if not channels.names_calls:
            return []  # calls in such messages are not constrained
        return [f"<|channel|>commentary {channels.recipient}", f" {channels.recipient}"]
    found = []
    for form in format.forms:
        if form.opening and not form.bare and not any(text.startswith(str(form.opening[0])) for text in format.strips):
            found.append(str(form.opening[0]))
        else:
            found.append(spelled(_call_beginning((*form.opening, *form.call))))
        if form.leading(opened=False) is not None and (form.bare or form.unopened != "never"):
            found.append(spelled(_call_beginning(form.call)))
    return list(dict.fromkeys(found))


def spelled(parts: tuple[Any, ...]) -> str:
    return "".join(
        "ping" if isinstance(part, Name) else part.encode("latin-1").decode() if isinstance(part, str) else ""
        for part in parts
        if not isinstance(part, Gap | Maybe)
    )


@pytest.mark.sampled(11)
@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize(("name", "begun"), [(name, begun) for name in CALLING for begun in beginnings(name)])
def test_whatever_follows_the_beginning_of_a_call_it_parses_back_as_complete_calls(
    made: Make, name: str, begun: str, special: bool
) -> None:
    format, tokenizer = format_by_name(name), MARKED if special else PLAIN
    matchers = grammar(made, name, tokenizer)
    for seed in range(3):
        matcher = matchers.begin()
        tokens = write(matcher, tokenizer, begun)
        assert is_constrained(matcher), begun
        tokens += finished(matcher, tokenizer, random.Random(seed), all_closers(format))
        text = written(format, tokenizer, tokens)
        events = parsed(format, text)
        assert calls(events) and not content_text(events), text


@pytest.mark.parametrize("tokenizer", [PLAIN, MARKED], ids=["text", "special"])
def test_text_before_and_behind_a_call_is_free(made: Make, tokenizer: Tokenizer) -> None:
    matcher = grammar(made, "hermes", tokenizer).begin()
    write(matcher, tokenizer, 'I look: {"name": "pin')
    assert not is_constrained(matcher) and matcher.mask() is None and not matcher.done
    write(matcher, tokenizer, '\n<tool_call>{"name": "ping", "arguments": {}}</tool_call>')
    assert not is_constrained(matcher) and matcher.mask() is None
    write(matcher, tokenizer, "\nThat was it. <tool_")
    assert not is_constrained(matcher)
    write(matcher, tokenizer, "box> no")
    assert matcher.mask() is None


def test_a_call_in_a_row_is_held_again(made: Make) -> None:
    matcher = grammar(made, "hermes", PLAIN).begin()
    for _ in range(3):
        write(matcher, PLAIN, '<tool_call>\n{"name": "ping", "arguments": {')
        assert is_constrained(matcher)
        write(matcher, PLAIN, "}}\n</tool_call>")
        assert not is_constrained(matcher)
        write(matcher, PLAIN, "\n")


@pytest.mark.parametrize(
    "text",
    [
        '```python\n{"name": "ping", "arguments',
        'Send {"name": "ping", "arguments',
        '{"name": "pong", "arguments',
        '{"name": "ping"}',
        "<think>I could write <tool_call> here, or {",
    ],
)
def test_what_the_parser_takes_for_no_call_is_not_held(made: Make, text: str) -> None:
    matcher = grammar(made, "hermes", PLAIN).begin()
    write(matcher, PLAIN, text)
    assert not is_constrained(matcher) and matcher.mask() is None


def test_thinking_is_free_and_the_call_behind_it_is_held(made: Make) -> None:
    matcher = grammar(made, "hermes", MARKED, start=OPENED).begin()
    write(matcher, MARKED, "Maybe <tool_call> and so")
    assert matcher.free and not is_constrained(matcher)
    write(matcher, MARKED, "</think>\n\n<tool_call>")
    assert is_constrained(matcher)


def test_beside_a_budget_of_thinking_both_hold(made: Make) -> None:
    format, grammars = format_by_name("hermes"), made(MARKED)
    begun, _ = grammars.begun_calls(format, LAX, OPENED, parallel=True)
    both = grammars.answer(None, format, OPENED, begun=begun, budget=3)
    assert both is not None
    matcher = both.begin()
    write(matcher, MARKED, "abc")
    assert matcher.mask() is not None
    for _ in range(10):
        if matcher.mask() is None:
            break
        [token] = allowed(matcher.mask(), MARKED.vocab_size)
        matcher.accept(token)
    write(matcher, MARKED, '<tool_call>{"name": "p')
    mask = matcher.mask()
    assert mask is not None
    assert {MARKED.token_text(id) for id in allowed(mask, MARKED.vocab_size)} <= {"i", "in", "ing", 'ing"'}


def test_a_token_may_end_a_marker_only_where_a_call_goes_on_so(made: Make) -> None:
    """The vocabulary has a token `>x`, and `>` with a line break."""
    matcher = grammar(made, "hermes", PLAIN).begin()
    write(matcher, PLAIN, "Well, <tool_call")
    tokens = {PLAIN.token_text(id): id for id in range(PLAIN.vocab_size)}
    assert not matcher.admits(tokens[">x"]) and matcher.admits(tokens[">\n"]) and matcher.admits(tokens[">"])
    matcher.accept(tokens[">\n"])
    assert is_constrained(matcher)


def test_nobody_waits_for_tokens_that_cannot_begin_a_call(made: Make) -> None:
    spelled = grammar(made, "hermes", PLAIN).begin()
    write(spelled, PLAIN, "Some text <")
    assert spelled.free
    write(spelled, PLAIN, "tool_call")
    assert not spelled.free
    marked = grammar(made, "hermes", MARKED).begin()
    write(marked, MARKED, "Some text")
    assert not marked.free  # any token may be the marker


def test_looking_ahead_leaves_it_as_it_was(made: Make) -> None:
    text = 'Hm.\n<tool_call>{"name": "ping", "arguments": {}}</tool_call> and <tool_call>{"name": "ping", "arg'
    tokens = PLAIN.encode(text, add_special=False)
    for cut in range(len(tokens)):
        matcher = grammar(made, "hermes", PLAIN).begin()
        for token in tokens[:cut]:
            matcher.accept(token)
        assert matcher.count_allowed(tokens[cut:]) == len(tokens) - cut
        masks = matcher.masks(tokens[cut:])
        for token, mask in zip(tokens[cut:], masks, strict=False):
            now = matcher.mask()
            assert (now is None) == (mask is None) and (now is None or (now == mask).all())
            matcher.accept(token)


def test_a_schema_that_cannot_be_enforced_costs_that_tool_alone(made: Make) -> None:
    wrong = {"type": "object", "properties": {"a": {"$ref": "#/$defs/nowhere"}}}
    found, unenforced = made(PLAIN).begun_calls(
        format_by_name("hermes"), [*LAX, GrammarTool("odd", wrong)], UNOPENED, parallel=True
    )
    assert found is not None and unenforced == ("odd",)
    matcher = found.begin()
    write(matcher, PLAIN, '<tool_call>{"name": "odd", "arguments": {"a": [1')
    assert is_constrained(matcher)
    write(matcher, PLAIN, "]}}</tool_call>")


def test_a_grammar_that_fails_on_the_way_leaves_the_answer_free(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = grammar(made, "hermes", PLAIN).begin()
    write(matcher, PLAIN, "<tool_call>")

    def fail(self: LlguidanceMatcher) -> None:
        raise GrammarTooComplex("too complex")

    monkeypatch.setattr(LlguidanceMatcher, "mask", fail)
    assert matcher.mask() is None and not is_constrained(matcher)
    write(matcher, PLAIN, "whatever")


def test_while_others_compile_an_answer_is_not_held_and_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(self: CompilerProcesses, grammar: str) -> None:
        raise Unavailable("busy")

    monkeypatch.setattr(CompilerProcesses, "problem", busy)
    grammars = Grammars(PLAIN, PLAIN.vocab_size)
    assert grammars.begun_calls(format_by_name("hermes"), LAX, UNOPENED, parallel=True) == (
        None,
        tuple(tool.name for tool in LAX),
    )
    grammars.close()


def test_it_is_compiled_elsewhere_and_the_request_can_go_on_without(made: Make) -> None:
    token = prepared_grammars.set({})
    try:
        with pytest.raises(GrammarPending) as missing:
            made(PLAIN).begun_calls(format_by_name("glm"), LAX, UNOPENED, parallel=False)
        assert missing.value.optional
        prepared_grammars.set({missing.value.key: "others are compiled"})
        found, unenforced = made(PLAIN).begun_calls(format_by_name("glm"), LAX, UNOPENED, parallel=False)
        assert found is None and unenforced
    finally:
        prepared_grammars.reset(token)
