"""No past call fails a request, however odd its arguments, whichever protocol tells of it and whatever the template."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.protocol.anthropic.request import read_messages
from ingot.protocol.ollama.request import read_ollama_chat
from ingot.protocol.openai.chat import read_chat
from ingot.protocol.responses.request import ResponseContext, read_response
from ingot.protocol.served import ServedModel
from ingot.text.chat_template.chat_template import ChatTemplate
from tests.http.scripted import CARD, ByteTokenizer, settings
from tests.text.chat_template.test_chat_template import real_templates
from tests.text.conftest import llama_cpp_templates

ITERATING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content or '' }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}>"
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}{% endfor %}{% endfor %}"
)
WRITING_JSON = ITERATING.replace(
    "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}", "{{ c.function.arguments | tojson }}"
)
ADDING_TEXT = WRITING_JSON.replace("c.function.arguments | tojson", "'=' + c.function.arguments")
TAKING_BOTH = WRITING_JSON.replace(
    "c.function.arguments | tojson",
    "c.function.arguments if c.function.arguments is string else c.function.arguments | tojson",
)
UNTOLD = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
OWN = {
    "iterating": ITERATING,
    "writing JSON": WRITING_JSON,
    "adding text": ADDING_TEXT,
    "taking both": TAKING_BOTH,
    "untold": UNTOLD,
}
TEMPLATES = OWN | {name: source for name, (source, _) in real_templates().items() if name not in llama_cpp_templates()}
TOKENS = {name: tokens for name, (_, tokens) in real_templates().items()}
CUT = '{"city": "Zür'
ODD: list[Any] = [
    *("", " ", "null", "[1]", "7", "true", '"text"', CUT, "{", "{}}", "no JSON", '{"a": NaN}', "[" * 3000),
    *('{"a":' * 200 + "1" + "}" * 200, '{"": ""}', '{"a": null}', '{"_unparsed": "x"}', '{"_unparsed": ""}'),
    *(None, [1], 7, True, {}, {"city": None}, {"a": {"b": [1, {}]}}),
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab{}\"'<>\n", max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab_", max_size=3), inner, max_size=2),
    max_leaves=5,
)
ARGUMENTS = st.sampled_from(ODD) | JSON | JSON.map(json.dumps) | st.text(max_size=12)


@cache
def served(name: str) -> ServedModel:
    tokenizer: Any = ByteTokenizer(None)
    tokenizer.template = ChatTemplate(TEMPLATES[name], tokens=TOKENS.get(name))
    return ServedModel.of(replace(CARD, context=1 << 16), tokenizer, settings())  # some templates say a lot


def chat(served: ServedModel, arguments: Any) -> str:
    call = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "Seen."}
    return text(read_chat({"messages": [USER, answer, result, USER]}, served, "chatcmpl-1").request)


def messages(served: ServedModel, arguments: Any) -> str:
    call = {"type": "tool_use", "id": "call00001", "name": "look", "input": arguments}
    result = {"type": "tool_result", "tool_use_id": "call00001", "content": "Seen."}
    message = [USER, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}, USER]
    return text(read_messages({"messages": message, "max_tokens": 9}, served, "msg_1").request)


def responses(served: ServedModel, arguments: Any) -> str:
    call = {"type": "function_call", "call_id": "call00001", "name": "look", "arguments": arguments}
    result = {"type": "function_call_output", "call_id": "call00001", "output": "Seen."}
    body = {"input": [USER, call, result, USER]}
    return text(read_response(body, served, "resp_" + "0" * 24, ResponseContext(None, {})).first.request)


def ollama(served: ServedModel, arguments: Any) -> str:
    call = {"id": "call00001", "function": {"name": "look", "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "call00001", "content": "Seen."}
    job: Any = read_ollama_chat({"messages": [USER, answer, result, USER]}, served, "req-1")
    return text(job.request)


USER = {"role": "user", "content": "Hi"}
PROTOCOLS: dict[str, Callable[[ServedModel, Any], str]] = {
    "chat": chat,
    "messages": messages,
    "responses": responses,
    "ollama": ollama,
}


def text(request: Any) -> str:
    return bytes(token for token in request.prompts[0] if token < 256).decode()


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_protocol_renders_odd_arguments_alike(name: str) -> None:
    for arguments in ODD:
        made = {protocol: read(served(name), arguments) for protocol, read in PROTOCOLS.items()}
        assert "look" in made["chat"]
        assert len(set(made.values())) == 1, arguments


@pytest.mark.parametrize("name", OWN)
@given(arguments=ARGUMENTS)
def test_no_arguments_fail_a_request(name: str, arguments: Any) -> None:
    assert len({read(served(name), arguments) for read in PROTOCOLS.values()}) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_text_that_is_no_object_stays_as_it_was_written_where_the_template_shows_text(protocol: str) -> None:
    read = PROTOCOLS[protocol]
    assert f"<look>={CUT}[user]" in read(served("adding text"), CUT)
    assert f"<look>{CUT}[user]" in read(served("taking both"), CUT)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_elsewhere_an_object_holds_it(protocol: str) -> None:
    read = PROTOCOLS[protocol]
    assert f"<look>_unparsed={CUT};[user]" in read(served("iterating"), CUT)
    assert f"<look>{json.dumps({'_unparsed': CUT}, ensure_ascii=False)}[user]" in read(served("writing JSON"), CUT)


@pytest.mark.parametrize("nothing", ["", " ", None, "null", "{}", {}])
def test_no_arguments_are_an_object_without_members(nothing: Any) -> None:
    assert "<look>{}[user]" in chat(served("writing JSON"), nothing)
    assert "<look>={}[user]" in chat(served("adding text"), nothing)
