"""What the tables of several families share: shapes of calls, thinking tags, and calls without markers.

Models that were shown tools more than they were trained to call them write calls without their family's markers: JSON,
bare, in a fence, or between the tags around the tools in the prompt, and Python in a fence of `tool_code`, as Gemma was
shown it. Qwen2.5-Coder does nothing else. Examples have the same form, so such a call is one only when it is whole,
names one of the tools and begins a line.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ingot.text.tool_formats.format import (
    PYTHON,
    Arguments,
    CallForm,
    Gap,
    JsonCall,
    KeyClose,
    Maybe,
    Name,
    Part,
    TagEnd,
    TextParameters,
    ThinkingFormat,
)


def array_form(
    *before: Part, call: tuple[Part, ...] = (JsonCall(),), after: tuple[Part, ...] = (), **options: Any
) -> CallForm:
    """An array of calls, with what stands before and after it."""
    return CallForm(opening=(*before, "[", Gap()), call=call, joint=", ", closing=(Gap(), "]", *after), **options)


def element_form(tag: str, *call: Part, **options: Any) -> CallForm:
    """Calls between an opening and a closing tag, on lines of their own."""
    return CallForm(opening=(f"<{tag}>", Gap("\n")), call=call, closing=(Gap("\n"), f"</{tag}>"), **options)


def named_tags(
    function: str, parameter: str, gap: str = "\n", key_closes: tuple[KeyClose, ...] = (KeyClose('">'),), **options: Any
) -> tuple[Part, ...]:
    """Tags with a name: `<invoke name="f">`, and in it `<parameter name="x">` for each argument."""
    parameters = TextParameters(f'<{parameter} name="', key_closes, f"</{parameter}>", f"</{function}>", **options)
    return f'<{function} name="', Name(), TagEnd('">', alone=('"/>', '" />')), Gap(gap), parameters


def typed_tags(mark: str, section: str, prefix: str = "") -> CallForm:
    """A section of invocations whose parameters say whether they are text or JSON, with `mark` in each tag."""
    closes = (
        KeyClose('" string="true">', "text"),
        KeyClose('" string="false">', "json"),
        KeyClose('">', written=False),
    )
    tags = f"{mark}{prefix}invoke", f"{mark}{prefix}parameter"
    call = named_tags(*tags, key_closes=closes, wrappers=("arguments", "input"))
    return element_form(f"{mark}{section}", *call, joint="\n", unopened="anywhere")


def assigned_tags(**options: Any) -> tuple[Part, ...]:
    """Tags that a name is assigned to: `<function=f>`, and in it `<parameter=x>` for each argument. Where values are on
    lines of their own, the line's end may close a tag."""
    line = options.get("frame", "")
    closes = (KeyClose(">"), *((KeyClose(line, written=False),) if line else ()))
    parameters = TextParameters("<parameter=", closes, "</parameter>", "</function>", **options)
    return "<function=", Name(), TagEnd(">", instead=line), Gap("\n"), parameters


def keys_and_values(end: str, before: str = "", behind: str = "", **options: Any) -> TextParameters:
    """Each key and each value between tags of its own, in the manner of GLM."""
    key, value = f"{before}arg_key{behind}", f"{before}arg_value{behind}"
    closes = (KeyClose(f"</{key}>"),)
    return TextParameters(f"<{key}>", closes, f"</{value}>", f"</{end}{behind}>", f"<{value}>", **options)


THINK = ThinkingFormat("think", "<think>", "</think>")
INTERLEAVED_THINK = ThinkingFormat("interleaved-think", "<think>", "</think>", interleaved=True)
MISTRAL_THINK = ThinkingFormat("mistral", "[THINK]", "[/THINK]")
GEMMA_THINK = ThinkingFormat("gemma4", "<|channel>thought", "<channel|>")
SEED_THINK = ThinkingFormat("seed-oss", "<seed:think>", "</seed:think>")
MINIMAX_M3_THINK = ThinkingFormat("minimax-m3", "<mm:think>", "</mm:think>", interleaved=True)

