"""Conversations made into prompts, with small templates that show one thing each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from ingot.errors import BadRequest, ContextOverflow, IngotError, Unsupported
from ingot.text.chat_template.chat_template import ChatTemplate
from ingot.text.prompt.answer_cache import AnswerCache
from ingot.text.prompt.assembly import Prompt
from ingot.text.prompt.canonical import key_with_answer
from ingot.text.prompt.conversation import Conversation, PromptBuilder
from ingot.text.tokenizer.special_tokens import ControlTokenQuoting, ControlTokens
from ingot.text.tool_formats.registry import find_format, format_by_name
from tests.http.scripted import ByteTokenizer
from tests.text.chat_template.test_chat_template import ONLY_WITH_TOOLS, real_templates
from tests.text.conftest import llama_cpp_templates

CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if quiet %}()"
    "{% endif %}{% endif %}{% if tools %}{% endif %}"
)
RESULTS = CHATML + "{% if messages[-1].role == 'tool' %}{% endif %}"  # knows that role, too
USER = {"role": "user", "content": "Hi"}
HERMES = format_by_name("hermes")


class Bytes(ByteTokenizer):
    """The end of an answer has a text here."""

    eos_ids = frozenset({257})

    def __init__(self, source: str, end: str = "</>") -> None:
        self.template, self.bos, self._end = ChatTemplate(source), True, end

    def token_bytes(self, token: int) -> bytes:
        return self._end.encode() if token == 257 else super().token_bytes(token)


class World:
    def __init__(self, source: str = CHATML, end: str = "</>") -> None:
        self.tokenizer: Any = Bytes(source, end)
        self.answers = AnswerCache()
        self.composer = PromptBuilder(self.tokenizer, self.tokenizer.template, self.answers)

    def prompt(self, *messages: Any, **options: Any) -> Prompt:
        return self.composer.compose(Conversation(messages, **options), HERMES)

    def answer(self, prompt: Prompt, raw: str, content: str, thought: str = "", calls: Sequence[Any] = ()) -> None:
        thread = key_with_answer(prompt.thread, prompt.continued_text + content, calls, ids=prompt.call_ids)
        self.answers.keep(thread, prompt.opening, list(raw.encode()), thought)


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def test_an_answer_stands_in_the_next_prompt_as_it_was_generated() -> None:
    world = World()
    world.answer(world.prompt(USER), "hm... Yes", "Yes", "hm...")
    prompt = world.prompt(USER, assistant("Yes"), USER)
    assert prompt.text == "<user>Hi</><assistant>hm... Yes</><user>Hi</><assistant>"
    assert prompt.recalled == 1 and prompt.history == "stable"
    assert bytes(prompt.tokens).decode() == prompt.text


@pytest.mark.parametrize(
    "changed",
    [
        {"salt": "yours"},
        {"history": "official"},
        {"remembers": False},
    ],
)
def test_an_answer_is_not_recalled_where_it_must_not_be(changed: dict[str, Any]) -> None:
    world = World()
    world.answer(world.prompt(USER), "hm... Yes", "Yes", "hm...")
    assert world.prompt(USER, assistant("Yes"), USER, **changed).recalled == 0


@pytest.mark.parametrize(
    "messages",
    [
        [USER, assistant("No"), USER],
        [USER, assistant("Yes", reasoning_content="Something else"), USER],
        [USER, assistant("Yes", reasoning_content=""), USER],
        [{"role": "user", "content": "Ho"}, assistant("Yes"), USER],
        [{"role": "system", "content": "Be."}, USER, assistant("Yes"), USER],
        [USER, assistant("Yes", tool_calls=[{"id": "1", "function": {"name": "f", "arguments": "{}"}}]), USER],
    ],
)
def test_an_answer_that_the_client_changed_or_moved_is_the_client_s_own(messages: list[Any]) -> None:
    world = World()
    world.answer(world.prompt(USER), "hm... Yes", "Yes", "hm...")
    assert world.prompt(*messages).recalled == 0


def test_the_opening_that_an_answer_was_given_stays_with_it() -> None:
    world = World()
    first = world.prompt(USER, variables={"quiet": True})
    assert first.opening == "<assistant>()"
    world.answer(first, "Yes", "Yes")
    second = world.prompt(USER, assistant("Yes"), USER)
    assert second.text == "<user>Hi</><assistant>()Yes</><user>Hi</><assistant>"


def test_what_is_appended_is_part_of_the_opening() -> None:
    world = World()
    first = world.prompt(USER, appended=lambda text: "{" if text.endswith("<assistant>") else "")
    assert first.opening == "<assistant>{" and first.text.endswith("<assistant>{")
    world.answer(first, "}", "{}")
    assert world.prompt(USER, assistant("{}"), USER).text.startswith("<user>Hi</><assistant>{}</>")


def test_an_answer_that_lacks_its_end_is_given_it() -> None:
    world = World()
    prompt = world.prompt(USER)
    thread = key_with_answer(prompt.thread, "Yes", [], ids=False)
    world.answers.keep(thread, prompt.opening, list(b"Yes"), missing="!")
    assert world.prompt(USER, assistant("Yes"), USER).text.startswith("<user>Hi</><assistant>Yes!</><user>")


def test_an_answer_goes_on_where_the_client_began_it() -> None:
    world = World()
    first = world.prompt(USER, assistant("Once "), continued=True)
    assert first.text == "<user>Hi</><assistant>Once "
    assert (first.continued_text, first.opening) == ("Once ", "<assistant>Once ")
    world.answer(first, "upon a time", "upon a time")
    second = world.prompt(USER, assistant("Once upon a time"), USER)
    assert second.recalled == 1
    assert second.text == "<user>Hi</><assistant>Once upon a time</><user>Hi</><assistant>"
    parts = [{"type": "text", "text": "Once "}]
    assert world.prompt(USER, assistant(parts), continued=True).text == first.text  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [USER, assistant(None), assistant("x", tool_calls=[{"function": {"name": "f"}}])])
def test_only_an_assistant_s_text_can_be_continued(last: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match="continue_final_message"):
        World().prompt(USER, last, continued=True)


def test_a_template_that_hides_the_last_message_cannot_continue_it() -> None:
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(Unsupported):
        World(source).prompt(USER, assistant("Once "), continued=True)


def test_the_prompt_may_end_after_the_last_message() -> None:
    prompt = World().prompt(USER, opened=False)
    assert prompt.text == "<user>Hi</>" and prompt.opening == ""


def test_what_follows_an_answer_is_found_without_a_token_that_ends_it() -> None:
    lines = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n---\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    world = World(lines, end="<never>")
    world.answer(world.prompt(USER), "hm.. Yes", "Yes", "hm..")
    assert (
        world.prompt(USER, assistant("Yes"), USER).text
        == "user: Hi\n---\nassistant: hm.. Yes\n---\nuser: Hi\n---\nassistant: "
    )


def test_calls_written_anew_by_the_client_are_those_that_were_generated() -> None:
    world = World()
    first = world.prompt(USER, tools=[{"type": "function", "function": {"name": "look"}}])
    world.answer(first, "<<look!>>", "", calls=[("a", "look", '{"b": 1.0, "a": [2]}')])
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{\n"a": [ 2 ],\n"b": 1}'}}
    second = world.prompt(
        USER, assistant(None, tool_calls=[call]), {"role": "tool", "tool_call_id": "a", "content": "x"}
    )
    assert "<assistant><<look!>></>" in second.text


def test_calls_that_a_template_leaves_out_are_refused() -> None:
    source = CHATML.replace("m.tool_calls or [] %}", "m.tool_calls or [] if c.function.name != 'two' %}")
    calls = [{"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in ("one", "two")]
    with pytest.raises(Unsupported, match=r"messages\.1\.tool_calls"):
        World(source).prompt(USER, assistant(None, tool_calls=calls), USER)


def test_calls_of_which_a_template_shows_the_first_come_one_by_one_with_their_results() -> None:
    world = World(RESULTS.replace("m.tool_calls or [] %}", "(m.tool_calls or [])[:1] %}"))
    called, one, two = calling(FIRST, SECOND, reasoning_content=None)
    prompt = world.prompt(USER, called, two, one)
    assert prompt.adapted == ("calls-separated",)
    assert prompt.text == (
        '<user>Hi</><assistant>Text-Words[look {"at": "First-Words"}]</><tool>Result-0</>'
        '<assistant>[look {"at": "Second-Words"}]</><tool>Result-1</><assistant>'
    )


def test_text_and_calls_come_apart_where_a_template_leaves_out_calls_beside_text() -> None:
    world = World(RESULTS.replace("m.tool_calls or [] %}", "m.tool_calls or [] if not m.content %}"))
    called, result = calling(FIRST, reasoning_content=None)
    prompt = world.prompt(USER, called, result)
    assert prompt.adapted == ("text-separated-from-calls",)
    shown = '<user>Hi</><assistant>Text-Words</><assistant>[look {"at": "First-Words"}]</><tool>Result-0</><assistant>'
    assert prompt.text == shown
    # An answer that is remembered needs no template to be shown.
    calls = [(call["id"], call["function"]["name"], call["function"]["arguments"]) for call in called["tool_calls"]]
    world.answer(world.prompt(USER), "Text-Words<<look>>", TEXT, calls=calls)
    again = world.prompt(USER, called, result)
    assert again.recalled == 1 and not again.adapted and "Text-Words<<look>>" in again.text


def test_text_beside_thinking_and_calls_joins_the_thinking_where_a_template_takes_either() -> None:
    both = "{% if m.content and m.thinking and m.tool_calls %}{{ raise_exception('Either!') }}{% endif %}"
    source = RESULTS.replace("<{{ m.role }}>", both + "<{{ m.role }}>({{ m.thinking if m.tool_calls }})")
    called, result = calling(FIRST)
    prompt = World(source).prompt(USER, called, result)
    assert prompt.adapted == ("text-joined-to-thinking",)
    assert "<assistant>(Thought-Words\n\nText-Words)[look" in prompt.text


def test_what_a_template_leaves_out_of_an_answer_is_named() -> None:
    thoughtless = World(RESULTS).prompt(USER, *calling(FIRST))
    assert thoughtless.adapted == ("thinking-left-out",) and TEXT in thoughtless.text
    source = RESULTS.replace("{{ m.content }}", "{{ m.content if not m.tool_calls }}")
    assert World(source).prompt(USER, *calling(FIRST)).adapted == ("text-left-out", "thinking-left-out")


@pytest.mark.parametrize(
    ("content", "before", "character"),
    [
        ("Hello you", "<system>Be kind.</><user>Hello ", 6),
        ("  Hello you ", "<system>Be kind.</><user>Hello ", 8),
        (
            [{"type": "text", "text": "One "}, {"type": "text", "text": "two three"}],
            "<system>Be kind.</><user>One\ntwo ",
            8,
        ),
        ("Hello", "<system>Be ki", 0),
        ("Hello", "<system>Be kind.</><user>Hello<", 5),
    ],
)
def test_a_place_in_a_message_counts_its_own_text_alone(content: Any, before: str, character: int) -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}<system>Be kind.</>{% endif %}<{{ m.role }}>"
        "{{ m.content.split('\\n')|map('trim')|join('\\n') }}</>{% endfor %}"
    )
    prompt = World(source).prompt({"role": "user", "content": content})
    assert prompt.text.startswith(before)
    place = prompt.place(len(before), lambda tokens: bytes(tokens).decode())
    assert place.character == character


def test_what_follows_a_message_decides_nothing_about_it_in_a_stable_history() -> None:
    source = (
        "{% for m in messages %}{% set ns = namespace(done=false) %}{% for later in messages[loop.index:] %}"
        "{% if later.role == 'assistant' %}{% set ns.done = true %}{% endif %}{% endfor %}"
        "<{{ m.role }}>{% if not ns.done %}({{ m.thinking }}){% endif %}{{ m.content }}</>{% endfor %}"
    )
    thought = assistant("Yes", thinking="hm")
    assert "(hm)Yes" in World(source).prompt(USER, thought, USER, assistant("No"), USER).text
    assert "(hm)Yes" not in World(source).prompt(USER, thought, USER, assistant("No"), USER, history="official").text


def test_a_volatile_block_is_no_part_of_prompt_or_name() -> None:
    def prompt(suffix: str) -> Prompt:
        header = f"x-anthropic-billing-header: cc_version=2.1.{suffix}; cc_entrypoint=cli;"
        return World().prompt({"role": "system", "content": header}, USER)

    assert prompt("1.abc") == prompt("1.xyz")
    assert prompt("1.abc").text == "<user>Hi</><assistant>"
    assert prompt("1.abc").adapted == ("claude-code-billing-header",)
    assert prompt("1.abc").spans[0].message == 1


def test_a_place_is_told_by_message_and_character() -> None:
    world = World()
    prompt = world.prompt({"role": "system", "content": "Be brief."}, USER)

    def decode(tokens: Sequence[int]) -> str:
        return world.tokenizer.decode(tokens, skip_special=False)

    at = prompt.text.index("brief")
    place = prompt.place(at, decode)
    assert (place.message, place.role, place.character) == (0, "system", len("Be "))
    end = prompt.place(len(prompt.tokens), decode)
    assert (end.message, end.role) == (None, "")
    first = prompt.place(len("<system>Be brief.</>"), decode)
    assert (first.message, first.character) == (1, 0)
    assert prompt.marks == (len("<system>Be brief.</>"), len("<system>Be brief.</><user>Hi</>"))


def test_a_first_turn_that_a_template_takes_outside_its_loop_is_remembered_all_the_same() -> None:
    source = (
        "<user>{{ messages[0].content }}</>{% for m in messages[1:] %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    world = World(source)
    first = world.prompt(USER)
    assert first.opening == "<assistant>"
    world.answer(first, "hm. Yes", "Yes", "hm.")
    assert world.prompt(USER, assistant("Yes"), USER).text == "<user>Hi</><assistant>hm. Yes</><user>Hi</><assistant>"


def test_a_template_whose_messages_cannot_be_told_apart_is_rendered_without_memory() -> None:
    source = "{{ messages | map(attribute='content') | join(' ') }}{% if add_generation_prompt %} ...{% endif %}"
    world = World(source)
    prompt = world.prompt(USER)
    assert prompt.text == "Hi ..." and prompt.opening == " ..."
    assert World("{{ add_generation_prompt }}{{ messages[0].content }}").prompt(USER).thread == b""


def test_nothing_is_no_prompt() -> None:
    with pytest.raises(BadRequest, match="empty"):
        World("{% for m in messages %}{% endfor %}").prompt(USER)


class _Framed(Bytes):
    controls = ControlTokens(frozenset({"<|end|>"}))

    def least_tokens(self, text: str) -> int:
        return len(text)


@pytest.fixture
def framed(monkeypatch: pytest.MonkeyPatch) -> tuple[World, list[str]]:
    """A conversation's world, and the characters that were quoted in it."""
    world, quoted = World(), []
    world.tokenizer = _Framed(CHATML)
    world.composer = PromptBuilder(world.tokenizer, world.tokenizer.template, world.answers)
    stand_in = ControlTokenQuoting._stand_in

    def counted(self: ControlTokenQuoting, char: str) -> str:
        quoted.append(char)
        return stand_in(self, char)

    monkeypatch.setattr(ControlTokenQuoting, "_stand_in", counted)
    return world, quoted


