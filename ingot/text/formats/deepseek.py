"""DeepSeek: V3 and R1 fence the arguments, V3.1 does not, V3.2 and later write tags whose parameters say their type."""

from __future__ import annotations

from ingot.text.formats.notation import JSON
from ingot.text.formats.thinking import THINK
from ingot.text.tool_formats.format import Arguments, CallForm, Format, Gap, Name
from ingot.text.tool_formats.shapes import typed_tags

_SECTION = "<｜tool▁calls▁begin｜>"
_SECTION_END = "<｜tool▁calls▁end｜>"
_CALL = "<｜tool▁call▁begin｜>"
_SEPARATOR = "<｜tool▁sep｜>"
_CALL_END = "<｜tool▁call▁end｜>"

FENCED = CallForm(
    opening=(_SECTION, Gap()),
    call=(
        _CALL,
        f"function{_SEPARATOR}",
        Name(),
        Gap("\n"),
        "```json",
        Gap("\n"),
        Arguments(JSON),
        Gap("\n"),
        "```",
        Gap(),
        _CALL_END,
    ),
    joint="\n",
    closing=(Gap(), _SECTION_END),
    unopened="anywhere",
)
PLAIN = CallForm(
    opening=(_SECTION, Gap()),
    call=(_CALL, Name(), _SEPARATOR, Gap(), Arguments(JSON), Gap(), _CALL_END),
    joint="",
    closing=(Gap(), _SECTION_END),
    unopened="anywhere",
)


_DSML = "｜DSML｜"
# Sections as some checkpoints of V4 spell them, and the prefix that its tags sometimes have.
_SPELLED = (
    *(typed_tags(_DSML, section) for section in ("toolcalls", "tool", "r:tool_calls")),
    *(typed_tags(_DSML, section, "r:") for section in ("r:tool_calls", "tool_calls")),
)
_V32 = typed_tags(_DSML, "function_calls")
_V4 = typed_tags(_DSML, "tool_calls")
_V41 = typed_tags(_DSML, " calls", " ")

DEEPSEEK_V3 = Format(
    name="deepseek-v3",
    forms=(FENCED,),
    thinking=THINK,
    signs=((_SECTION, "```json"),),
    model_types=("deepseek_v2", "deepseek_v3"),
)
DEEPSEEK_V31 = Format(name="deepseek-v3.1", forms=(PLAIN,), thinking=THINK, signs=((_SECTION,),))
DEEPSEEK_V32 = Format(
    name="deepseek-v3.2",
    forms=(_V32, _V4),
    thinking=THINK,
    signs=((_DSML,),),
    model_types=("deepseek_v32",),
)
DEEPSEEK_V4 = Format(
    name="deepseek-v4",
    forms=(_V4, _V32, *_SPELLED),
    thinking=THINK,
    signs=((_DSML, "tool_calls>"),),
    model_types=("deepseek_v4",),
)
DEEPSEEK_V41 = Format(
    name="deepseek-v4.1",
    forms=(_V41, _V4),
    thinking=THINK,
    signs=((f"{_DSML} calls",), (_DSML, "' calls>")),
    model_types=("deepseek_v41",),
)
