from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingot.errors import BadRequest, Unsupported
from ingot.text.chat_template.chat_template import ChatTemplate
from ingot.text.chat_template.messages import TemplateMessage, content_as_text, order_messages
from ingot.text.chat_template.messages import prepare_messages as prepare
from ingot.text.chat_template.traits import TemplateTraits
from tests.text.chat_template.test_chat_template import real_templates

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
STRINGS_ONLY = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}"
EACH_PART = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }},{% endif %}{% endfor %}"
PARTS_ONLY = "{% for m in messages %}" + EACH_PART + "{% endfor %}"
ONE_OR_OTHER = "{% if m.content is string %}{{ m.content }},{% else %}" + EACH_PART + "{% endif %}"
EITHER = "{% for m in messages %}" + ONE_OR_OTHER + "{% endfor %}"


def content(source: str, given: Any) -> Any:
    [message] = prepare([{"role": "user", "content": given}], ChatTemplate(source).traits)
    return message["content"]


def test_parts_are_joined_for_a_template_that_reads_strings() -> None:
    assert content(STRINGS_ONLY, PARTS) == "one\ntwo"


def test_parts_stay_parts_for_a_template_that_reads_either() -> None:
    assert content(EITHER, PARTS) == PARTS
    assert content(EITHER, "one") == "one"


def test_strings_become_parts_for_a_template_that_reads_nothing_else() -> None:
    assert content(PARTS_ONLY, "one") == [{"type": "text", "text": "one"}]
    assert ChatTemplate(PARTS_ONLY).render([{"role": "user", "content": "one"}]) == "one,"


def test_each_role_is_tried_by_itself() -> None:
    system_apart = "{% if m.role == 'system' %}{{ m.content }}{% else %}" + ONE_OR_OTHER + "{% endif %}"
    source = "{% for m in messages %}" + system_apart + "{% endfor %}"
    traits = ChatTemplate(source).traits
    assert (traits.content["system"], traits.content["user"]) == ("text", "either")


def test_parts_that_are_no_text_are_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="image_url"):
        content(STRINGS_ONLY, [{"type": "image_url", "image_url": {"url": "x"}}])


@pytest.mark.parametrize("given", [7, [7], [{"type": "text"}], [{"text": "x"}]])
def test_content_of_no_known_shape_is_a_bad_request(given: Any) -> None:
    with pytest.raises(BadRequest):
        content(STRINGS_ONLY, given)


def test_a_message_without_a_role_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="role"):
        ChatTemplate(STRINGS_ONLY).render([{"content": "x"}])


def test_the_developer_is_the_system_to_a_template_that_does_not_know_better() -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    assert ChatTemplate(STRINGS_ONLY).render(messages) == "[system: Be brief.]"
    knowing = "{% for m in messages %}{% if m.role == 'developer' %}dev{% endif %}{{ m.content }}{% endfor %}"
    assert ChatTemplate(knowing).render(messages) == "devBe brief."


def test_no_content_is_empty_and_never_the_word_none() -> None:
    template = ChatTemplate(STRINGS_ONLY)
    assert template.render([{"role": "assistant", "content": None}]) == "[assistant: ]"
    assert template.render([{"role": "assistant"}]) == "[assistant: ]"


def test_keys_without_a_value_are_not_there() -> None:
    source = "{% for m in messages %}{{ 'tool_calls' in m }}{{ 'name' in m }}{{ m.content }}{% endfor %}"
    message = {"role": "assistant", "content": "", "tool_calls": [], "name": None}
    assert ChatTemplate(source).render([message]) == "FalseFalse"


CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"city": "Köln"}'}}],
}


