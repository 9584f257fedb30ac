"""Families that write calls as JSON: one object, an array of them, or a name and its arguments, between markers.

- Hermes: an object between tags. Also what models without a tool format of their own are taught. Ernie, Kimi-VL.
- Llama 3 and 4: an object, bare or behind a marker, or a tag with JSON inside.
- Mistral: one marker before an array of calls or, since its eleventh tokenizer, before each call.
- Granite, FireFunction, Phi-4-mini, xLAM, Nemotron Nano, Hunyuan A13B, Apriel, MiniMax M1, Jamba, Apertus, InternLM,
  GigaChat, Solar Open, PLaMo: markers of their own.
- Command R7B, A and their kin: an action that is an array of calls, and a response between markers.
- Functionary: every message names its recipient, which is `all` for an answer and else a function.
"""

from __future__ import annotations

from ingot.text.tool_formats.format import JSON, Arguments, CallForm, CallId, Format, Gap, JsonCall, Maybe, Name
from ingot.text.tool_formats.shapes import (
    APERTUS_THINK,
    APRIEL_THINK,
    COHERE_THINK,
    FENCED_JSON,
    FENCED_JSON_ARRAY,
    KIMI_VL_THINK,
    MISTRAL_THINK,
    PLAMO_THINK,
    SOLAR_THINK,
    THINK,
    UNMARKED_FORMS,
    array_form,
    element_form,
)

TAGGED_JSON = element_form("tool_call", JsonCall())
# The same tags around an array, as small models like to write.
TAGGED_JSON_ARRAY = array_form("<tool_call>", Gap("\n"), after=(Gap("\n"), "</tool_call>"))

HERMES = Format("hermes", (TAGGED_JSON, TAGGED_JSON_ARRAY, *UNMARKED_FORMS), THINK, signs=(("<tool_call>",),))
ERNIE = Format(
    "ernie4.5",
    HERMES.forms,
    THINK,
    strips=("<response>", "</response>"),
    signs=(("<response>", "<tool_call>"),),
    model_types=("ernie4_5", "ernie4_5_moe", "ernie4_5_moe_vl"),
)
KIMI_VL = Format("kimi-vl", HERMES.forms, KIMI_VL_THINK, signs=((KIMI_VL_THINK.open,),), model_types=("kimi_vl",))


LLAMA_BARE = CallForm(call=(JsonCall("parameters"),), joint="; ", bare=True)
LLAMA_PYTHON_TAG = CallForm(opening=("<|python_tag|>", Gap()), call=(JsonCall("parameters"),), joint="; ")
FUNCTION_TAG = CallForm(call=("<function=", Name(), ">", Gap(), Arguments(JSON), Gap(), "</function>"), unopened="line")

LLAMA = Format(
    "llama",
    (LLAMA_BARE, LLAMA_PYTHON_TAG, FUNCTION_TAG, FENCED_JSON, FENCED_JSON_ARRAY),
    strips=("<|eom_id|>",),
    signs=(("<|python_tag|>",), ('"parameters": dictionary',)),
    model_types=("llama", "llama4", "mllama"),
)


MISTRAL_ARRAY = array_form("[TOOL_CALLS]", Gap(" "))
MISTRAL_NAMED_CALL = CallForm(
    opening=("[TOOL_CALLS]", Gap()),
    call=(Name(), CallId("[CALL_ID]"), Maybe("[ARGS]", written=True), Gap(), Arguments(JSON)),
    repeats=True,
)

MISTRAL = Format(
    "mistral",
    (MISTRAL_ARRAY, MISTRAL_NAMED_CALL),
    MISTRAL_THINK,
    ids="mistral",
    signs=(("[TOOL_CALLS]",),),
    model_types=("mistral", "mixtral", "mistral3", "pixtral"),
)
MISTRAL_NAMED = Format(
    "mistral-args",
    (MISTRAL_NAMED_CALL, MISTRAL_ARRAY),
    MISTRAL_THINK,
    ids="mistral",
    signs=(("[TOOL_CALLS]", "[ARGS]"),),
    model_types=("ministral3", "mistral4"),
)


