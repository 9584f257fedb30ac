"""Calls as JSON between markers of a family's own: one object, an array of them, or a name and its arguments."""

from __future__ import annotations

from ingot.text.formats.hermes import TAGGED, TAGGED_ARRAY
from ingot.text.formats.notation import JSON
from ingot.text.formats.thinking import APERTUS_THINK, APRIEL_THINK, PLAMO_THINK, SOLAR_THINK, THINK
from ingot.text.tool_formats.format import Arguments, CallForm, CallId, Format, Gap, JsonCall, Maybe, Name
from ingot.text.tool_formats.shapes import array, element

# Granite 3: a marker and an array. Granite 20B for function calling: a tag and one call.

GRANITE = Format(
    name="granite",
    forms=(array("<|tool_call|>", Gap()), TAGGED_ARRAY, TAGGED),
    thinking=THINK,
    signs=(("<|tool_call|>",),),
    model_types=("granite", "granitemoe", "granitemoeshared"),
)
GRANITE_20B = Format(
    name="granite-20b",
    forms=(CallForm(opening=("<function_call>", Gap(" ")), call=(JsonCall(),), repeats=True),),
    signs=(("<function_call>",),),
)

# FireFunction 2: a word and an array. Phi-4-mini: the same, or markers around it.

_FUNCTOOLS = array("functools", bare=True)

FIREFUNCTION = Format(
    name="firefunction",
    forms=(_FUNCTOOLS,),
    signs=(("functools[",),),
)
PHI4_MINI = Format(
    name="phi4-mini",
    forms=(
        array("<|tool_call|>", Gap(), after=(Gap(), "<|/tool_call|>")),
        CallForm(opening=("<|tool_call|>", Gap()), call=(JsonCall(),), closing=(Gap(), "<|/tool_call|>")),
        _FUNCTOOLS,
    ),
    thinking=THINK,
    signs=(("<|tool|>", "<|/tool|>"),),
)

# xLAM: an array, bare or fenced.

XLAM = Format(
    name="xlam",
    forms=(
        array(bare=True),
        array("```", Maybe("json"), Gap("\n"), after=(Gap("\n"), "```"), bare=True),
    ),
    thinking=THINK,
    signs=(("single JSON array", "tool_call_name"),),
)

# Nemotron Nano 2: an array between tags in capitals.

NEMOTRON_NANO = Format(
    name="nemotron-nano-v2",
    forms=(array("<TOOLCALL>", Gap(), after=(Gap(), "</TOOLCALL>")),),
    thinking=THINK,
    signs=(("<TOOLCALL>",),),
)

# `tool_calls` tags: around an array in Hunyuan A13B, Jamba and Apriel, around lines in MiniMax M1.

_ARRAY = array("<tool_calls>", Gap(), after=(Gap(), "</tool_calls>"))
_LINES = element("tool_calls", JsonCall(), joint="\n")

HUNYUAN_A13B = Format(
    name="hunyuan-a13b",
    forms=(_ARRAY, _LINES),
    thinking=THINK,
    strips=("<answer>", "</answer>"),
    signs=(("<tool_calls>", "<answer>"),),
    model_types=("hunyuan_v1_moe", "hunyuan_v1_dense", "hunyuan"),
)
APRIEL = Format(
    name="apriel",
    forms=(_ARRAY, _LINES),
    thinking=APRIEL_THINK,
    strips=("[END FINAL RESPONSE]",),
    signs=(("<tool_calls>", "[BEGIN FINAL RESPONSE]"),),
    model_types=("apriel",),
)
MINIMAX_M1 = Format(
    name="minimax-m1",
    forms=(_LINES, _ARRAY),
    thinking=THINK,
    signs=(("<tool_calls>", "<beginning_of_sentence>"),),
    model_types=("minimax_m1", "minimax_text_01"),
)
JAMBA = Format(
    name="jamba",
    forms=(_ARRAY, _LINES),
    thinking=THINK,
    signs=(("<tool_calls>",),),
    model_types=("jamba",),
)

# Apertus: an array of objects, each of which has the name of its function as its only key.

APERTUS = Format(
    name="apertus",
    forms=(
        array(
            *("<|tools_prefix|>", Gap()),
            call=('{"', Name(), '":', Gap(" "), Arguments(JSON), Gap(), "}"),
            after=(Gap(), "<|tools_suffix|>"),
        ),
    ),
    thinking=APERTUS_THINK,
    signs=(("<|tools_prefix|>",),),
    model_types=("apertus",),
)

# InternLM 2 and later: a plugin as the action.

INTERNLM2 = Format(
    name="internlm2",
    forms=(
        CallForm(
            opening=("<|action_start|>", Gap(), "<|plugin|>", Gap("\n")),
            call=(JsonCall("parameters"),),
            closing=(Gap(), "<|action_end|>"),
        ),
    ),
    thinking=THINK,
    signs=(("<|action_start|>",), ("<|plugin|>",)),
    model_types=("internlm2", "internlm3"),
)

# GigaChat 3: a message of its own, or behind a marker since 3.1.

_MESSAGE = CallForm(opening=("function call<|role_sep|>", Gap("\n")), call=(JsonCall(),))
_MARKED = CallForm(opening=("<|function_call|>", Gap()), call=(JsonCall(),))

GIGACHAT3 = Format(
    name="gigachat3",
    forms=(_MESSAGE, _MARKED),
    strips=("<|message_sep|>",),
    signs=(("function call", "<|role_sep|>"),),
)
GIGACHAT31 = Format(
    name="gigachat3.1",
    forms=(_MARKED, _MESSAGE),
    strips=("<|message_sep|>",),
    signs=(("<|function_call|>",),),
)

# Solar Open: each call under an id, its name and arguments behind markers of their own.

SOLAR_OPEN = Format(
    name="solar-open",
    forms=(
        CallForm(
            opening=("<|tool_calls|>", Gap()),
            call=(
                "<|tool_call:begin|>",
                CallId(""),
                "<|tool_call:name|>",
                Name(),
                "<|tool_call:args|>",
                Gap(),
                Arguments(JSON),
                Gap(),
                "<|tool_call:end|>",
            ),
            joint="",
            closing=(Gap(), "<|calls|>"),
            unopened="anywhere",
        ),
    ),
    thinking=SOLAR_THINK,
    strips=("<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>"),
    signs=(("<|tool_call:begin|>",),),
    model_types=("solar_open",),
)

# PLaMo 3: likewise, between markers that all end alike.

PLAMO3 = Format(
    name="plamo3",
    forms=(
        CallForm(
            opening=("<|plamo:begin_tool_requests:plamo|>", Gap()),
            call=(
                *("<|plamo:begin_tool_request:plamo|>", Gap()),
                *("<|plamo:begin_tool_name:plamo|>", Name(), "<|plamo:end_tool_name:plamo|>", Gap()),
                *("<|plamo:begin_tool_arguments:plamo|>", Maybe("<|plamo:constrain|>json<|plamo:msg|>", written=True)),
                *(Gap(), Arguments(JSON), Gap(), "<|plamo:end_tool_arguments:plamo|>"),
                *(Gap(), "<|plamo:end_tool_request:plamo|>"),
            ),
            joint="",
            closing=(Gap(), "<|plamo:end_tool_requests:plamo|>"),
            unopened="anywhere",
        ),
    ),
    thinking=PLAMO_THINK,
    signs=(("<|plamo:begin_",),),
    model_types=("plamo3",),
)
