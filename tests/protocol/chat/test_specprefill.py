"""What of a conversation is computed in any case, where less than all of it is asked for."""

from __future__ import annotations

from ingot.protocol.chat.specprefill import TURN_BEGIN, TURN_END, WHOLE_TURN, specprefill_ask
from ingot.text.prompt.assembly import MessageSpan, Prompt


def whole(*parts: tuple[str, int], added: tuple[int, ...] = ()) -> list[int]:
    """Which of these messages, each a role and so many tokens, are computed whole; `added` are the template's own."""
    spans, begin = list[MessageSpan](), 0
    for number, (role, size) in enumerate(parts):
        spans.append(MessageSpan(None if number in added else number, role, begin, begin + size))
        begin += size
    ask = specprefill_ask(True, None, [Prompt((0,) * begin, "", tuple(spans))])
    assert ask is not None
    covered = {position for first, end in ask.whole[0] for position in range(first, end)}
    return [number for number, span in enumerate(spans) if covered.issuperset(range(span.begin, span.end))]


def test_rules_and_what_the_template_adds_are_whole_however_long_they_are() -> None:
    parts = [("system", 5000), ("tools", 5000), ("user", 5000), ("assistant", 5000), ("developer", 5000), ("user", 10)]
    assert whole(*parts, added=(1,)) == [0, 1, 4, 5]


def test_all_that_came_behind_the_last_answer_is_the_newest_turn() -> None:
    parts = [("user", 100), ("assistant", 100), ("tool", 100), ("tool", 100), ("user", 100)]
    assert whole(*parts) == [2, 3, 4]


def test_a_long_turn_is_whole_at_its_ends_alone() -> None:
    size = WHOLE_TURN + 1
    assert whole(("user", WHOLE_TURN)) == [0] and whole(("user", size)) == []
    ask = specprefill_ask(True, None, [Prompt((0,) * size, "", (MessageSpan(0, "user", 0, size),))])
    assert ask is not None and ask.whole == (((0, TURN_BEGIN), (size - TURN_END, size)),)


def test_a_prompt_in_tokens_has_no_messages() -> None:
    ask = specprefill_ask(None, 0.2, [(1, 2, 3)])
    assert ask is not None and ask.whole == ((),) and not ask.forced


def test_a_policy_is_for_prompts_of_its_length_whose_requests_say_nothing() -> None:
    prompt = Prompt((0,) * 600, "", (MessageSpan(0, "user", 0, 600),))
    ask = specprefill_ask(None, None, [prompt], auto_from=600)
    assert ask is not None and ask.auto and not ask.forced and ask.whole == (((0, TURN_BEGIN), (600 - TURN_END, 600)),)
    assert specprefill_ask(None, None, [prompt], auto_from=601) is None
    assert specprefill_ask(False, None, [prompt], auto_from=1) is None
    share = specprefill_ask(None, 0.2, [prompt], auto_from=1)
    assert share is not None and not share.auto
