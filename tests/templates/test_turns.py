"""The same conversation and one more turn render to the same tokens and a tail, for the templates people use."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.text.parser.events import PastCall
from ingot.text.prompt.assembly import Prompt
from tests.templates.real import Real, all_models, named
from tests.templates.talk import SHOWN, Says, Talk, results

SWITCHING_REWRITES = {
    "glm-4.5v": "switching thinking off appends /nothink to every user message, also to past ones",
    "glm-5.2": "the effort of reasoning stands at the very front, and only where thinking is on",
    "minimax-m3": "the mode of thinking is told in the system message",
}
"""Templates that let no prompt be the beginning of the next where thinking was switched on or off in between."""
NO_END_AFTER_CALLS = {
    "deepseek-r1-distill-qwen-7b": "it writes the token that ends an answer only after a second call",
    "glm-4-9b-0414": "results are told by the user, so the tools' own turn that a call's end announces never comes",
    "glm-z1-9b-0414": "results are told by the user, so the tools' own turn that a call's end announces never comes",
}
"""Templates that follow an answer's calls by another token than the one that the model ends them with."""
FORGETS_WHO_SPEAKS = {
    "deepseek-r1": "from the second answer with calls on, it leaves out the tokens that begin an answer",
}
"""Templates that hold for an answer that nobody remembers only up to the first that called a tool."""

PLACES = st.sampled_from(["Köln", "a\nb", '"quoted"', "x" * 40])
CALLS = st.one_of(
    st.builds(lambda city, days: PastCall("get_weather", {"city": city, "days": days}), PLACES, st.integers(0, 9)),
    st.builds(lambda text: PastCall("write_file", {"path": "a.txt", "content": text}), PLACES),
    st.just(PastCall("ping", {})),
)
SAID = st.sampled_from(["Well.", "It's 3 °C.", "First,\n\n- a\n- b", "```py\nx = 1\n```", "  indented", "Ünïcode 😀"])
THOUGHT = st.sampled_from(["", "Hm.", "Let me see.\n\nOr not.", "1 + 1 = 2"])
ASKED = st.sampled_from(["Hi", "And now?", "Why, \n though", "émigré?", "<think>me</think>"])
ANSWERS = st.builds(
    Says,
    st.one_of(SAID, st.just("")),
    THOUGHT,
    st.one_of(st.just(()), st.tuples(CALLS), st.tuples(CALLS, CALLS)),
).filter(lambda says: bool(says.text or says.calls))
NEXT = st.sampled_from(["user", "user, user", "system, user", "user, system"])
TURNS = st.lists(st.tuples(NEXT, ASKED, ANSWERS, st.booleans()), min_size=2, max_size=5)
EXAMPLES = settings().max_examples // 5


def asked(kind: str, text: str, before: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The messages of the next turn. What was called is answered first; then the user may speak, or not."""
    answers = results(before or {})
    if answers and kind == "user":
        return answers
    words = {"user": {"role": "user", "content": text}, "system": {"role": "system", "content": "Be kind."}}
    return [*answers, *(words[role] for role in kind.split(", "))]


def talks(model: Real, turns: Any, *, switching: bool = False, **options: Any) -> None:
    """Goes through the turns and checks each but the first against what was there before."""
    talk = Talk(model, tools=SHOWN if model.format.can_call else (), random=Random(7), **options)
    talk.messages.append({"role": "system", "content": "Be brief."})
    for number, (kind, text, says, thinking) in enumerate(turns):
        before = talk.prompt
        kind = kind if number else "user"
        prompt = talk.asks(*asked(kind, text, talk.messages[-1]), thinking=thinking if switching else True)
        if before is not None:
            check(talk, prompt, before)
        calls = says.calls[:1] if model.one_call else says.calls
        if model.name in FORGETS_WHO_SPEAKS and not talk.remembers and talk.called:
            break
        talk.says(Says("" if calls and model.one_call else says.text or "Yes.", says.thought, calls))


def check(talk: Talk, prompt: Prompt, before: Prompt) -> None:
    known = talk.computed
    if not talk.remembers:
        # An answer that nobody remembers is encoded anew; what came before it stays.
        known = before.tokens[: before.spans[-1].begin]
    else:
        assert prompt.recalled == sum(message["role"] == "assistant" for message in talk.messages)
        if talk.model.name in NO_END_AFTER_CALLS and talk.called:
            known = known[:-1]
    assert prompt.tokens[: len(known)] == known, talk.model.tokenizer.decode(prompt.tokens, skip_special=False)


def holds_for_all_turns(model: Real, **options: Any) -> None:
    assert model.tokenizer  # loaded, or the reason to skip given, before examples are tried

    @settings(max_examples=EXAMPLES)
    @given(TURNS)
    def holds(turns: Any) -> None:
        talks(model, turns, **options)

    holds()


@pytest.mark.parametrize("model", all_models())
def test_what_was_computed_is_the_beginning_of_the_next_prompt(model: Real) -> None:
    holds_for_all_turns(model)


@pytest.mark.parametrize(
    "wrapped", [("", ""), ("```json\n", "\n```"), ("```\n", "\n```\n"), ("<tools>\n", "\n</tools>")]
)
@pytest.mark.parametrize("text", ["", "Let me see."])
def test_so_it_is_where_the_model_called_in_its_own_way(text: str, wrapped: tuple[str, str]) -> None:
    model = named("qwen-2.5")
    talk = Talk(model, tools=SHOWN, random=Random(7))
    talk.asks({"role": "user", "content": "Hi"})
    for calls in ((PastCall("ping", {}),), (PastCall("get_weather", {"city": "Köln"}), PastCall("ping", {}))):
        before = talk.prompt
        told = talk.says(Says(text, calls=calls, wrapped=wrapped))
        assert told["content"] == text and len(told["tool_calls"]) == len(calls)
        assert before is not None
        check(talk, talk.asks(*results(talk.messages[-1])), before)


@pytest.mark.parametrize("model", [model for model in all_models() if model.values[0].switch])
def test_thinking_may_be_switched_on_and_off_between_turns(model: Real) -> None:
    if model.name in SWITCHING_REWRITES:
        with pytest.raises(AssertionError):
            talks(model, [("user", "Hi", Says(), True), ("user", "Hi", Says(), False)], switching=True)
        return
    holds_for_all_turns(model, switching=True)


@pytest.mark.parametrize("model", all_models())
def test_thinking_that_the_client_sends_back_stays_where_it_was(model: Real) -> None:
    holds_for_all_turns(model, remembers=False, echoes_thinking=True)


@pytest.mark.parametrize("model", all_models())
def test_turns_that_nobody_remembers_are_rendered_the_same_ever_after(model: Real) -> None:
    holds_for_all_turns(model, remembers=False)
