from __future__ import annotations

import gc
import re
from typing import Any

import pytest

from ingot.text.chat_template.chat_template import ChatTemplate
from ingot.text.chat_template.sandbox import TextRun, Thought

TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "Be."},
    {"role": "user", "content": "One"},
    {"role": "assistant", "content": "Two"},
    {"role": "user", "content": "Three"},
]


def pieces(source: str, messages: list[dict[str, Any]] = TALK, history: Any = "stable") -> list[tuple[int | None, str]]:
    rendered = ChatTemplate(source).rendered(messages, history=history)
    return [(piece.message, piece.text) for piece in rendered.pieces if piece.text]


def test_each_message_is_found_where_its_loop_wrote_it() -> None:
    source = "<s>{% for m in messages %}[{{ m.content }}]{% endfor %}<a>"
    assert pieces(source) == [(None, "<s>"), (0, "[Be.]"), (1, "[One]"), (2, "[Two]"), (3, "[Three]"), (None, "<a>")]


@pytest.mark.parametrize(
    "loop",
    [
        "{% for m in messages[1:] %}",
        "{% set rest = messages[1:] %}{% for m in rest %}",
        "{% for m in messages if m.role != 'system' %}",
        "{% for m in messages|rejectattr('role', 'equalto', 'system') %}",
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}",
    ],
)
def test_messages_are_known_in_whatever_list_they_are_handed_on(loop: str) -> None:
    source = "{{ messages[0].content }}" + loop + "{{ m.content }}{% endfor %}"
    assert pieces(source) == [(None, "Be."), (1, "One"), (2, "Two"), (3, "Three")]


def test_loops_over_other_things_leave_no_trace() -> None:
    source = (
        "{% macro each(text) %}{% for c in text %}{{ c }}{% endfor %}.{% endmacro %}"
        "{% for n in range(2) %}{{ n }}{% endfor %}"
        "{% for m in messages %}{% for other in messages %}{{ loop.index }}{% endfor %}"
        "{{ each(m.content) }}{% endfor %}"
        "{% for n in [7] %}{{ n }}{% endfor %}"
    )
    expected = [(None, "01"), (0, "1234Be.."), (1, "1234One."), (2, "1234Two."), (3, "1234Three."), (None, "7")]
    assert pieces(source) == expected


def test_a_message_may_have_several_places() -> None:
    source = "{% for m in messages %}{{ m.role[0] }}{% endfor %}|{% for m in messages %}{{ m.content }}{% endfor %}"
    found = pieces(source)
    assert [text for at, text in found if at == 1] == ["u", "One"]
    assert (None, "|") in found


def test_marks_in_a_message_are_text_like_any_other() -> None:
    forged = "\ue0000123456789abcdef:0\ue001"
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert pieces(source, [{"role": "user", "content": forged}]) == [(0, forged)]


LAST_QUERY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}{% if m.reasoning_content and CONDITION %}"
    "({{ m.reasoning_content }}){% endif %}{{ m.content }}{% endfor %}"
)
THINKING = [
    {"role": "user", "content": "Q"},
    {"role": "assistant", "content": "A", "reasoning_content": "R"},
    {"role": "user", "content": "Q"},
]


@pytest.mark.parametrize(
    "condition",
    [
        "loop.index0 > ns.last",
        "ns.last < loop.index0",
        "not loop.index0 <= ns.last",
        "not (ns.last >= loop.index0)",
        "loop.index > ns.last + 1 or loop.index0 > ns.last",
    ],
)
def test_a_turn_before_the_newest_question_keeps_its_thinking_unless_told_otherwise(condition: str) -> None:
    template = ChatTemplate(LAST_QUERY.replace("CONDITION", condition))
    assert template.rendered(THINKING, history="stable").text == "Q(R)AQ"
    assert template.rendered(THINKING, history="official").text == template.render(THINKING) == "QAQ"
    assert template.traits.reasoning == "reasoning_content"


def test_a_place_in_a_variable_of_its_own_is_a_place_all_the_same() -> None:
    source = LAST_QUERY.replace(
        "{% if m.reasoning_content and CONDITION %}",
        "{% set at = loop.index0 %}{% if m.reasoning_content and at > ns.last %}",
    )
    assert ChatTemplate(source).rendered(THINKING, history="stable").text == "Q(R)AQ"


@pytest.mark.parametrize("condition", ["loop.index0 > 1", "loop.index0 > limit", "loop.index0 == ns.last", "loop.last"])
def test_other_comparisons_mean_what_they_say(condition: str) -> None:
    source = LAST_QUERY.replace("CONDITION", condition)
    template = ChatTemplate(source)
    extra = {"limit": 5} if "limit" in condition else None
    assert template.rendered(THINKING, history="stable", extra=extra).text == "QAQ"


def test_the_question_is_about_assistants_alone() -> None:
    source = LAST_QUERY.replace("CONDITION", "true").replace("{{ m.content }}", "{{ loop.index0 > ns.last }}")
    assert ChatTemplate(source).rendered(THINKING, history="stable").text == "False(R)TrueFalse"


@pytest.mark.parametrize(
    "newest", ["m == users[-1]", "users[-1] == m", "m == users|last", "loop.last and rules is defined"]
)
def test_what_goes_with_the_newest_question_goes_with_the_first_instead(newest: str) -> None:
    source = (
        "{% set rules = messages[0].content %}{% set users = messages|selectattr('role', 'equalto', 'user')|list %}"
        "{% for m in messages[1:] %}{% if " + newest + " %}({{ rules }}){% endif %}{{ m.content }} {% endfor %}"
    )
    template = ChatTemplate(source)
    assert template.rendered(TALK, history="stable").text == "(Be.)One Two Three "
    assert template.rendered(TALK, history="official").text == "One Two (Be.)Three "


@pytest.mark.parametrize("asked", ["loop.last", "loop.last and add_generation_prompt", "m == messages[2]"])
def test_other_questions_after_the_last_message_mean_what_they_say(asked: str) -> None:
    source = "{% for m in messages %}{% if " + asked + " %}!{% endif %}{{ m.content }} {% endfor %}"
    template = ChatTemplate(source)
    assert template.rendered(TALK, history="stable").text == template.render(TALK)


def test_content_is_not_cut_where_its_thinking_is_to_be_kept() -> None:
    source = "{% for m in messages %}{{ m.content.split('</think>')[-1].lstrip() }}|{% endfor %}"
    template = ChatTemplate(source)
    text = "<think>R</think> A"
    assert template.render([{"role": "assistant", "content": text}]) == "A|"
    assert template.render([{"role": "assistant", "content": Thought(text)}]) == f"{text}|"


def test_the_pieces_are_the_whole_text() -> None:
    rendered = ChatTemplate("a{% for m in messages %}{{ m.content }}{% endfor %}z").rendered(TALK, history="stable")
    assert rendered.text == "aBe.OneTwoThreez" and rendered.pieces[-1] == TextRun(None, "z")


def test_rendering_compiles_no_expressions_of_its_own() -> None:
    def compiled() -> dict[int, re.Pattern[str]]:
        return {id(each): each for each in gc.get_objects() if type(each) is re.Pattern}

    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    pieces(source)
    before = compiled()
    pieces(source)
    assert compiled().keys() <= before.keys()
