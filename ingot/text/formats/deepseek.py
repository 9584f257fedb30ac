"""DeepSeek: V3 and R1 fence the arguments, V3.1 does not, V3.2 and V4 write tags whose parameters say their type."""

from __future__ import annotations

from ingot.text.formats.notation import JSON
from ingot.text.formats.shapes import element, named_tags
from ingot.text.formats.table import Arguments, CallForm, Format, Gap, KeyClose, Name
from ingot.text.formats.thinking import THINK

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


def _tagged(section: str) -> CallForm:
    typed = (KeyClose('" string="true">', "text"), KeyClose('" string="false">', "json"))
    call = named_tags("｜DSML｜invoke", "｜DSML｜parameter", key_closes=typed, wrappers=("arguments", "input"))
    return element(f"｜DSML｜{section}", *call, joint="\n", unopened="anywhere")


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
    forms=(_tagged("function_calls"), _tagged("tool_calls")),
    thinking=THINK,
    signs=(("｜DSML｜",),),
    model_types=("deepseek_v32", "deepseek_v4"),
)
