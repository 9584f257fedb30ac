"""MiniCPM 5: functions with named parameters and no tags around them."""

from __future__ import annotations

from ingot.text.formats.shapes import named_tags
from ingot.text.formats.table import CallForm, Format
from ingot.text.formats.thinking import THINK

MINICPM5 = Format(
    name="minicpm5",
    forms=(CallForm(call=named_tags("function", "param", gap="", quote=("<![CDATA[", "]]>")), unopened="line"),),
    thinking=THINK,
    signs=(("<function name=", "<param name="),),
    model_types=("minicpm5",),
)
