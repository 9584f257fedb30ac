from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.text.chat_template.messages import plain_text
from ingot.text.chat_template.traits import TemplateTraits
from ingot.text.prompt.roles import TemplateMessage, in_order

LENIENT = TemplateTraits()
STRICT = TemplateTraits(late_system="lost", repeats=frozenset())
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}


def lines(spoken: str) -> list[TemplateMessage]:
    """`su`: the system speaks, then the user; everyone says their letter and its number."""
    return [TemplateMessage({"role": ROLES[role], "content": f"{role}{at}"}, (at,)) for at, role in enumerate(spoken)]


def placed(spoken: str, traits: TemplateTraits, history: Any = "stable") -> list[tuple[str, str]]:
    done, _ = in_order(lines(spoken), traits, history)
    return [(line.role, line.message["content"]) for line in done]


def test_what_a_template_can_render_is_left_alone() -> None:
    given = lines("ssuuaatsusa")
    assert in_order(given, LENIENT, "stable") == (given, ())


def test_the_developer_is_the_system() -> None:
    assert placed("du", LENIENT) == [("system", "d0"), ("user", "u1")]
    assert placed("du", replace(LENIENT, developer=True)) == [("developer", "d0"), ("user", "u1")]


def test_speakers_who_may_not_speak_twice_are_merged() -> None:
    assert placed("ssuuaa", STRICT) == [("system", "s0\n\ns1"), ("user", "u2\n\nu3"), ("assistant", "a4\n\na5")]
    assert in_order(lines("uu"), STRICT, "stable")[1] == ("user-merged",)
    assert placed("att", STRICT)[1:] == [("tool", "t1"), ("tool", "t2")]


def test_a_late_system_message_is_folded_into_the_users_turn() -> None:
    folded = "<system>\ns{}\n</system>"
    assert placed("uas", STRICT)[2] == ("user", folded.format(2))
    assert placed("uasu", STRICT)[2] == ("user", folded.format(2) + "\n\nu3")
    assert placed("us", STRICT) == [("user", "u0\n\n" + folded.format(1))]
    assert placed("uats", STRICT)[2:] == [("tool", "t2"), ("user", folded.format(3))]
    assert in_order(lines("uas"), STRICT, "stable")[1] == ("system-folded",)


def test_results_are_answered_by_nothing_where_a_template_wants_an_answer_before_the_user_speaks() -> None:
    wanting = replace(STRICT, user_after_results=False)
    assert placed("uatu", wanting)[2:] == [("tool", "t2"), ("assistant", ""), ("user", "u3")]
    assert placed("uatsu", wanting)[3:] == [("assistant", ""), ("user", "<system>\ns3\n</system>\n\nu4")]
    assert placed("uatau", wanting)[3] == ("assistant", "a3")
    assert in_order(lines("uatu"), wanting, "stable")[1] == ("empty-answer-inserted",)


def test_a_template_without_a_system_role_gets_its_words_from_the_user() -> None:
    assert placed("su", replace(STRICT, system=False)) == [("user", "<system>\ns0\n</system>\n\nu1")]


def test_a_template_that_moves_late_system_messages_may_do_so_in_the_official_history() -> None:
    moving = replace(LENIENT, late_system="moved")
    assert placed("uas", moving, "official")[2] == ("system", "s2")
    assert placed("uas", moving)[2][0] == "user"


def test_merged_messages_keep_their_parts_calls_and_thinking() -> None:
    first = TemplateMessage({"role": "assistant", "content": None, "tool_calls": [1], "reasoning_content": "a"}, (0,))
    second = TemplateMessage({"role": "assistant", "content": [{"type": "text", "text": "x"}], "tool_calls": [2]}, (1,))
    third = TemplateMessage({"role": "assistant", "content": "y", "reasoning_content": "b"}, (2,))
    [merged], _ = in_order([first, second, third], STRICT, "stable")
    assert merged.message["tool_calls"] == [1, 2]
    assert merged.message["reasoning_content"] == "a\n\nb"
    assert "".join(part["text"] for part in merged.message["content"]) == "x\n\ny"
    assert merged.sources == (0, 1, 2)


@pytest.mark.parametrize("traits", [STRICT, replace(STRICT, system=False)])
@given(spoken=st.text("suat", min_size=1, max_size=12), more=st.text("suat", max_size=6))
def test_every_word_is_kept_in_order_and_what_follows_changes_nothing_before(
    traits: TemplateTraits, spoken: str, more: str
) -> None:
    whole, _ = in_order(lines(spoken + "a" + more), traits, "stable")
    words = [f"{role}{at}" for at, role in enumerate(spoken + "a" + more)]
    text = "\n".join(plain_text(line.message["content"]) for line in whole)
    assert [word for word in text.replace("<system>", "").replace("</system>", "").split() if word] == words
    assert [source for line in whole for source in line.sources] == list(range(len(words)))
    short, _ = in_order(lines(spoken), traits, "stable")
    settled = short[:-1] if short[-1].role == "assistant" else short
    assert whole[: len(settled)] == settled