LONGCAT_THINK = ThinkingFormat("longcat", "<longcat_think>", "</longcat_think>")
KIMI_K3_THINK = ThinkingFormat("kimi-k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>")
APERTUS_THINK = ThinkingFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>")
COHERE_THINK = ThinkingFormat("cohere", "<|START_THINKING|>", "<|END_THINKING|>")
SOLAR_THINK = ThinkingFormat("solar-open", "<|think|>", "<|end|><|begin|>assistant")
APRIEL_THINK = ThinkingFormat("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")
HUNYUAN_THINK = ThinkingFormat("hunyuan", "<think:opensource>", "</think:opensource>")
KIMI_VL_THINK = ThinkingFormat("kimi-vl", "◁think▷", "◁/think▷")
PLAMO_THINK = ThinkingFormat("plamo3", "<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>")
MARKED_THINK = ThinkingFormat("think-markers", "<|think:start|>", "<|think:end|>")
# K2 Horizon has tags for each effort.
_IFM_FAST = ThinkingFormat("k2-horizon-fast", "<ifm|think_fast>", "</ifm|think_fast>")
_IFM_FASTER = ThinkingFormat("k2-horizon-faster", "<ifm|think_faster>", "</ifm|think_faster>")
IFM_THINK = ThinkingFormat("k2-horizon", "<ifm|think>", "</ifm|think>", variants=(_IFM_FAST, _IFM_FASTER))

THINKING_FORMATS: tuple[ThinkingFormat, ...] = (
    *(SEED_THINK, MINIMAX_M3_THINK, MISTRAL_THINK, GEMMA_THINK, LONGCAT_THINK, KIMI_K3_THINK, APERTUS_THINK),
    *(COHERE_THINK, SOLAR_THINK, HUNYUAN_THINK, APRIEL_THINK, KIMI_VL_THINK, PLAMO_THINK, MARKED_THINK),
    *(IFM_THINK, *IFM_THINK.variants, THINK, INTERLEAVED_THINK),
)


_FENCE = ("```", Maybe("json"), Gap("\n"))
_FENCE_END = (Gap("\n"), "```")

BARE_JSON = CallForm(call=(JsonCall(),), joint="\n", bare=True, whole=True)
BARE_JSON_ARRAY = replace(BARE_JSON, opening=("[", Gap()), joint=", ", closing=(Gap(), "]"))
FENCED_JSON = replace(BARE_JSON, opening=_FENCE, closing=_FENCE_END)
FENCED_JSON_ARRAY = replace(
    BARE_JSON_ARRAY, opening=(*_FENCE, *BARE_JSON_ARRAY.opening), closing=(*BARE_JSON_ARRAY.closing, *_FENCE_END)
)
FENCED_TAGS = replace(
    BARE_JSON,
    opening=("```", Maybe("xml"), Gap("\n"), "<tool_call>", Gap("\n")),
    closing=(Gap("\n"), "</tool_call>", *_FENCE_END),
)
TOOLS_TAGS = replace(BARE_JSON, opening=("<tools>", Gap("\n")), closing=(Gap("\n"), "</tools>"))
TOOLS_ARRAY = replace(
    BARE_JSON_ARRAY,
    opening=("<tools>", Gap("\n"), *BARE_JSON_ARRAY.opening),
    closing=(*BARE_JSON_ARRAY.closing, Gap("\n"), "</tools>"),
)
TOOL_CODE = replace(
    BARE_JSON,
    opening=("```tool_code", Gap("\n")),
    call=(Maybe("print("), Maybe("default_api."), Name(), Gap(), Arguments(PYTHON), Maybe(")")),
    closing=_FENCE_END,
)
TOOL_CODE_LINE = replace(
    BARE_JSON,
    opening=("tool_code", Gap(" "), "=", Gap(" ")),
    call=(Maybe("default_api."), Name(), Gap(), Arguments(PYTHON)),
    joint=None,
    closing=(Gap("\n"), "print(tool_code)"),
)

UNMARKED_FORMS = (
    *(BARE_JSON, BARE_JSON_ARRAY, FENCED_JSON, FENCED_JSON_ARRAY, FENCED_TAGS, TOOLS_TAGS, TOOLS_ARRAY),
    TOOL_CODE,
)
