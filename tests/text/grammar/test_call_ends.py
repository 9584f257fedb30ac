"""A forced answer may end behind each of its calls, and white space behind a call commits to nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from ingot.text.grammar.calls import MOST_GAP, CallChoice, ForcedCall, GrammarTool
from ingot.text.grammar.grammars import Grammars
from ingot.text.grammar.matcher import GrammarMatcher, allows_token
from ingot.text.parser.events import PastCall
from ingot.text.tokenizer.tokenizer import Tokenizer
from ingot.text.tool_formats.format import CallForm
from ingot.text.tool_formats.registry import format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.text.grammar.test_calls import CALLING, calls, content_text, parsed, vocabulary

pytestmark = pytest.mark.sampled(5)
PING = GrammarTool("ping", {"type": "object", "properties": {}, "additionalProperties": False}, strict=True)
MARKED = [name for name in CALLING if format_by_name(name).channels is None]


def first_form(name: str) -> CallForm:
    return format_by_name(name).forms[0]


def is_closed(name: str) -> bool:
    """Whether something is written behind the last of all calls."""
    return first_form(name).joint is not None and bool(first_form(name).closing)


OPEN = [name for name in MARKED if not is_closed(name)]
SECTIONS = [name for name in MARKED if is_closed(name) and (first_form(name).joint or "x")[0].isspace()]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer: Tokenizer
    grammars: Grammars

    def matcher(self, name: str, choice: CallChoice = "required", *, parallel: bool = True) -> GrammarMatcher:
        grammar = self.grammars.tools(format_by_name(name), [PING], choice, parallel=parallel)
        assert grammar is not None
        return grammar.begin()

    def follows(self, matcher: GrammarMatcher, text: str) -> bool:
        """Whether the matcher accepts all of the text."""
        for token in self.tokenizer.encode(text, add_special=False):
            mask = matcher.mask()
            if matcher.done or mask is None or not allows_token(mask, token):
                return False
            matcher.accept(token)
        return True

    def may_end(self, matcher: GrammarMatcher) -> bool:
        mask = matcher.mask()
        assert mask is not None
        return matcher.done or any(allows_token(mask, token) for token in self.tokenizer.eos_ids)


@pytest.fixture(scope="module", params=[False, True], ids=["text", "special"])
def words(request: pytest.FixtureRequest) -> Iterator[Vocabulary]:
    """With the formats' markers as text, and as special tokens."""
    tokenizer = vocabulary(request.param)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    yield Vocabulary(tokenizer, grammars)
    grammars.close()


def written(name: str, count: int) -> str:
    return render_calls(format_by_name(name), [PastCall("ping", {})] * count)


@pytest.mark.parametrize("name", MARKED)
def test_behind_any_number_of_calls_the_answer_may_end(words: Vocabulary, name: str) -> None:
    for count in (1, 2, 3):
        matcher = words.matcher(name)
        assert words.follows(matcher, written(name, count))
        assert words.may_end(matcher)


@pytest.mark.parametrize("name", OPEN)
@pytest.mark.parametrize("space", ["\n", " ", "\n\n", "\r\n  "])
def test_white_space_behind_a_call_may_end_the_answer_and_may_not(words: Vocabulary, name: str, space: str) -> None:
    matcher = words.matcher(name)
    assert words.follows(matcher, written(name, 1) + space)
    assert words.may_end(matcher)
    if first_form(name).joint is None:
        assert words.follows(matcher, written(name, 1))
        assert words.may_end(matcher)


@pytest.mark.parametrize("name", SECTIONS)
def test_white_space_within_a_section_may_end_it_and_may_not(words: Vocabulary, name: str) -> None:
    closing = "".join(part for part in first_form(name).closing if isinstance(part, str))
    one = written(name, 1)
    called = one[: one.rindex(closing)].rstrip()
    for behind in ("", "\n", "\n\n"):
        ending = words.matcher(name)
        assert words.follows(ending, called + behind + closing)
        assert words.may_end(ending)
    going_on = words.matcher(name)
    assert words.follows(going_on, called + "\n\n")
    assert words.follows(going_on, written(name, 2)[len(called) :].lstrip())


@pytest.mark.parametrize("name", OPEN)
def test_white_space_behind_a_call_comes_to_an_end(words: Vocabulary, name: str) -> None:
    matcher = words.matcher(name)
    assert words.follows(matcher, written(name, 1) + "\n" * MOST_GAP)
    assert not words.follows(matcher, "\n")
    assert words.may_end(matcher)


@pytest.mark.parametrize("name", CALLING)
@pytest.mark.parametrize(
    ("choice", "parallel"), [("required", False), (ForcedCall("ping"), True), (ForcedCall("ping"), False)]
)
def test_where_one_call_is_allowed_it_is_the_end(
    words: Vocabulary, name: str, choice: CallChoice, parallel: bool
) -> None:
    matcher = words.matcher(name, choice, parallel=parallel)
    call = written(name, 1)
    if (channels := format_by_name(name).channels) is not None:
        call = call.removesuffix(channels.call_end)
    assert words.follows(matcher, call)
    assert matcher.done


@pytest.mark.parametrize("name", MARKED)
@pytest.mark.parametrize("space", ["", "\n", "\n\n "])
def test_the_space_behind_calls_is_no_content(name: str, space: str) -> None:
    text = written(name, 2) + space
    events = parsed(format_by_name(name), text)
    assert [called for called, _ in calls(events)] == ["ping", "ping"] and not content_text(events)
