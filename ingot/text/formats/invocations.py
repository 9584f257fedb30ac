"""Invocations with named parameters: dots, MiniCPM 5, GigaChat 3.5, Step 3."""

from __future__ import annotations

from ingot.text.formats.thinking import THINK
from ingot.text.tool_formats.format import CallForm, Format, Gap, JsonCall, Maybe, UpTo
from ingot.text.tool_formats.shapes import element, named_tags, typed_tags

# dots: a section, each value between lines of its own; also JSON in their place.

DOTS = Format(
    name="dots",
    forms=(
        element("dots_function_call", *named_tags("invoke", "parameter", frame="\n"), joint="\n"),
        element("dots_function_call", JsonCall(), repeats=True),
    ),
    thinking=THINK,
    signs=(("<dots_function_call>",),),
    model_types=("dots1", "dots3_note"),
)

# MiniCPM 5: functions with no tags around them.

MINICPM5 = Format(
    name="minicpm5",
    forms=(CallForm(call=named_tags("function", "param", gap="", quote=("<![CDATA[", "]]>")), unopened="line"),),
    thinking=THINK,
    signs=(("<function name=", "<param name="),),
    model_types=("minicpm5",),
)

# GigaChat 3.5: in the manner of DeepSeek V4.

GIGACHAT35 = Format(
    name="gigachat3.5",
    forms=(typed_tags("｜GCML｜", "tool_calls"),),
    thinking=THINK,
    strips=("<|message_sep|>",),
    signs=(("｜GCML｜",),),
)

# Step 3: each invocation between markers of its own, some of which it may leave out, and its name before it.

_STEP3_CALL = named_tags("steptml:invoke", "steptml:parameter", gap="")
STEP3 = Format(
    name="step3",
    forms=(
        CallForm(
            opening=("<｜tool_calls_begin｜>", Gap("\n")),
            call=(
                *("<｜tool_call_begin｜>", Gap(), Maybe("function", written=True), Gap()),
                *(Maybe("<｜tool_sep｜>", written=True), UpTo('<steptml:invoke name="'), *_STEP3_CALL[1:]),
                *(Gap(), "<｜tool_call_end｜>", Maybe("<｜tool_sep｜>")),
            ),
            joint="\n",
            closing=(Gap("\n"), "<｜tool_calls_end｜>"),
            unopened="anywhere",
        ),
    ),
    thinking=THINK,
    signs=(("<steptml:invoke",), ("<｜tool_calls_begin｜>",)),
    model_types=("step3", "step3_text", "step3_vl"),
)
