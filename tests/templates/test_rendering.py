"""What a prompt tells of itself, and the two ways to render what is past, with the templates people use."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ingot.text.chat_template.messages import prepare_messages as prepare
from ingot.text.parser.events import PastCall
from ingot.text.prompt.answer_cache import AnswerCache
from ingot.text.prompt.conversation import Conversation, PromptBuilder
from tests.templates.real import Real, all_models, named
from tests.templates.talk import SHOWN, Says, Talk, results

SHOWN_ELSEWHERE = {"llama3_2", "gemma3", "mistral_nemo"}
"""Templates that put the system's words, or the first question, into what another message wrote."""
LOOK = PastCall("get_weather", {"city": "Oslo"})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def some_turns(model: Real, **options: Any) -> Talk:
    talk = Talk(model, tools=SHOWN if model.format.can_call else (), **options)
    talk.asks({"role": "system", "content": "System-Words"}, user("First-Words"))
    talk.says(Says("First-Answer", "First-Thought"))
    talk.asks(user("Second-Words"))
    talk.says(Says("", "Second-Thought", (LOOK,)) if talk.tools else Says("Second-Answer"))
    talk.asks(*results(talk.messages[-1]), user("Third-Words"))
    return talk


@pytest.mark.parametrize("model", all_models())
@pytest.mark.parametrize("history", ["stable", "official"])
def test_spans_say_where_each_message_lies(model: Real, history: Any) -> None:
    talk = some_turns(model, history=history)
    prompt = talk.prompt
    assert prompt is not None
    assert prompt.spans[0].begin == 0 and prompt.spans[-1].end == len(prompt.tokens)
    assert all(left.end == right.begin for left, right in pairwise(prompt.spans))
    assert prompt.marks[-1] == prompt.spans[-1].begin
    words = {at: message["content"] for at, message in enumerate(talk.messages) if message["role"] != "assistant"}
    for at, text in words.items() if model.name not in SHOWN_ELSEWHERE else ():
        spans = [span for span in prompt.spans if span.message == at]
        decoded = [model.tokenizer.decode(prompt.tokens[span.begin : span.end], skip_special=False) for span in spans]
        if shown := "".join(decoded):  # or together with the message before it
            assert text in shown
            assert not any(other in shown for number, other in words.items() if number > at + 1)


@pytest.mark.parametrize("model", all_models())
def test_the_official_history_is_the_template_s_own_text(model: Real) -> None:
    talk = some_turns(model, history="official", echoes_thinking=True)
    prompt = talk.prompt
    assert prompt is not None and prompt.history == "official" and not prompt.recalled
    if {*prompt.adapted} - {"thinking-left-out"}:
        return  # the template cannot render these messages as they are
    prepared = prepare(talk.messages, model.template.traits)
    assert prompt.text == model.template.render(prepared, tools=talk.tools)
    assert prompt.tokens == tuple(model.tokenizer.encode(prompt.text, add_special=False))


FORGETFUL = {"qwen-3", "qwen-3.5", "glm-5", "minimax", "deepseek-r1", "qwq-32b"}


@pytest.mark.parametrize("model", [model for model in all_models() if model.id in FORGETFUL])
def test_the_official_history_forgets_thinking_that_the_stable_one_keeps(model: Real) -> None:
    for options in ({"remembers": True}, {"remembers": False, "echoes_thinking": True}):
        talk = Talk(model, **options)  # type: ignore[arg-type]
        talk.asks(user("Hi"))
        talk.says(Says("Hello", "First-Thought"))
        stable = talk.asks(user("Bye"))
        assert "First-Thought" in stable.text and stable.history == "stable"
        talk.history = "official"
        assert "First-Thought" not in talk.asks().text


@pytest.mark.parametrize("name", ["qwen-3", "deepseek-r1"])
def test_thinking_that_nobody_knows_any_more_is_left_out_as_the_template_would(name: str) -> None:
    talk = Talk(named(name), remembers=False)
    talk.asks(user("Hi"))
    talk.says(Says("Hello", "First-Thought"))
    stable = talk.asks(user("Bye")).text
    talk.history = "official"
    assert stable == talk.asks().text


@pytest.mark.parametrize("name", ["qwen-3.5", "smollm2-135m"])
def test_the_keys_of_tools_may_come_in_any_order(name: str) -> None:
    model = named(name)

    def backwards(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: backwards(value[key]) for key in reversed(list(value))}
        return [backwards(each) for each in value] if isinstance(value, list) else value

    composer = PromptBuilder(model.tokenizer, model.template, AnswerCache())
    texts = [
        composer.compose(Conversation([user("Hi")], tools), model.format).text for tools in (SHOWN, backwards(SHOWN))
    ]
    assert texts[0] == texts[1] and "get_weather" in texts[0]