def calls(body: str, empty: str = "true") -> str:
    return (
        "{% for m in messages %}{% if m.tool_calls and (" + empty + ") %}{% for c in m.tool_calls %}"
        "{% set a = c.function.arguments %}" + body + "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )


def test_arguments_are_objects_for_a_template_that_writes_the_json_itself() -> None:
    assert ChatTemplate(calls("{{ a|tojson }}")).render([CALLING]) == '{"city": "Köln"}'


def test_arguments_are_json_text_for_a_template_that_adds_them_to_its_own() -> None:
    assert ChatTemplate(calls("{{ '>' + a }}")).render([CALLING]) == '>{"city": "Köln"}'
    as_object = json.loads(json.dumps(CALLING))
    as_object["tool_calls"][0]["function"]["arguments"] = {"city": "Köln"}
    assert ChatTemplate(calls("{{ '>' + a }}")).render([as_object]) == '>{"city": "Köln"}'


def test_arguments_that_are_no_json_stay_as_the_model_wrote_them_where_text_is_shown() -> None:
    broken = json.loads(json.dumps(CALLING))
    broken["tool_calls"][0]["function"]["arguments"] = '{"city": '
    assert ChatTemplate(calls("{{ '>' + a }}")).render([broken]) == '>{"city": '
    assert ChatTemplate(calls("{{ a if a is string else a|tojson }}")).render([broken]) == '{"city": '
    assert ChatTemplate(calls("{{ a|tojson }}")).render([broken]) == json.dumps({"_unparsed": '{"city": '})


INSISTING = "{% if c.id|length != 9 %}{{ raise_exception('nine!') }}{% endif %}{{ c.id }}{{ a|tojson }}"


def test_ids_of_other_servers_are_made_to_fit_a_template_that_insists_on_nine_letters() -> None:
    template = ChatTemplate(calls(INSISTING) + "{% for m in messages %}{{ m.tool_call_id or '' }}{% endfor %}")
    foreign = json.loads(json.dumps(CALLING))
    foreign["tool_calls"][0]["id"] = "toolu_01AbC"
    result = {"role": "tool", "tool_call_id": "toolu_01AbC", "content": ""}
    shown = template.render([foreign, result])
    id = shown[:9]
    assert id.isalnum() and shown == f'{id}{{"city": "Köln"}}{id}'
    assert template.render([CALLING]).startswith("call00001")
    assert ChatTemplate(calls("{{ c.id }}{{ a|tojson }}")).render([foreign]).startswith("toolu_01AbC")


def test_calls_are_shown_by_a_template_that_looks_for_them_only_where_content_is_null() -> None:
    template = ChatTemplate(calls("{{ a|tojson }}", empty="m.content is none"))
    assert template.traits.no_content == "null"
    assert template.render([CALLING]) == '{"city": "Köln"}'


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", real_templates())
def test_preparing_messages_twice_changes_nothing(name: str) -> None:
    source, tokens = real_templates()[name]
    template = ChatTemplate(source, tokens=tokens)
    messages = [{"role": "developer", "content": PARTS}, {"role": "user", "content": "x"}, CALLING]
    once = prepare(messages, template.traits)
    assert prepare(once, template.traits) == once


def test_what_is_known_of_real_templates_is_found_out() -> None:
    names = ("qwen-3", "qwen-3.5", "minimax-text-01", "minimax-m3", "deepseek-v3")
    found = {name: ChatTemplate(real_templates()[name][0]).traits for name in names}
    assert found["qwen-3"].content["user"] == "text"
    assert found["qwen-3.5"].content["user"] == "either"
    assert found["minimax-text-01"].content["user"] == "parts"
    assert found["minimax-m3"].developer and not found["qwen-3.5"].developer
    assert found["qwen-3.5"].object_arguments and not found["deepseek-v3"].object_arguments
    assert found["deepseek-v3"].no_content == "null"


LENIENT = TemplateTraits()
STRICT = TemplateTraits(late_system="lost", repeats=frozenset())
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool", "d": "developer"}


def lines(roles: str) -> list[TemplateMessage]:
    """`su`: the system speaks, then the user; everyone says their letter and its number."""
    return [TemplateMessage({"role": ROLES[role], "content": f"{role}{at}"}, (at,)) for at, role in enumerate(roles)]


def placed(roles: str, traits: TemplateTraits, history: Any = "stable") -> list[tuple[str, str]]:
    done, _ = order_messages(lines(roles), traits, history)
    return [(line.role, line.message["content"]) for line in done]


def test_what_a_template_can_render_is_left_alone() -> None:
    given = lines("ssuuaatsusa")
    assert order_messages(given, LENIENT, "stable") == (given, ())


def test_the_developer_is_the_system() -> None:
    assert placed("du", LENIENT) == [("system", "d0"), ("user", "u1")]
    assert placed("du", replace(LENIENT, developer=True)) == [("developer", "d0"), ("user", "u1")]


def test_speakers_who_may_not_speak_twice_are_merged() -> None:
    assert placed("ssuuaa", STRICT) == [("system", "s0\n\ns1"), ("user", "u2\n\nu3"), ("assistant", "a4\n\na5")]
    assert order_messages(lines("uu"), STRICT, "stable")[1] == ("user-merged",)
    assert placed("att", STRICT)[1:] == [("tool", "t1"), ("tool", "t2")]


def test_a_late_system_message_is_folded_into_the_users_turn() -> None:
    folded = "<system>\ns{}\n</system>"
    assert placed("uas", STRICT)[2] == ("user", folded.format(2))
    assert placed("uasu", STRICT)[2] == ("user", folded.format(2) + "\n\nu3")
    assert placed("us", STRICT) == [("user", "u0\n\n" + folded.format(1))]
    assert placed("uats", STRICT)[2:] == [("tool", "t2"), ("user", folded.format(3))]
    assert order_messages(lines("uas"), STRICT, "stable")[1] == ("system-folded",)


def test_results_are_answered_by_nothing_where_a_template_wants_an_answer_before_the_user_speaks() -> None:
    wanting = replace(STRICT, user_after_results=False)
    assert placed("uatu", wanting)[2:] == [("tool", "t2"), ("assistant", ""), ("user", "u3")]
    assert placed("uatsu", wanting)[3:] == [("assistant", ""), ("user", "<system>\ns3\n</system>\n\nu4")]
    assert placed("uatau", wanting)[3] == ("assistant", "a3")
    assert order_messages(lines("uatu"), wanting, "stable")[1] == ("empty-answer-inserted",)


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
    [merged], _ = order_messages([first, second, third], STRICT, "stable")
    assert merged.message["tool_calls"] == [1, 2]
    assert merged.message["reasoning_content"] == "a\n\nb"
    assert "".join(part["text"] for part in merged.message["content"]) == "x\n\ny"
    assert merged.sources == (0, 1, 2)


@pytest.mark.parametrize("traits", [STRICT, replace(STRICT, system=False)])
@given(roles=st.text("suat", min_size=1, max_size=12), more=st.text("suat", max_size=6))
def test_every_word_is_kept_in_order_and_what_follows_changes_nothing_before(
    traits: TemplateTraits, roles: str, more: str
) -> None:
    whole, _ = order_messages(lines(roles + "a" + more), traits, "stable")
    words = [f"{role}{at}" for at, role in enumerate(roles + "a" + more)]
    text = "\n".join(content_as_text(line.message["content"]) for line in whole)
    assert [word for word in text.replace("<system>", "").replace("</system>", "").split() if word] == words
    assert [source for line in whole for source in line.sources] == list(range(len(words)))
    short, _ = order_messages(lines(roles), traits, "stable")
    settled = short[:-1] if short[-1].role == "assistant" else short
    assert whole[: len(settled)] == settled