@pytest.mark.parametrize("where", ["content", "tools"])
def test_what_is_too_long_for_certain_is_refused_before_its_control_tokens_are_quoted(
    framed: tuple[World, list[str]], where: str
) -> None:
    world, quoted = framed
    source = CHATML.replace("{% if tools %}", "{% if tools %}{{ tools | tojson }}")
    world.composer = PromptBuilder(world.tokenizer, ChatTemplate(source), world.answers)
    text = "<|end|>" * 1000
    tools = [{"type": "function", "function": {"name": "f", "description": text}}] if where == "tools" else []
    with pytest.raises(ContextOverflow, match="at least 7"):
        world.prompt({"role": "user", "content": text if where == "content" else "Hi"}, tools=tools, most=6999)
    assert quoted == []


def test_what_the_template_does_not_show_makes_no_prompt_too_long(framed: tuple[World, list[str]]) -> None:
    world, quoted = framed
    thought = assistant("Yes", reasoning_content="<|end|>" * 1000)
    prompt = world.prompt(USER, thought, {"role": "user", "content": "<|end|>"}, most=500, history="official")
    assert prompt.text == "<user>Hi</><assistant>Yes</><user><|end|></><assistant>" and quoted


TEXT, THOUGHT, FIRST, SECOND = "Text-Words", "Thought-Words", "First-Words", "Second-Words"
TOOL = {"type": "function", "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}}}
SHOWS_ALL = ("openai-gpt-oss-120b", "google-gemma-4-31B-it", "google-gemma-4-31B-it-interleaved", "tencent-Hy3")


def calling(*words: str, **more: Any) -> list[dict[str, Any]]:
    """A message that calls, once for each of the words, and what came of it."""
    functions = [{"name": "look", "arguments": json.dumps({"at": each})} for each in words]
    calls = [{"id": f"call0000{at}", "type": "function", "function": each} for at, each in enumerate(functions)]
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": f"Result-{at}"}
        for at, call in enumerate(calls)
    ]
    return [{"role": "assistant", "content": TEXT, "reasoning_content": THOUGHT, "tool_calls": calls, **more}, *results]


