"""The cache's part of a receipt: places and texts made of token numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from ingot.engine.request import (
    CacheReason,
    CacheReport,
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
from ingot.observe.metrics import ExpertStats
from ingot.protocol.chat.answers import (
    AnswerHead,
    CacheReceipt,
    ConversationTurn,
    PromptSource,
    Receipt,
    receipt_headers,
)
from ingot.protocol.chat.prompts import render_messages
from ingot.protocol.served import ServedModel
from ingot.text.parser.events import PastCall
from ingot.text.prompt.assembly import MessageSpan, Prompt
from ingot.text.tool_formats.registry import format_by_name
from ingot.text.tool_formats.rendering import render_calls
from tests.http.scripted import CARD, ByteTokenizer, settings

USER = {"role": "user", "content": "Hi"}
END = 257
HERMES = format_by_name("hermes")


def served() -> ServedModel:
    return ServedModel.of(CARD, ByteTokenizer(), settings())  # type: ignore[arg-type]


def run(to: ServedModel, events: list[Event], messages: list[dict[str, Any]] | None = None, **options: Any) -> None:
    prompt = render_messages(to, [USER] if messages is None else messages, **options)
    turn = ConversationTurn(to, prompt)
    for event in [*events, Ended(Usage(), Timing())]:
        turn.take(event)


def ended(
    text: str, *last: int, index: int = 0, by: Any = END, reason: Any = "stop", missing: str = ""
) -> SequenceEnded:
    return SequenceEnded(index, reason, by, 0, tokens=(*text.encode(), *last), missing=missing)


def next_prompt(to: ServedModel, **answer: Any) -> str:
    return render_messages(to, [USER, {"role": "assistant", **answer}, USER]).text


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
    written = render_calls(HERMES, [PastCall("look", {})])
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
    assert "<x>" in render_messages(to, [USER, {"role": "assistant", "content": "Yes"}, USER], salt="mine").text
    other = replace(to, tenant="other")
    assert "<x>" not in render_messages(other, [USER, {"role": "assistant", "content": "Yes"}, USER], salt="mine").text


def test_an_answer_that_was_begun_by_the_client_is_known_whole() -> None:
    to = served()
    started = [USER, {"role": "assistant", "content": "Once "}]
    run(to, [TextDelta(0, "upon"), ended("up-on", END)], started, ending="continued")
    assert "Once up-on<|im_end|>" in next_prompt(to, content="Once upon")


def test_the_server_s_history_holds_where_a_request_does_not_say() -> None:
    official = ServedModel.of(CARD, ByteTokenizer(), settings(template_history="official"))  # type: ignore[arg-type]
    assert render_messages(official, [USER]).history == "official"
    assert render_messages(official, [USER], history="stable").history == "stable"
    assert render_messages(served(), [USER]).history == "stable"


TEXT = "<s>hi there</s><a>yes</a>"
SPANS = (MessageSpan(0, "user", 0, 15), MessageSpan(1, "assistant", 15, 25))


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


def source(*prompts: Prompt, thinking: str | None = None) -> PromptSource:
    return PromptSource(prompts, decode, thinking)


def report(reason: CacheReason = "diverged", known: int = 6, ours: str = "there", theirs: str = "you") -> CacheReport:
    return CacheReport(25, known, known, reason, tuple(map(ord, ours)), tuple(map(ord, theirs)))


def told(reports: list[CacheReport], origin: PromptSource | None) -> Any:
    return msgspec.to_builtins(CacheReceipt.of(reports, origin))


CONVERSATION = Prompt(tuple(map(ord, TEXT)), TEXT, SPANS)


def test_a_divergence_names_message_and_character_and_shows_both_sides() -> None:
    assert told([report()], source(CONVERSATION)) == {
        "matched_tokens": 6,
        "tier": "ram",
        "codec": "raw",
        "reason": "diverged",
        "diverged": {"message": 0, "role": "user", "character": 6, "token": 6, "ours": "there", "theirs": "you"},
    }


def test_a_plain_text_has_characters_but_no_messages() -> None:
    parted = told([report(known=4)], source(Prompt(tuple(map(ord, "abcdefgh")), "")))["diverged"]
    assert (parted["message"], parted["role"], parted["character"]) == (None, None, 4)


def test_a_prompt_that_only_goes_on_has_not_diverged() -> None:
    assert told([report("new_turn", theirs="")], source(CONVERSATION))["diverged"] is None


def test_what_took_over_nothing_lay_nowhere() -> None:
    receipt = told([CacheReport(25, 0, 0, "off")], source(CONVERSATION))
    assert receipt == {"matched_tokens": 0, "tier": None, "codec": None, "reason": "off", "diverged": None}


def test_thinking_that_one_side_lacks_is_a_rewrite_by_the_template() -> None:
    origin = source(CONVERSATION, thinking="<think>")
    rewritten = report(known=18, ours="yes</a>", theirs="\n<think>hm")
    assert told([rewritten], origin)["reason"] == "template_rewrite"
    assert told([report(known=18, ours="yes</a>", theirs="no</a>")], origin)["reason"] == "diverged"
    assert told([report(ours="x", theirs="<think>")], origin)["reason"] == "diverged"


def test_several_prompts_are_summed_and_told_apart() -> None:
    both = source(CONVERSATION, CONVERSATION)
    receipt = told([report(), report("new_turn", theirs="")], both)
    assert (receipt["matched_tokens"], receipt["reason"], receipt["diverged"]) == (12, "several", None)
    assert [one["reason"] for one in receipt["prompts"]] == ["diverged", "new_turn"]
    assert receipt["prompts"][0]["diverged"]["character"] == 6


def test_headers_say_the_same_in_short() -> None:
    made = dict(receipt_headers(CacheReceipt.of([report()], None), Timing(0.25, 1.5, 2)))
    assert made == {
        "ingot-cache-matched-tokens": "6",
        "ingot-cache-reason": "diverged",
        "ingot-queue-s": "0.250000",
        "ingot-prefill-s": "1.500000",
        "ingot-decode-s": "2.000000",
    }


def test_a_request_that_never_ran_has_no_receipt_for_the_cache() -> None:
    assert CacheReceipt.of([], None) is msgspec.UNSET


def test_a_receipt_names_what_went_through_a_codec() -> None:
    raw, lossy = report(), replace(report(), codec="turbo3")
    nothing = replace(report(), matched=0, codec="turbo3")
    assert told([raw], source(CONVERSATION))["codec"] == "raw"
    assert told([lossy], source(CONVERSATION))["codec"] == "turbo3"
    assert told([raw, lossy], source(CONVERSATION, CONVERSATION))["codec"] == "turbo3"
    assert told([nothing], source(CONVERSATION))["codec"] is None


def test_a_receipt_says_how_many_calls_were_read_out_of_thinking() -> None:
    head = AnswerHead("id", 0, "model", "print")
    for count, result in ((2, {"calls_in_thinking": 2}), (0, {})):
        receipt = msgspec.to_builtins(Receipt.of(head, Ended(Usage(), Timing(), calls_in_thinking=count)))
        assert {key: receipt[key] for key in receipt.keys() & {"calls_in_thinking"}} == result


def test_a_receipt_says_what_experts_cost_that_had_to_be_read() -> None:
    head, stats = AnswerHead("id", 0, "model", "print"), ExpertStats(0.5, 7, 2, 1, bytes_read=4096, waited_s=0.25)
    receipt = msgspec.to_builtins(Receipt.of(head, Ended(Usage(), Timing(), experts=stats)))
    counts = {"hits": 7, "predicted": 2, "misses": 1, "read_bytes": 4096, "waited_s": 0.25}
    assert receipt["experts"] == {"share": 0.5, **counts}
    assert "experts" not in msgspec.to_builtins(Receipt.of(head, Ended(Usage(), Timing())))


@pytest.mark.parametrize(
    ("varies", "expected"),
    [(None, {}), ("", {"reproducible": True}), ("device", {"reproducible": False, "varies": "device"})],
)
def test_a_receipt_says_whether_the_answer_is_reproducible_or_why_not(
    varies: str | None, expected: dict[str, Any]
) -> None:
    head = AnswerHead("id", 0, "model", "print", varies=varies)
    receipt = msgspec.to_builtins(Receipt.of(head, Ended(Usage(), Timing())))
    assert {key: receipt[key] for key in receipt.keys() & {"reproducible", "varies"}} == expected
