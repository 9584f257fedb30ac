from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError

from ingot.errors import BadRequest, ModelError
from ingot.text.chat_template.chat_template import ChatTemplate
from ingot.text.chat_template.messages import prepare_messages
from ingot.text.chat_template.render_limits import RenderLimits
from tests.text.conftest import collection, llama_cpp_templates
from tests.waiting import WAIT_S

HI = [{"role": "user", "content": "Hi <there> & 'you' 😀"}]
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Köln"}'}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one turn": HI,
    "a system prompt": [{"role": "system", "content": "Be brief."}, *HI],
    "two turns": [*HI, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}, *HI],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
    "a tool call": [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": "sunny"},
    ],
}


ONLY_WITH_TOOLS = {
    "CohereForAI-c4ai-command-r-plus-tool_use",
    "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use",
    "fireworks-ai-llama-3-firefunction-v2",
}
"""Templates that stand beside another one, or want what no server gives."""


@cache
def real_templates() -> dict[str, tuple[str, dict[str, str]]]:
    """Every different chat template of the collection, with its model's special tokens."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    seen = set()
    for folder in sorted(path.parent for path in collection().glob("*/tokenizer_config.json")):
        config = json.loads((folder / "tokenizer_config.json").read_text())
        file = folder / "chat_template.jinja"
        source = file.read_text() if file.exists() else config.get("chat_template")
        if source and source not in seen:
            seen.add(source)
            names = {name: config.get(name) for name in ("bos_token", "eos_token")}
            texts = {name: v["content"] if isinstance(v, dict) else v for name, v in names.items() if v}
            found[folder.name] = (source, texts)
    for name, source in llama_cpp_templates().items():
        if source not in seen:
            found[name] = (source, {"bos_token": "<s>", "eos_token": "</s>"})
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", real_templates())
def test_real_templates_render_as_transformers_renders_them(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source, tokens = real_templates()[name]
    template = ChatTemplate(source, tokens=tokens)
    compared = 0
    for messages in CONVERSATIONS.values():
        for tools in (None, TOOLS):
            try:
                [expected], _ = render_jinja_template(
                    [prepare_messages(messages, template.traits)],
                    tools=tools,
                    chat_template=source,
                    add_generation_prompt=True,
                    **tokens,
                )
            except SecurityError:  # as in two of llama.cpp's, which change lists
                with pytest.raises(ModelError):
                    template.render(messages, tools=tools)
            except Exception:  # whatever it raises, ours must refuse the messages too
                with pytest.raises(BadRequest):
                    template.render(messages, tools=tools)
            else:
                assert template.render(messages, tools=tools) == expected
                compared += 1
    assert name in ONLY_WITH_TOOLS or compared >= 4


def render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source).render(HI if messages is None else messages, **options)


def test_blocks_leave_no_blank_lines_behind() -> None:
    assert render("a\n    {% if true %}\nb\n    {% endif %}\nc") == "a\nb\nc"


def test_loops_may_break_and_continue() -> None:
    body = "{% if n == 1 %}{% continue %}{% endif %}{% if n == 4 %}{% break %}{% endif %}{{ n }}"
    source = "{% for n in range(9) %}" + body + "{% endfor %}"
    assert render(source) == "023"


def test_tojson_is_that_of_transformers_and_not_jinja_s() -> None:
    assert render("{{ messages[0].content|tojson }}") == "\"Hi <there> & 'you' 😀\""
    assert (
        render("{{ {'b': 1, 'a': [2]}|tojson(indent=2, sort_keys=true) }}") == '{\n  "a": [\n    2\n  ],\n  "b": 1\n}'
    )
    assert render("{{ ['é']|tojson(ensure_ascii=true, separators=(',', ':')) }}") == '["\\u00e9"]'


def test_the_generation_tag_only_marks() -> None:
    body = "{% generation %}{% set x = loop.index %}{{ m.role }}{{ x }}{% endgeneration %}{{ x }}"
    source = "{% for m in messages %}" + body + "{% endfor %}"
    assert render(source) == "user1"


def test_strftime_now_tells_the_time() -> None:
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_namespaces_macros_and_the_usual_filters_work() -> None:
    source = (
        "{% macro shout(text) %}{{ text|upper }}{% endmacro %}"
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content|length %}{% endfor %}"
        "{{ shout('a') }}{{ ns.n }}{{ ['x', 'y']|join('-') }}{{ ('a' ~ 1)|replace('a', 'b') }}{{ '%02d' % 7 }}"
        "{{ [3, 1, 2]|sort|list }}{{ {'k': 1}.items()|list }}{{ dict(a=1).get('a') }}{{ ' t '|trim }}"
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }}{{ [1, 2, 3][1:] }}"
        "{% set block %}{{ 1 }}{{ 2 }}{% endset %}{{ block }}{{ [1, 2]|sum }}{{ 'a b'.split()|last }}"
    )
    assert render(source) == "A20x-yb107[1, 2, 3][('k', 1)]1t1[2, 3]123b"


def test_texts_are_formatted_as_python_formats_them() -> None:
    source = (
        "{{ '{} {:>4} {:.2f} {a!r} {b[0]} {m.role}'.format('x', 7, 1.5, a='y', b=[1], m=messages[0]) }}"
        "{{ '{a:<{w}}|'.format(a='z', w=3) }}{{ '{a}'.format_map({'a': 1}) }}{{ ('<{}>'|safe).format('&') }}"
        "{{ '{{}}'.format() }}{{ 'a\tb'.expandtabs(4) }}{{ 5|filesizeformat }}{% block b %}!{% endblock %}"
    )
    assert render(source) == "x    7 1.50 'y' 1 userz  |1<&amp;>{}a   b5 Bytes!"


PLAIN = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[0].text.strip() }}", "'dict object' has no attribute 'text'"),
        ("{{ raise_exception('Only in Latin!') }}", "Only in Latin!"),
        ("{{ messages[0].content.encode() }}", "it calls 'encode'"),
        ("{{ messages[0].content|length }}", "does not show a plain question"),
        ("{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}", "does not show"),
    ],
)
def test_a_template_that_cannot_render_a_plain_question_says_so_when_checked(source: str, reason: str) -> None:
    with pytest.raises(ModelError) as caught:
        ChatTemplate(source).check()
    assert reason in caught.value.message
    assert "plain question" in caught.value.message and "--chat-template" in caught.value.message


def test_a_template_that_renders_a_plain_question_passes_its_check() -> None:
    ChatTemplate(PLAIN).check()
    ChatTemplate("{% for m in messages %}{{ m.content[0].text }}{% endfor %}").check()


def test_a_template_sees_nothing_it_was_not_given() -> None:
    template = ChatTemplate("{{ tools is none }}{{ add_generation_prompt }}{{ documents is defined }}{{ pad_token }}")
    assert template.render(HI, tools=[], add_generation_prompt=False) == "TrueFalseFalse"


def test_extra_variables_reach_the_template_and_are_known_by_name() -> None:
    template = ChatTemplate("{{ raise_exception('x') if enable_thinking else messages|length }}")
    assert template.variables == {"enable_thinking", "messages"}
    assert template.render(HI, extra={"enable_thinking": False}) == "1"


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "bos_token"])
def test_extra_variables_cannot_replace_the_template_s_own(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        ChatTemplate("", tokens={"bos_token": "<s>"}).render(HI, extra={name: "x"})


def test_a_template_s_refusal_is_told_in_its_own_words() -> None:
    with pytest.raises(BadRequest) as caught:
        render("{{ raise_exception('Roles must alternate!') }}")
    assert caught.value.message == "Roles must alternate!"
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ messages[5].content.strip() }}", "no element 5|undefined"),
        ("{{ missing.thing }}", "'missing' is undefined"),
        ("{{ 'a' + 1 }}", "concatenate"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ {}() }}", "not callable"),
        ("{{ range(10 ** 6) }}", "[Rr]ange"),
        ("{{ missing|tojson }}", "JSON serializable"),
        ("{{ messages|map('upper') }}", "generator"),
    ],
)
def test_messages_that_a_template_cannot_render_are_a_clear_bad_request(source: str, reason: str) -> None:
    with pytest.raises(BadRequest, match=reason) as caught:
        render(source)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% if %}", "line 1"),
        ("{{ 'x'|urlize }}", "urlize"),
        ("{% include 'other' %}", "include"),
        ("{% autoescape true %}{% endautoescape %}", "autoescape"),
        ("x" * 200_000, "longer than"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nests too deeply"),
    ],
    ids=["syntax", "filter", "include", "autoescape", "length", "depth"],
)
def test_a_template_that_cannot_be_honoured_is_refused_when_loading(source: str, reason: str) -> None:
    with pytest.raises(ModelError, match=reason):
        ChatTemplate(source)


def test_the_messages_given_stay_as_they_were() -> None:
    messages = [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": None}]
    before = json.dumps(messages)
    render("{{ messages[0].role }}", messages)
    assert json.dumps(messages) == before


def test_renderings_in_many_threads_keep_their_own_accounts() -> None:
    source = "{% for n in range(messages[0].content|int) %}{{ n % 10 }}{% endfor %}"
    template = ChatTemplate(source, limits=RenderLimits(steps=3000))
    barrier = threading.Barrier(4)

    def one(count: int) -> str:
        barrier.wait(WAIT_S)
        return template.render([{"role": "user", "content": str(count)}])

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(one, [100, 200, 300, 400]))
    assert [len(text) for text in texts] == [100, 200, 300, 400]


def test_a_rendering_may_be_as_large_as_a_request() -> None:
    big = [{"role": "user", "content": "word " * 3_000_000}]
    source = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content.strip() + '<|im_end|>' }}{% endfor %}"
    )
    assert len(render(source, big)) > 14_999_000


def test_a_model_s_folder_is_no_part_of_an_error(tmp_path: Path) -> None:
    with pytest.raises(BadRequest) as caught:
        render("{{ missing.x }}")
    assert "/" not in caught.value.message