# Granite 3: a marker and an array. Granite 20B for function calling: a tag and one call.

GRANITE = Format(
    "granite",
    (array_form("<|tool_call|>", Gap()), TAGGED_JSON_ARRAY, TAGGED_JSON),
    THINK,
    signs=(("<|tool_call|>",),),
    model_types=("granite", "granitemoe", "granitemoeshared"),
)
GRANITE_20B = Format(
    "granite-20b",
    (CallForm(opening=("<function_call>", Gap(" ")), call=(JsonCall(),), repeats=True),),
    signs=(("<function_call>",),),
)

# FireFunction 2: a word and an array. Phi-4-mini: the same, or markers around it.

_FUNCTOOLS = array_form("functools", bare=True)

FIREFUNCTION = Format("firefunction", (_FUNCTOOLS,), signs=(("functools[",),))
PHI4_MINI = Format(
    "phi4-mini",
    (
        array_form("<|tool_call|>", Gap(), after=(Gap(), "<|/tool_call|>")),
        CallForm(opening=("<|tool_call|>", Gap()), call=(JsonCall(),), closing=(Gap(), "<|/tool_call|>")),
        _FUNCTOOLS,
    ),
    THINK,
    signs=(("<|tool|>", "<|/tool|>"),),
)

# xLAM: an array, bare or fenced.

XLAM = Format(
    "xlam",
    (array_form(bare=True), array_form("```", Maybe("json"), Gap("\n"), after=(Gap("\n"), "```"), bare=True)),
    THINK,
    signs=(("single JSON array", "tool_call_name"),),
)

# Nemotron Nano 2: an array between tags in capitals.

NEMOTRON_NANO = Format(
    "nemotron-nano-v2",
    (array_form("<TOOLCALL>", Gap(), after=(Gap(), "</TOOLCALL>")),),
    THINK,
    signs=(("<TOOLCALL>",),),
)

# `tool_calls` tags: around an array in Hunyuan A13B, Jamba and Apriel, around lines in MiniMax M1.

_TOOL_CALLS_ARRAY = array_form("<tool_calls>", Gap(), after=(Gap(), "</tool_calls>"))
_TOOL_CALLS_LINES = element_form("tool_calls", JsonCall(), joint="\n")

HUNYUAN_A13B = Format(
    "hunyuan-a13b",
    (_TOOL_CALLS_ARRAY, _TOOL_CALLS_LINES),
    THINK,
    strips=("<answer>", "</answer>"),
    signs=(("<tool_calls>", "<answer>"),),
    model_types=("hunyuan_v1_moe", "hunyuan_v1_dense", "hunyuan"),
)
APRIEL = Format(
    "apriel",
    (_TOOL_CALLS_ARRAY, _TOOL_CALLS_LINES),
    APRIEL_THINK,
    strips=("[END FINAL RESPONSE]",),
    signs=(("<tool_calls>", "[BEGIN FINAL RESPONSE]"),),
    model_types=("apriel",),
)
MINIMAX_M1 = Format(
    "minimax-m1",
    (_TOOL_CALLS_LINES, _TOOL_CALLS_ARRAY),
    THINK,
    signs=(("<tool_calls>", "<beginning_of_sentence>"),),
    model_types=("minimax_m1", "minimax_text_01"),
)
JAMBA = Format(
    "jamba", (_TOOL_CALLS_ARRAY, _TOOL_CALLS_LINES), THINK, signs=(("<tool_calls>",),), model_types=("jamba",)
)

# Apertus: an array of objects, each of which has the name of its function as its only key.

APERTUS = Format(
    "apertus",
    (
        array_form(
            *("<|tools_prefix|>", Gap()),
            call=('{"', Name(), '":', Gap(" "), Arguments(JSON), Gap(), "}"),
            after=(Gap(), "<|tools_suffix|>"),
        ),
    ),
    APERTUS_THINK,
    signs=(("<|tools_prefix|>",),),
    model_types=("apertus",),
)

