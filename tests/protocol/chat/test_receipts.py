"""The cache's part of a receipt: places and texts made of token numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from ingot.engine.request import CacheReason, CacheReport, Ended, Timing, Usage
from ingot.protocol.chat.answers import AnswerHead, Receipt
from ingot.protocol.chat.receipts import CacheReceipt, Source, headers
from ingot.text.prompt.prompt import MessageSpan, Prompt

TEXT = "<s>hi there</s><a>yes</a>"
SPANS = (MessageSpan(0, "user", 0, 15), MessageSpan(1, "assistant", 15, 25))


def decode(ids: Any) -> str:
    return "".join(map(chr, ids))


def source(*prompts: Prompt, thinking: str | None = None) -> Source:
    return Source(prompts, decode, thinking)


def report(reason: CacheReason = "diverged", known: int = 6, ours: str = "there", theirs: str = "you") -> CacheReport:
    return CacheReport(25, known, known, reason, tuple(map(ord, ours)), tuple(map(ord, theirs)))


def told(reports: list[CacheReport], origin: Source | None) -> Any:
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
    made = dict(headers(CacheReceipt.of([report()], None), Timing(0.25, 1.5, 2)))
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
    for count, said in ((2, {"calls_in_thinking": 2}), (0, {})):
        receipt = msgspec.to_builtins(Receipt.of(head, Ended(Usage(), Timing(), calls_in_thinking=count)))
        assert {key: receipt[key] for key in receipt.keys() & {"calls_in_thinking"}} == said
