from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ingot.engine.request import (
    CallArguments,
    CallBegan,
    CallEnded,
    Ended,
    Event,
    SequenceEnded,
    TextDelta,
    ThinkingDelta,
    Timing,
    Usage,
)
from ingot.protocol.chat.prompts import rendered
from ingot.protocol.chat.turns import Turn
from ingot.protocol.served import Served
from ingot.text.parse.events import PastCall
from ingot.text.tool_formats.registry import format_named
from ingot.text.tool_formats.rendering import render_call
from tests.http.scripted import CARD, ByteTokenizer, settings

USER = {"role": "user", "content": "Hi"}
END = 257
HERMES = format_named("hermes")


def served() -> Served:
    return Served.of(CARD, ByteTokenizer(), settings())  # type: ignore[arg-type]


def run(to: Served, events: list[Event], messages: list[dict[str, Any]] | None = None, **options: Any) -> None:
    prompt = rendered(to, [USER] if messages is None else messages, **options)
    turn = Turn(to, prompt)
    for event in [*events, Ended(Usage(), Timing())]:
        turn.take(event)


def ended(
    text: str, *last: int, index: int = 0, by: Any = END, reason: Any = "stop", missing: str = ""
) -> SequenceEnded:
    return SequenceEnded(index, reason, by, 0, tokens=(*text.encode(), *last), missing=missing)


def next_prompt(to: Served, **answer: Any) -> str:
    return rendered(to, [USER, {"role": "assistant", **answer}, USER]).text


def test_what_was_generated_comes_back_when_the_client_sends_what_it_was_told() -> None:
    to = served()
    run(to, [ThinkingDelta(0, "Hm."), TextDelta(0, "Y"), TextDelta(0, "es"), ended("<think>Hm.</think>Yes", END)])
    assert "assistant\n<think>Hm.</think>Yes<|im_end|>" in next_prompt(to, content="Yes")
    assert "<think>" not in next_prompt(to, content="No")
    assert "<think>Hm.</think>Yes" in next_prompt(to, content="Yes", reasoning_content="Hm.")


def test_each_of_several_answers_is_kept() -> None:
    to = served()
    run(to, [TextDelta(0, "A"), TextDelta(1, "B"), ended("<a>A", END, index=0), ended("<b>B", END, index=1)])
    assert "<a>A" in next_prompt(to, content="A") and "<b>B" in next_prompt(to, content="B")


def test_calls_are_known_by_what_they_call() -> None:
    to = served()
    began = [CallBegan(0, 0, "c1", "look"), CallArguments(0, 0, '{"a":'), CallArguments(0, 0, " 1}")]
    run(to, [*began, CallEnded(0, 0, True), ended("<<look>>", END, reason="tool_calls")])
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{ "a" : 1 }'}}
    assert "<<look>><|im_end|>" in next_prompt(to, content=None, tool_calls=[call])


def test_a_call_that_was_cut_short_is_completed() -> None:
    to = served()
    began = [CallBegan(0, 0, "c1", "look"), CallArguments(0, 0, "{}"), CallEnded(0, 0, True)]
    written = render_call(HERMES, [PastCall("look", {})])
    missing = "\n</tool_call>"
    run(to, [*began, ended(written.removesuffix(missing), by=None, reason="tool_calls", missing=missing)])
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    assert f"{written}<|im_end|>" in next_prompt(to, content=None, tool_calls=[call])


@pytest.mark.parametrize(
    ("generated", "told"), [("Yes. STOP", "Yes. "), ("Yes. STOPPED", "Yes. "), ("Yes. STOP", "Yes. STOP")]
)
def test_a_stop_string_stays_only_where_the_client_was_told_of_it(generated: str, told: str) -> None:
    to = served()
    run(to, [TextDelta(0, told), ended(f"<x>{generated}", by="STOP")])
    assert f"<x>{told}<|im_end|>" in next_prompt(to, content=told)


def test_a_stop_string_within_a_token_leaves_nothing_to_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    to = served()
    two = {260: b"s S", 261: b"TOP"}
    spell = ByteTokenizer.token_bytes
    monkeypatch.setattr(ByteTokenizer, "token_bytes", lambda self, token: two.get(token) or spell(self, token))
    run(to, [TextDelta(0, "Yes "), SequenceEnded(0, "stop", "STOP", 0, tokens=(*b"Ye", 260, 261))])
    assert len(to.answers) == 0


def test_an_answer_that_ran_out_of_tokens_is_kept_as_it_is() -> None:
    to = served()
    run(to, [TextDelta(0, "Ye"), ended("<x>Ye", by=None, reason="length")])
    assert "<x>Ye<|im_end|>" in next_prompt(to, content="Ye")


def test_nothing_is_kept_of_a_request_that_wants_no_cache() -> None:
    to = served()
    run(to, [TextDelta(0, "Yes"), ended("Yes", END)], remembers=False)
    assert len(to.answers) == 0


def test_tenants_and_salts_keep_to_themselves() -> None:
    to = served()
    run(to, [TextDelta(0, "Yes"), ended("<x>Yes", END)], salt="mine")
    assert "<x>" not in next_prompt(to, content="Yes")
    assert "<x>" in rendered(to, [USER, {"role": "assistant", "content": "Yes"}, USER], salt="mine").text
    other = replace(to, tenant="other")
    assert "<x>" not in rendered(other, [USER, {"role": "assistant", "content": "Yes"}, USER], salt="mine").text


def test_an_answer_that_was_begun_by_the_client_is_known_whole() -> None:
    to = served()
    begun = [USER, {"role": "assistant", "content": "Once "}]
    run(to, [TextDelta(0, "upon"), ended("up-on", END)], begun, ending="continued")
    assert "Once up-on<|im_end|>" in next_prompt(to, content="Once upon")


def test_the_server_s_history_holds_where_a_request_does_not_say() -> None:
    official = Served.of(CARD, ByteTokenizer(), settings(template_history="official"))  # type: ignore[arg-type]
    assert rendered(official, [USER]).history == "official"
    assert rendered(official, [USER], history="stable").history == "stable"
    assert rendered(served(), [USER]).history == "stable"