# InternLM 2 and later: a plugin as the action.

INTERNLM2 = Format(
    "internlm2",
    (
        CallForm(
            opening=("<|action_start|>", Gap(), "<|plugin|>", Gap("\n")),
            call=(JsonCall("parameters"),),
            closing=(Gap(), "<|action_end|>"),
        ),
    ),
    THINK,
    signs=(("<|action_start|>",), ("<|plugin|>",)),
    model_types=("internlm2", "internlm3"),
)

# GigaChat 3: a message of its own, or behind a marker since 3.1.

_GIGACHAT_MESSAGE = CallForm(opening=("function call<|role_sep|>", Gap("\n")), call=(JsonCall(),))
_GIGACHAT_MARKED = CallForm(opening=("<|function_call|>", Gap()), call=(JsonCall(),))

GIGACHAT3 = Format(
    "gigachat3",
    (_GIGACHAT_MESSAGE, _GIGACHAT_MARKED),
    strips=("<|message_sep|>",),
    signs=(("function call", "<|role_sep|>"),),
)
GIGACHAT31 = Format(
    "gigachat3.1", (_GIGACHAT_MARKED, _GIGACHAT_MESSAGE), strips=("<|message_sep|>",), signs=(("<|function_call|>",),)
)

# Solar Open: each call under an id, its name and arguments behind markers of their own.

SOLAR_OPEN = Format(
    "solar-open",
    (
        CallForm(
            opening=("<|tool_calls|>", Gap()),
            call=(
                *("<|tool_call:begin|>", CallId(""), "<|tool_call:name|>", Name(), "<|tool_call:args|>", Gap()),
                *(Arguments(JSON), Gap(), "<|tool_call:end|>"),
            ),
            joint="",
            closing=(Gap(), "<|calls|>"),
            unopened="anywhere",
        ),
    ),
    SOLAR_THINK,
    strips=("<|begin|>assistant", "<|content|>", "<|end|>", "<|flush|>"),
    signs=(("<|tool_call:begin|>",),),
    model_types=("solar_open",),
)

# PLaMo 3: likewise, between markers that all end alike.

PLAMO3 = Format(
    "plamo3",
    (
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
    PLAMO_THINK,
    signs=(("<|plamo:begin_",),),
    model_types=("plamo3",),
)


COHERE = Format(
    "cohere",
    (
        array_form(
            *("<|START_ACTION|>", Gap()), call=(JsonCall("parameters", "tool_name"),), after=(Gap(), "<|END_ACTION|>")
        ),
    ),
    COHERE_THINK,
    strips=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    signs=(("<|START_ACTION|>",),),
    model_types=("cohere2", "cohere2_moe", "cohere2_vision"),
)


FUNCTIONARY_RECIPIENT = CallForm(
    opening=("<|recipient|>", Gap()),
    call=(Name(), Gap("\n"), "<|content|>", Gap(), Arguments(JSON)),
    opening_in_prompt=True,
)

# 3.2 has one short marker, which the prompt ends with.
FUNCTIONARY_ARROWS = CallForm(
    opening=(">>>",), call=(Name(), "\n", Gap(), Arguments(JSON)), opening_in_prompt=True, bare=True
)

FUNCTIONARY32 = Format(
    "functionary-3.2",
    (FUNCTIONARY_ARROWS, FUNCTION_TAG),
    heads=(">>>all\n", "all\n"),
    signs=((">>>all",), (">>>", "recipient")),
)
FUNCTIONARY = Format(
    "functionary",
    (FUNCTIONARY_RECIPIENT, FUNCTION_TAG),
    strips=("<|recipient|>all\n<|content|>", "all\n<|content|>", "<|from|>assistant\n", "<|stop|>"),
    signs=(("<|recipient|>", "<|content|>"),),
)