def composed(template: ChatTemplate, messages: Sequence[Any], **options: Any) -> Prompt:
    tokenizer: Any = Bytes("")
    composer = PromptBuilder(tokenizer, template, AnswerCache())
    wanted = Conversation(messages, tools=[TOOL], remembers=False, **options)
    return composer.compose(wanted, find_format(template.source, "").format)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", real_templates())
def test_nothing_that_is_sent_with_calls_is_dropped_without_a_word(name: str) -> None:
    """It is in the prompt, or the receipt names it, or the request is refused in words."""
    source, tokens = real_templates()[name]
    template = ChatTemplate(source, tokens=tokens)
    for history in ("stable", "official"):
        for words in ((FIRST,), (FIRST, SECOND)):
            called = calling(*words)
            for messages in ([USER, *called], [USER, *called, assistant("Done."), USER]):
                try:
                    prompt = composed(template, messages, history=history)
                except IngotError:
                    assert name in ONLY_WITH_TOOLS
                    continue
                joined = {"text-joined-to-thinking", "thinking-left-out"} <= {*prompt.adapted}
                assert TEXT in prompt.text or joined or "text-left-out" in prompt.adapted
                assert THOUGHT in prompt.text or "thinking-left-out" in prompt.adapted
                assert all(word in prompt.text for word in (*words, "Result-0"))
                assert len(words) == 1 or "Result-1" in prompt.text


@pytest.mark.parametrize("name", SHOWS_ALL)
def test_thinking_beside_calls_stays_between_calls_and_afterwards(name: str) -> None:
    if name not in llama_cpp_templates():
        pytest.skip("the template is not here; tools/fetch-templates fetches it")
    template = ChatTemplate(llama_cpp_templates()[name])
    first = composed(template, [USER, *calling(FIRST)])
    assert (
        TEXT in first.text and THOUGHT in first.text and not {"text-left-out", "thinking-left-out"} & {*first.adapted}
    )
    later = composed(template, [USER, *calling(FIRST), *calling(SECOND, reasoning_content="Other-Thought")])
    assert THOUGHT in later.text and "Other-Thought" in later.text
    assert THOUGHT in composed(template, [USER, *calling(FIRST), assistant("Done."), USER]).text
