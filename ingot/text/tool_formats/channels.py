"""Answers that are messages with headers, which separate thinking, the answer and calls: gpt-oss, Muse, Inkling."""

from __future__ import annotations

from ingot.text.tool_formats.format import JSON, Arguments, CallForm, Channels, Format, JsonCall, Name
from ingot.text.tool_formats.shapes import element_form, named_tags

# gpt-oss (harmony): a channel's name, and behind it or before it the function that is called.

HARMONY = Format(
    "harmony",
    channels=Channels(
        start="<|start|>",
        role="assistant",
        bodies=("<|message|>",),
        kinds=((r"to=functions\.([^\s<]+)", "call"), (r"<\|channel\|>\s*analysis\b", "thinking")),
        ends=("<|end|>", "<|return|>", "<|call|>"),
        call=("<|channel|>commentary to=functions.", Name(), " <|constrain|>json<|message|>", Arguments(JSON)),
        call_end="<|call|>",
        asides=("<|channel|>analysis<|message|>", "<|channel|>commentary<|message|>"),
        answer="<|channel|>final<|message|>",
        begins=("<|channel|>",),
        recipient="to=functions.",
    ),
    signs=(("<|channel|>", "<|message|>"),),
    model_types=("gpt_oss",),
)

# Muse Glimmer and Spark: every message has a recipient. A call's is the function, whom a section of invocations is for.

_MUSE_INVOCATIONS = element_form(
    "atem:function_calls", *named_tags("atem:invoke", "atem:parameter"), joint="\n", unopened="anywhere"
)
MUSE = Format(
    "muse",
    (_MUSE_INVOCATIONS,),
    channels=Channels(
        start="<|start|>",
        role="assistant",
        bodies=("<|message|>",),
        kinds=((r"to=(self|developer)<", "thinking"), (r"to=(user|commentary)<", "text"), (r"to=", "calls")),
        ends=("<|eom|>", "<|eot|>"),
        call=(
            " to=",
            Name(),
            "<|message|>",
            *_MUSE_INVOCATIONS.opening,
            *_MUSE_INVOCATIONS.call,
            *_MUSE_INVOCATIONS.closing,
        ),
        call_end="<|eom|>",
        asides=(" to=self<|message|>", " to=commentary<|message|>"),
        answer=" to=user<|message|>",
        recipient="to=",
        unended=True,
    ),
    signs=(("<atem:function_calls>",), ("<atem:invoke",)),
    model_types=("muse_glimmer", "muse_spark"),
)

# Inkling: the marker that ends a header is the kind of its message; before it an author may be named.

_INKLING_TOOL = "<|content_invoke_tool_json|>"
INKLING = Format(
    "inkling",
    (CallForm(call=(JsonCall("args"),)),),
    channels=Channels(
        start="<|message_model|>",
        role="",
        bodies=(
            *("<|content_thinking|>", "<|content_text|>", _INKLING_TOOL),
            *("<|content_invoke_tool_text|>", "<|content_tool_error|>"),
        ),
        kinds=((r"<\|content_thinking\|>", "thinking"), (r"<\|content_invoke_tool_json\|>", "calls")),
        ends=("<|end_message|>", "<|content_model_end_sampling|>"),
        call=(_INKLING_TOOL, JsonCall("args")),
        call_end="<|end_message|>",
        asides=("<|content_thinking|>",),
        answer="<|content_text|>",
    ),
    signs=(("<|content_invoke_tool_json|>",), ("<|message_model|>",)),
    model_types=("inkling",),
)
