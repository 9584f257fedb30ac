"""Families that write calls between tags, with a tag for each argument.

- Qwen3-Coder's XML, which Qwen 3.5, Step and Nemotron 3 share; and Qwen 2.5 and 3, which write Hermes's JSON. Models of
  either kind drift into the other and, under long prompts, into a bracketed line; every Qwen reads all. Those of the
  second kind also leave the tags out, Qwen2.5-Coder always. Seed-OSS: the same under tags of its own.
- GLM 4.5 and later, LongCat, IQuest, K2 Horizon, Hunyuan 3: keys and values between tags of their own.
- dots, MiniCPM 5, GigaChat 3.5, Step 3: invocations with named parameters. MiniMax M2 and M3: likewise, with thinking
  between them.
- DeepSeek: V3 fences JSON arguments between markers, V3.1 does not fence them, V3.2 and later write tags whose
  parameters say their type.
- Kimi: K2 writes JSON under an id that holds the function's name and number, K3 elements that say types.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ingot.text.parser.arguments import JsonType, JsonTypes
from ingot.text.tool_formats.format import (
    JSON,
    Arguments,
    CallForm,
    Elements,
    Format,
    Gap,
    JsonCall,
    KeyClose,
    Maybe,
    Name,
    Ordinal,
    TagEnd,
    TextParameters,
    ThinkingFormat,
    UpTo,
)
from ingot.text.tool_formats.json_like import TAGGED_JSON, TAGGED_JSON_ARRAY
from ingot.text.tool_formats.shapes import (
    HUNYUAN_THINK,
    IFM_THINK,
    INTERLEAVED_THINK,
    KIMI_K3_THINK,
    LONGCAT_THINK,
    MINIMAX_M3_THINK,
    SEED_THINK,
    THINK,
    UNMARKED_FORMS,
    assigned_tags,
    element_form,
    keys_and_values,
    named_tags,
    typed_tags,
)

QWEN_XML = element_form("tool_call", *assigned_tags(frame="\n", close_optional=True), unopened="line")
QWEN_BRACKET = CallForm(opening=("[Calling tool:", Gap(" ")), call=(Name(), "(", Arguments(JSON), ")"), closing=("]",))

# MiMo V2 writes the same with each value as it stands.
MIMO_VERBATIM = element_form("tool_call", *assigned_tags(close_optional=True), unopened="line")

QWEN = Format(
    "qwen",
    (TAGGED_JSON, TAGGED_JSON_ARRAY, QWEN_XML, QWEN_BRACKET, *UNMARKED_FORMS),
    THINK,
    signs=(("<tool_call>", "<|im_start|>"),),
    model_types=("qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl"),
)
QWEN3_CODER = Format(
    "qwen3-coder",
    (QWEN_XML, TAGGED_JSON, TAGGED_JSON_ARRAY, QWEN_BRACKET),
    THINK,
    signs=(("<function=", "<parameter="),),
    model_types=("qwen3_5", "qwen3_5_moe", "step3p5", "nemotron_h"),
)
MIMO_V2 = Format(
    "mimo-v2",
    (MIMO_VERBATIM, TAGGED_JSON, TAGGED_JSON_ARRAY),
    THINK,
    signs=(("<function=", "<parameter=", ">value_1</parameter>"),),
    refines="qwen3-coder",
    model_types=("mimo_v2", "mimo_v2_flash"),
)


SEED_OSS = Format(
    "seed-oss",
    (element_form("seed:tool_call", *assigned_tags(), joint="\n", unopened="line"),),
    SEED_THINK,
    signs=(("<seed:tool_call>",),),
    model_types=("seed_oss",),
)


GLM = Format(
    "glm",
    (CallForm(opening=("<tool_call>", Gap()), call=(Name(), Gap("\n"), keys_and_values("tool_call"))), TAGGED_JSON),
    THINK,
    strips=("<|begin_of_box|>", "<|end_of_box|>"),
    signs=(("<arg_key>",),),
    model_types=("glm4_moe", "glm4_moe_lite", "glm4v_moe", "glm_moe_dsa", "laguna", "bailing_moe_v3", "spark2_5"),
)
LONGCAT = Format(
    "longcat",
    (
        CallForm(
            opening=("<longcat_tool_call>", Gap()),
            call=(Name(), Gap("\n"), keys_and_values("longcat_tool_call", before="longcat_")),
        ),
        element_form("longcat_tool_call", JsonCall()),
    ),
    LONGCAT_THINK,
    signs=(("<longcat_tool_call>",),),
    model_types=("longcat_flash", "longcat_flash_ngram"),
)


IQUEST = Format(
    "iquest-q1",
    (CallForm(opening=("<iquest_tool_call>", Gap()), call=(Name(), Gap("\n"), keys_and_values("iquest_tool_call"))),),
    THINK,
    signs=(("<iquest_tool_call>",), ("<|iquest_assistant|>",)),
)

# K2 Horizon: a section of calls, whose arguments may state their types; also JSON instead.

_IFM = ("<ifm|tool_call>", Gap())
_IFM_TYPES = ("<ifm|arg_type>", "</ifm|arg_type>")
K2_HORIZON = Format(
    "k2-horizon",
    (
        element_form(
            "ifm|tool_calls",
            *(*_IFM, Name(), Gap("\n"), keys_and_values("ifm|tool_call", before="ifm|", type_tags=_IFM_TYPES)),
            joint="\n",
            unopened="line",
        ),
        element_form("ifm|tool_calls", *_IFM, JsonCall(), Gap("\n"), "</ifm|tool_call>", joint="\n", unopened="line"),
    ),
    IFM_THINK,
    signs=(("<ifm|tool_call",), ("<ifm|think>",)),
    model_types=("k2_horizon",),
)


def _hunyuan_form(suffix: str, *, separated: bool) -> CallForm:
    """A section of calls, in Hunyuan 3 with a separator behind the name."""
    named = (f"<tool_call{suffix}>", Gap(), Name(), Gap(), Maybe(f"<tool_sep{suffix}>", written=separated), Gap("\n"))
    call = (*named, keys_and_values("tool_call", behind=suffix))
    return element_form(f"tool_calls{suffix}", *call, joint="\n", unopened="line")


def _hunyuan_with_suffix(base: Format, template: str) -> Format:
    """The same with the suffix that a checkpoint gives to every tag."""
    found = re.search(r"<think(:[^\s>'\"{}]+)>", template) or re.search(r"HYTK = '(:[^\s']+)'", template)
    if found is None:
        return base
    suffix = found[1]
    form = _hunyuan_form(suffix, separated=base is HUNYUAN_V3)
    return replace(
        base, forms=(form, *base.forms), thinking=ThinkingFormat("hunyuan", f"<think{suffix}>", f"</think{suffix}>")
    )


HUNYUAN_V3 = Format(
    "hunyuan-v3",
    (_hunyuan_form("", separated=True), _hunyuan_form(":opensource", separated=True)),
    THINK,
    signs=(("tool_sep", "arg_key"),),
    model_types=("hy_v3",),
    fitted=_hunyuan_with_suffix,
)
HUNYUAN_V3_SUFFIXED = Format(
    "hunyuan-v3-opensource",
    (_hunyuan_form(":opensource", separated=True), _hunyuan_form("", separated=True)),
    HUNYUAN_THINK,
    signs=(("tool_sep:opensource",), ("tool_sep", "arg_key", ":opensource")),
)
HUNYUAN_V4 = Format(
    "hunyuan-v4",
    (_hunyuan_form("", separated=False),),
    THINK,
    signs=(("<tool_calls", "<arg_key", "<arg_value"),),
    model_types=("hy_v4",),
    fitted=_hunyuan_with_suffix,
)


# dots: a section, each value between lines of its own; also JSON instead.

DOTS = Format(
    "dots",
    (
        element_form("dots_function_call", *named_tags("invoke", "parameter", frame="\n"), joint="\n"),
        element_form("dots_function_call", JsonCall(), repeats=True),
    ),
    THINK,
    signs=(("<dots_function_call>",),),
    model_types=("dots1", "dots3_note"),
)

# MiniCPM 5: functions with no tags around them.

MINICPM5 = Format(
    "minicpm5",
    (CallForm(call=named_tags("function", "param", gap="", quote=("<![CDATA[", "]]>")), unopened="line"),),
    THINK,
    signs=(("<function name=", "<param name="),),
    model_types=("minicpm5",),
)

# GigaChat 3.5: in the manner of DeepSeek V4.

GIGACHAT35 = Format(
    "gigachat3.5", (typed_tags("｜GCML｜", "tool_calls"),), THINK, strips=("<|message_sep|>",), signs=(("｜GCML｜",),)
)

# Step 3: each invocation between markers of its own, some of which it may leave out, and its name before it.

_STEP3_CALL = named_tags("steptml:invoke", "steptml:parameter", gap="")
STEP3 = Format(
    "step3",
    (
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
    THINK,
    signs=(("<steptml:invoke",), ("<｜tool_calls_begin｜>",)),
    model_types=("step3", "step3_text", "step3_vl"),
)


MINIMAX_M2 = Format(
    "minimax-m2",
    (element_form("minimax:tool_call", *named_tags("invoke", "parameter"), joint="\n", unopened="line"),),
    INTERLEAVED_THINK,
    signs=(("<minimax:tool_call>",),),
    model_types=("minimax", "minimax_m2"),
)
_M3_MARK = "]<]minimax[>["
_M3_FORM = CallForm(
    opening=(f"{_M3_MARK}<tool_call>", Gap("\n")),
    call=(
        *(f'{_M3_MARK}<invoke name="', Name(), TagEnd('">', alone=('"/>', '" />'))),
        Elements(mark=_M3_MARK, end=f"{_M3_MARK}</invoke>", open_optional=True),
    ),
    joint="\n",
    closing=(Gap("\n"), f"{_M3_MARK}</tool_call>"),
    unopened="anywhere",
)
MINIMAX_M3 = Format(
    "minimax-m3",
    # The second is what some answers begin with, whose other tags all have the mark.
    (_M3_FORM, replace(_M3_FORM, opening=("<tool_call>", Gap("\n")), unopened="never")),
    MINIMAX_M3_THINK,
    signs=((_M3_MARK,),),
    model_types=("minimax_m3",),
)


_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_SECTION_END = "<｜tool▁calls▁end｜>"
_DEEPSEEK_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK_SEPARATOR = "<｜tool▁sep｜>"
_DEEPSEEK_CALL_END = "<｜tool▁call▁end｜>"

_DEEPSEEK_FENCED = CallForm(
    opening=(_DEEPSEEK_SECTION, Gap()),
    call=(
        *(_DEEPSEEK_CALL, f"function{_DEEPSEEK_SEPARATOR}", Name(), Gap("\n")),
        *("```json", Gap("\n"), Arguments(JSON), Gap("\n"), "```", Gap(), _DEEPSEEK_CALL_END),
    ),
    joint="\n",
    closing=(Gap(), _DEEPSEEK_SECTION_END),
    unopened="anywhere",
)
_DEEPSEEK_PLAIN = CallForm(
    opening=(_DEEPSEEK_SECTION, Gap()),
    call=(_DEEPSEEK_CALL, Name(), _DEEPSEEK_SEPARATOR, Gap(), Arguments(JSON), Gap(), _DEEPSEEK_CALL_END),
    joint="",
    closing=(Gap(), _DEEPSEEK_SECTION_END),
    unopened="anywhere",
)


_DSML = "｜DSML｜"
# Sections as some checkpoints of V4 spell them, and the prefix that its tags sometimes have.
_DSML_MISSPELLED = (
    *(typed_tags(_DSML, section) for section in ("toolcalls", "tool", "r:tool_calls")),
    *(typed_tags(_DSML, section, "r:") for section in ("r:tool_calls", "tool_calls")),
)
_DSML_V32 = typed_tags(_DSML, "function_calls")
_DSML_V4 = typed_tags(_DSML, "tool_calls")
_DSML_V41 = typed_tags(_DSML, " calls", " ")

DEEPSEEK_V3 = Format(
    "deepseek-v3",
    (_DEEPSEEK_FENCED,),
    THINK,
    signs=((_DEEPSEEK_SECTION, "```json"),),
    model_types=("deepseek_v2", "deepseek_v3"),
)
DEEPSEEK_V31 = Format("deepseek-v3.1", (_DEEPSEEK_PLAIN,), THINK, signs=((_DEEPSEEK_SECTION,),))
DEEPSEEK_V32 = Format("deepseek-v3.2", (_DSML_V32, _DSML_V4), THINK, signs=((_DSML,),), model_types=("deepseek_v32",))
DEEPSEEK_V4 = Format(
    "deepseek-v4",
    (_DSML_V4, _DSML_V32, *_DSML_MISSPELLED),
    THINK,
    signs=((_DSML, "tool_calls>"),),
    model_types=("deepseek_v4",),
)
DEEPSEEK_V41 = Format(
    "deepseek-v4.1",
    (_DSML_V41, _DSML_V4),
    THINK,
    signs=((f"{_DSML} calls",), (_DSML, "' calls>")),
    model_types=("deepseek_v41",),
)


KIMI_K2 = Format(
    "kimi-k2",
    (
        CallForm(
            opening=("<|tool_calls_section_begin|>", Gap()),
            call=(
                *("<|tool_call_begin|>", Gap(), Name(numbered=True), Gap(), "<|tool_call_argument_begin|>", Gap()),
                *(Arguments(JSON), Gap(), "<|tool_call_end|>"),
            ),
            joint="",
            closing=(Gap(), "<|tool_calls_section_end|>"),
            unopened="anywhere",
        ),
    ),
    THINK,
    ids="kimi",
    signs=(("<|tool_calls_section_begin|>",), ("<|tool_call_begin|>",)),
    model_types=("kimi_k2", "kimi_k25"),
)


def _kimi_json_close(type: str, *kinds: JsonType) -> KeyClose:
    return KeyClose(f'" type="{type}"<|sep|>', "json", JsonTypes(kinds))


KIMI_K3 = Format(
    "kimi-k3",
    (
        CallForm(
            opening=("<|open|>tools<|sep|>", Gap()),
            call=(
                *('<|open|>call tool="', Name(), '"', Ordinal(' index="', '"'), "<|sep|>", Gap()),
                TextParameters(
                    key_open='<|open|>argument key="',
                    key_closes=(
                        KeyClose('" type="string"<|sep|>', "text"),
                        _kimi_json_close("number", "number", "integer"),
                        _kimi_json_close("integer", "integer"),
                        _kimi_json_close("boolean", "boolean"),
                        _kimi_json_close("object", "object"),
                        _kimi_json_close("array", "array"),
                        _kimi_json_close("null", "null"),
                    ),
                    value_close="<|close|>argument<|sep|>",
                    end="<|close|>call<|sep|>",
                    object_tags=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
                    key_escapes=(("&", "&amp;"), ('"', "&quot;")),
                ),
            ),
            joint="",
            closing=(Gap(), "<|close|>tools<|sep|>"),
            unopened="anywhere",
        ),
    ),
    KIMI_K3_THINK,
    strips=("<|open|>response<|sep|>", "<|close|>response<|sep|>"),
    signs=(("<|open|>", "<|sep|>"),),
    model_types=("kimi_k3",),
)
