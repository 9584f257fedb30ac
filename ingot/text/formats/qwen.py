"""Qwen 2.5 and 3 (Hermes's tags around JSON), and Qwen3-Coder's XML, which Qwen 3.5, Step and Nemotron 3 share.

Models of either kind drift into the other and, under long prompts, into a bracketed line; every Qwen reads all. Those
of the first kind also leave the tags out, Qwen2.5-Coder always.
"""

from __future__ import annotations

from ingot.text.formats.hermes import TAGGED, TAGGED_ARRAY
from ingot.text.formats.notation import JSON
from ingot.text.formats.thinking import THINK
from ingot.text.formats.unmarked import UNMARKED
from ingot.text.tool_formats.format import Arguments, CallForm, Format, Gap, Name
from ingot.text.tool_formats.shapes import assigned_tags, element

XML = element("tool_call", *assigned_tags(frame="\n", close_optional=True), unopened="line")
BRACKET = CallForm(opening=("[Calling tool:", Gap(" ")), call=(Name(), "(", Arguments(JSON), ")"), closing=("]",))

# MiMo V2 writes the same with each value as it stands.
VERBATIM = element("tool_call", *assigned_tags(close_optional=True), unopened="line")

QWEN = Format(
    name="qwen",
    forms=(TAGGED, TAGGED_ARRAY, XML, BRACKET, *UNMARKED),
    thinking=THINK,
    signs=(("<tool_call>", "<|im_start|>"),),
    model_types=("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl"),
)
QWEN3_CODER = Format(
    name="qwen3-coder",
    forms=(XML, TAGGED, TAGGED_ARRAY, BRACKET),
    thinking=THINK,
    signs=(("<function=", "<parameter="),),
    model_types=("qwen3_5", "qwen3_5_moe", "step3p5", "nemotron_h"),
)
MIMO_V2 = Format(
    name="mimo-v2",
    forms=(VERBATIM, TAGGED, TAGGED_ARRAY),
    thinking=THINK,
    signs=(("<function=", "<parameter=", ">value_1</parameter>"),),
    refines="qwen3-coder",
    model_types=("mimo_v2", "mimo_v2_flash"),
)
